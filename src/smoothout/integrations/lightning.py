"""SmoothOut in Lightning: one callback.

Lightning calls `training_step`, not the module's forward, and does so inside `optimizer.step(closure)`. So what
`SmoothOut.attach` hooks here is the strategy's `training_step`, dressed as a module: noise comes before it (before
autocast, DDP's forward and FSDP2's gathering too) and goes when the backward of its loss ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import nn

from smoothout.attach import Attachment
from smoothout.checks import DEEPSPEED, FSDP1, check_model
from smoothout.integrations.arguments import Arguments, check_arguments, missing
from smoothout.select import Predicate
from smoothout.smooth import SmoothOut

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        try:  # the same library under its older name
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ImportError as absent:
            raise missing("Lightning", "lightning") from absent

_UNSUPPORTED_STRATEGIES = {
    "DeepSpeedStrategy": DEEPSPEED,
    "FSDPStrategy": f"{FSDP1}, in Lightning by strategy=ModelParallelStrategy()",
    "XLAFSDPStrategy": FSDP1,
}


class SmoothOutCallback(Callback):
    """Trains a LightningModule with SmoothOut; with `scale="filter"` with AdaSmoothOut.

    Validation, checkpoints, gradient clipping and whatever runs after an exception find clean weights. The position in
    the noise is part of the checkpoint. Batches of one accumulation share one θ. Automatic optimization only.

    Args:
        strength: a, the size of the noise.
        draw: `"step"`: the same θ for every batch until the optimizer steps; `"forward"`: a new one for each batch.
        arguments: those of `SmoothOut`: noise, scale, schedule, select, seed, denoise, shared_noise.

    Examples:
        >>> trainer = Trainer(callbacks=[SmoothOutCallback(0.15, scale="filter")])
    """

    def __init__(
        self,
        strength: float = 0.0375,
        *,
        draw: Literal["step", "forward"] = "step",
        **arguments: Unpack[Arguments],
    ) -> None:
        check_arguments(strength, draw, arguments)
        self._strength, self._draw, self._arguments = strength, draw, arguments
        self.smooth: SmoothOut | None = None  # made when training starts; stays afterwards, for its summary
        self._training_step: _TrainingStep | None = None
        self._attachment: Attachment | None = None
        self._loaded: dict[str, Any] | None = None  # a checkpoint's state, until there is a SmoothOut to take it
        self._loaded_by_hand: dict[str, Any] | None = None  # by the user, while no Trainer is at work
        self._trainer_at_work = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what would go wrong before anything is trained."""
        # Lightning loads after this: what it loaded before is of a checkpoint that was tested, or not begun.
        self._loaded, self._trainer_at_work = self._loaded_by_hand, True
        if stage != "fit":
            return
        for base in type(trainer.strategy).__mro__:
            if base.__name__ in _UNSUPPORTED_STRATEGIES:
                raise ValueError(f"strategy={base.__name__}: {_UNSUPPORTED_STRATEGIES[base.__name__]}")
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} has automatic_optimization=False, so its training_step calls backward() "
                "and step() itself: leave this callback out and put `with smooth.perturbed():` around the backward "
                "there (smooth = SmoothOut(self, ...))"
            )
        check_model(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Here and not earlier: the weights are where they will be trained, and learning-rate finders are done."""
        self._detach()
        same_module = self._training_step is not None and self._training_step.module is pl_module
        former = self.smooth if same_module else None
        strength = self._strength if former is None else former.strength
        arguments = self._arguments | {"select": _without_prefix(self._arguments.get("select"))}
        # Anew in every fit, since layers may have been unfrozen or replaced, but from where the last one ended.
        training_step = _TrainingStep(pl_module)
        self.smooth, self._training_step = SmoothOut(training_step, strength, **arguments), training_step
        if former is not None:
            position = {"seed": former.perturbation.seed, "step": former.step_count, "draw": former._draw}
            self.smooth.load_state_dict(self.smooth.state_dict() | position)
            if self._loaded is not None and self._loaded | position == self._loaded:
                self._loaded = None  # where it is already; after a search for a learning rate, with the former layers
        if self._loaded is not None:
            self.smooth.load_state_dict(self._loaded)
        self._loaded = self._loaded_by_hand = None
        self._attachment = self.smooth.attach(trainer.optimizers, draw=self._draw)
        training_step.replace(trainer.strategy)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Stochastic weight averaging ends with an epoch for BatchNorm's statistics, without backward: no noise there.
        if getattr(trainer.fit_loop.epoch_loop.automatic_optimization, "_skip_backward", False):
            self._detach()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()
        self._trainer_at_work = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer_at_work = False

    def state_dict(self) -> dict[str, Any]:
        """Lightning saves this in every checkpoint."""
        if self._loaded is not None:
            return self._loaded
        return {} if self.smooth is None else self.smooth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this before training starts, or in the middle of it (after a search)."""
        if self._attachment is not None and self.smooth is not None:
            self.smooth.load_state_dict(state_dict)
        else:
            self._loaded = state_dict
            if not self._trainer_at_work:
                self._loaded_by_hand = state_dict

    def _detach(self) -> None:
        if self._attachment is not None and self._training_step is not None:
            self._attachment.remove()  # takes noise back too
            self._attachment = None
            self._training_step.put_back()


class _TrainingStep(nn.Module):
    """A strategy's `training_step` as a module, and so with hooks. `eval()` of the model does not reach it."""

    def __init__(self, lightning_module: LightningModule) -> None:
        super().__init__()
        self.module = lightning_module  # this name, as DDP's, is left out of the state: it fits the bare module
        self._strategy: Any = None
        self._original: Any = None

    def replace(self, strategy: Any) -> None:
        self._strategy, self._original = strategy, strategy.training_step
        strategy.training_step = self

    def put_back(self) -> None:
        if self._strategy is not None:
            del self._strategy.training_step  # the instance's: the method of its class is left
            self._strategy = self._original = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)


def _without_prefix(select: Predicate | None) -> Predicate | None:
    """The user's predicate sees the names of the LightningModule's parameters."""
    if select is None:
        return None
    return lambda name, parameter, module: select(name.removeprefix("module."), parameter, module)
