"""How a step finds its gradient: one protocol for plain training, SmoothOut, AdaSmoothOut and their rivals.

To add a method: write a class with the protocol's members (or derive from `Plain` and override what differs), and
put an entry into METHODS. `--method` reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smoothout import SmoothOut, SmoothOutEnsemble
from smoothout.filters import Filter, Scale, as_scale
from smoothout.lab.train.ghost_step import Batch, GhostStep, Seen, add_up
from smoothout.lab.train.strength import strength_schedule
from smoothout.noise import Bernoulli, Noise, as_noise
from smoothout.select import Predicate, everything, only_normalisation

if TYPE_CHECKING:
    from smoothout.lab.config import Config

TrainingImages = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class StepResult:
    """One update: the batch's mean loss and right answers as the gradient saw them, on the device, and its cost.

    Args:
        evaluations: passes of back-propagation over the whole batch: 1 for plain training, n for n draws, 2 for SAM.
    """

    loss: Tensor
    correct: Tensor
    evaluations: float = 1


class Method(Protocol):
    """What the training loop asks of a method."""

    @property
    def strength(self) -> float:
        """The strength of the noise now; 0 where there is none."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """One update of the weights from one batch."""
        ...

    def judged(self, training_images: TrainingImages) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that the method answers for: an average's, for methods that average.

        Args:
            training_images: gives the training images once, for methods that must measure BatchNorm statistics anew.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Plain:
    """The gradient at the weights as they are."""

    strength = 0.0

    def __init__(self, update: GhostStep) -> None:
        self.update = update

    def step(self, batch: Batch) -> StepResult:
        seen = self._backward(batch)
        self.update.update()
        return StepResult(*seen)

    def _backward(self, batch: Batch) -> Seen:
        """Add up the gradients of all ghosts, at the weights as they are now."""
        return add_up(map(self.update.backward, self.update.ghosts(batch)))

    def judged(self, training_images: TrainingImages) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Smoothed(Plain):
    """SmoothOut and AdaSmoothOut: the gradient at noisy weights, the update at clean ones (Algorithm 1).

    Args:
        draws: of noise a step; None: one for every ghost batch, which then sees each image once all the same.
        clean_share: of the ghost batches, which come last and see the weights as they are: the gradient is that of
            C̄ and C mixed (m-RWP of Li et al., 2024).
        ghosts_per_draw: where draws is None, how many ghosts in turn share one.
    """

    def __init__(
        self,
        update: GhostStep,
        smooth: SmoothOut,
        draws: int | None = 1,
        antithetic: bool = False,
        clean_share: float = 0.0,
        ghosts_per_draw: int = 1,
    ) -> None:
        super().__init__(update)
        self.smooth, self.draws, self.antithetic = smooth, draws, antithetic
        self.clean_share, self.ghosts_per_draw = clean_share, ghosts_per_draw

    def noisy_ghosts(self, ghosts: int) -> int:
        """How many of so many see noise; one at least."""
        return max(1, ghosts - int(self.clean_share * ghosts + 0.5))

    @property
    def strength(self) -> float:  # pyrefly: ignore[bad-override]
        return self.smooth.current_strength

    def step(self, batch: Batch) -> StepResult:
        if self.draws is None:
            seen = self._draws_for_ghosts(batch)
        elif self.draws == 1:
            seen = self._one_draw(batch)
        else:
            seen = self._several_draws(batch, self.draws)
        self.update.update()
        return StepResult(*seen, evaluations=self.draws or 1)

    def _one_draw(self, batch: Batch) -> Seen:
        with self.smooth.perturbed():
            return self._backward(batch)

    def _several_draws(self, batch: Batch, n: int) -> Seen:
        with self.smooth.samples(n, self.antithetic) as draws:
            seen = add_up(self.update.backward(ghost, 1 / n) for _ in draws for ghost in self.update.ghosts(batch))
        return Seen(seen.loss, seen.correct / n)

    def _draws_for_ghosts(self, batch: Batch) -> Seen:
        backward, ghosts = self.update.backward, self.update.ghosts(batch)
        noisy, together = self.noisy_ghosts(len(ghosts)), self.ghosts_per_draw
        sharing = [ghosts[first : min(first + together, noisy)] for first in range(0, noisy, together)]
        with self.smooth.samples(len(sharing), self.antithetic and len(sharing) % 2 == 0) as draws:
            seen = [backward(ghost) for group, _ in zip(sharing, draws) for ghost in group]
        return add_up([*seen, *map(backward, ghosts[noisy:])])

    def state_dict(self) -> dict[str, Any]:
        return self.smooth.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.smooth.load_state_dict(state)


class FixedCopies(Plain):
    """Deterministic SmoothOut (Eq. 1): the gradient of the mean loss of N copies whose noise never changes."""

    def __init__(self, update: GhostStep, ensemble: SmoothOutEnsemble) -> None:
        super().__init__(update)
        self.ensemble, self.strength = ensemble, ensemble.strength

    def step(self, batch: Batch) -> StepResult:
        seen = add_up(map(self._backward_of_copies, self.update.ghosts(batch)))
        self.update.update()
        return StepResult(*seen, evaluations=self.ensemble.copies)

    def _backward_of_copies(self, ghost: Batch) -> Seen:
        right = torch.zeros((), device=ghost.labels.device)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            with self.update.precision():
                outputs = model(batch[0])
            right.add_((outputs.detach().argmax(1) == batch[1]).sum())
            return F.cross_entropy(outputs.float(), batch[1])

        loss = self.ensemble.loss(loss_fn, (ghost.images, ghost.labels)) * (len(ghost.labels) / ghost.total)
        self.update.scaler.scale(loss).backward()
        return Seen(loss.detach(), right / self.ensemble.copies)


@dataclass(frozen=True)
class MethodEntry:
    """A method by name.

    Args:
        title: in tables.
        make: from (configuration, update, updates in all of training, updates an epoch).
        takes_noise: whether the noise settings mean anything to it.
        scale: of its noise, unless another is given.
        radius: default ρ of a method that climbs instead of drawing noise; the setting `strength` is its ρ.
        evaluations: passes a step, for a single draw.
        settings: what makes the method itself, over the preset's.
        ignores: settings of noise that mean nothing to it, though it takes noise.
    """

    title: str
    summary: str
    make: Callable[[Config, GhostStep, int, int], Method]
    takes_noise: bool = False
    scale: str = "absolute"
    radius: float | None = None
    evaluations: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        """Of the setting `strength`, in tables."""
        return "a" if self.radius is None else "ρ"


def smoothing(config: Config, model: nn.Module, steps: int, steps_per_epoch: int) -> SmoothOut:
    """The SmoothOut that a configuration asks for, on this model."""
    return SmoothOut(
        model,
        config.strength,
        noise=noise_of(config),
        scale=scale_of(config),
        schedule=strength_schedule(config.strength_schedule, steps, round(config.strength_warmup * steps_per_epoch)),
        select=selection_of(config),
        seed=config.seed,
        denoise=config.denoise,
        shared_noise=config.shared_noise,
    )


def noise_of(config: Config) -> Noise:
    """The raw noise of a configuration."""
    return Bernoulli(config.noise_p) if config.noise == "bernoulli" else as_noise(config.noise)


def selection_of(config: Config) -> Predicate | None:
    """Which parameters take noise; None: the default, all but those of normalisation layers."""
    if not config.perturb_bn:
        return None
    return everything if config.perturb_weights else only_normalisation


def scale_of(config: Config) -> Scale:
    """The scaling of a configuration."""
    return Filter(config.scale_epsilon) if config.scale == "filter" else as_scale(config.scale)


def _smoothed(config: Config, update: GhostStep, steps: int, steps_per_epoch: int) -> Method:
    smooth = smoothing(config, update.model, steps, steps_per_epoch)
    draws = config.draws_number, config.antithetic, config.clean_share, config.ghosts_per_draw
    return Smoothed(update, smooth, *draws)


def _fixed_copies(config: Config, update: GhostStep, steps: int, steps_per_epoch: int) -> Method:
    if config.draws_number is None:
        raise ValueError(f"method='ensemble' with draws={config.draws!r}: give the number of copies")
    ensemble = SmoothOutEnsemble(
        update.model,
        config.draws_number,
        config.strength,
        noise=noise_of(config),
        scale=scale_of(config),
        select=selection_of(config),
        seed=config.seed,
    )
    return FixedCopies(update, ensemble)


def _sharpness_aware(config: Config, update: GhostStep, steps: int, steps_per_epoch: int) -> Method:
    from smoothout.lab.rivals import SharpnessAware  # which builds on this file

    return SharpnessAware(update, config.strength, adaptive=config.method == "asam")


def _swa(config: Config, update: GhostStep, steps: int, steps_per_epoch: int) -> Method:
    from smoothout.lab.rivals import swa

    return swa(update, config.swa_start, steps, steps_per_epoch)


def _ema(config: Config, update: GhostStep, steps: int, steps_per_epoch: int) -> Method:
    from smoothout.lab.rivals import ema

    return ema(update, config.ema_decay)


METHODS: dict[str, MethodEntry] = {
    "plain": MethodEntry(
        "baseline", "the baseline: no noise", lambda config, update, steps, steps_per_epoch: Plain(update)
    ),
    "smoothout": MethodEntry("SmoothOut", "the gradient at w + θ, θ of strength a", _smoothed, takes_noise=True),
    "adasmoothout": MethodEntry(
        "AdaSmoothOut", "the same, ‖θᵢ‖ = a·‖wᵢ‖ per filter", _smoothed, takes_noise=True, scale="filter"
    ),
    "ensemble": MethodEntry(
        "ensemble",
        "the mean loss of as many fixed copies as there are draws",
        _fixed_copies,
        takes_noise=True,
        ignores=("strength_schedule", "strength_warmup", "denoise", "antithetic"),
    ),
    # Its authors' deviation γ·‖wᵢ‖ an element is a = γ·√k for a filter of k elements.
    "lpfsgd": MethodEntry(
        "LPF-SGD",
        "Gaussian noise with ‖θᵢ‖ = a·‖wᵢ‖ per filter, a rising along half a cosine",
        _smoothed,
        takes_noise=True,
        scale="filter",
        settings={"noise": "gaussian", "strength_schedule": "cosine"},
    ),
    "sam": MethodEntry("SAM", "the gradient at w + ρ·g/‖g‖", _sharpness_aware, radius=0.05, evaluations=2),
    "asam": MethodEntry("ASAM", "the gradient at w + ρ·w²g/‖w·g‖", _sharpness_aware, radius=0.5, evaluations=2),
    "swa": MethodEntry("SWA", "plain; judged at the mean over the ends of the last epochs", _swa),
    "ema": MethodEntry("EMA", "plain; judged at the exponential moving average over updates", _ema),
}
