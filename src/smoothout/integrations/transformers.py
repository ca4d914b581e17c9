"""SmoothOut in Transformers' Trainer: one callback.

The Trainer calls the model's forward, so `SmoothOut.attach` does the work. What is left is to attach when the optimizer
exists, to keep the position in the noise in `trainer_state.json` of every checkpoint, and to refuse what cannot work.
"""

from __future__ import annotations

import json
import weakref
from typing import Any, Literal, Unpack

from torch import nn
from torch.optim import Optimizer

from smoothout.attach import Attachment
from smoothout.checks import DATA_PARALLEL, DEEPSPEED
from smoothout.integrations.arguments import Arguments, check_arguments, missing
from smoothout.smooth import SmoothOut

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as absent:
    raise missing("Transformers", "transformers") from absent


# A Trainer that an exception ended leaves its callback attached; a new Trainer of the same model brings another.
_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


class SmoothOutCallback(TrainerCallback, ExportableState):
    """Trains with SmoothOut; with `scale="filter"` with AdaSmoothOut.

    Evaluation, clipping and checkpoints find clean weights. A run resumed from a checkpoint draws the noise that an
    uninterrupted one would have. Micro-batches of one update share one θ.

    The Trainer tells callbacks nothing of an exception. After one in the middle of a backward, passes without gradients
    and `state_dict()` (so `save_pretrained()` too) still see clean weights, and `train(resume_from_checkpoint=…)` goes
    on; `restore()` takes the noise out of the parameters themselves.

    Args:
        strength: a, the size of the noise.
        draw: `"step"`: the same θ for every micro-batch of an update; `"forward"`: a new one for each.
        arguments: those of `SmoothOut`: noise, scale, schedule, select, seed, denoise, shared_noise.

    Examples:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[SmoothOutCallback(0.15, scale="filter")])
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
        self._attachment: Attachment | None = None

    def restore(self) -> None:
        """After an exception: take the noise back, if there is any."""
        if self._attachment is not None:
            self._attachment.restore()

    # ---- what the Trainer calls --------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what would go wrong before anything is trained."""
        launched_by_accelerate = getattr(getattr(args, "distributed_state", None), "distributed_type", None)
        if args.deepspeed is not None or str(launched_by_accelerate).endswith("DEEPSPEED"):
            raise ValueError(DEEPSPEED)
        if args.n_gpu > 1:
            raise ValueError(f"this process sees {args.n_gpu} GPUs and the Trainer uses DataParallel: {DATA_PARALLEL}")
        lost = [name for name, value in self._arguments.items() if not _is_plain(value)]
        if args.restore_callback_states_from_checkpoint and lost:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes callbacks anew from what a JSON file can hold, and "
                f"would lose {', '.join(lost)}: leave it False, SmoothOutCallback finds its position without it"
            )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self.on_init_end(args, state, control)  # a callback that was added later has not been asked
        assert model is not None, "the Trainer hands over the model it trains"
        assert optimizer is not None, "and the optimizer"
        self._detach()
        for left in [attachment for attachment in _attached if attachment._model is model]:
            left.remove()
        self.smooth = SmoothOut(model, self._strength, **self._arguments)
        position = self._saved_position(state)
        if state.global_step > 0 and position is not None:  # resumed
            self.smooth.load_state_dict(position)
        self._attachment = self.smooth.attach(optimizer, draw=self._draw)
        _attached.add(self._attachment)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The Trainer writes this into the `trainer_state.json` of every checkpoint."""
        plain = {name: value for name, value in self._arguments.items() if _is_plain(value)}
        return {
            "args": {"strength": self._strength, "draw": self._draw, **plain},
            "attributes": {"position": None if self.smooth is None else self.smooth.state_dict()},
        }

    def _saved_position(self, state: TrainerState) -> dict[str, Any] | None:
        callbacks: Any = state.stateful_callbacks  # declared as a list, but a dictionary by class name
        # A checkpoint that was made without this callback has no place for its state, which saving the next one needs.
        saved = callbacks.setdefault(type(self).__name__, {})
        if isinstance(saved, list):
            raise ValueError("two SmoothOutCallbacks in one Trainer: noise does not nest, leave one out")
        return saved.get("attributes", {}).get("position")

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()  # takes noise back too
            self._attachment = None


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
