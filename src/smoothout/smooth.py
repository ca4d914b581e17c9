"""SmoothOut and AdaSmoothOut: Algorithm 1 of the paper.

for each batch x_t:
    w_t ← w_t + θ_t                 perturbation     `perturbed()` enters
    g_t = ∂Q(x_t, w_t)/∂w_t         back-propagation the user's own code
    w_t ← w_t − θ_t, exactly        de-noising       `perturbed()` leaves
    w_{t+1} = w_t − η_t·g_t         updating         the user's own optimizer
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from smoothout.attach import Attachment
from smoothout.checks import check_model, check_strength, is_whole, seed_number
from smoothout.filters import Filter, Scale, as_scale
from smoothout.late_backward import LateBackwardGuard
from smoothout.noise import Noise, as_noise
from smoothout.perturb import Perturbation
from smoothout.schedule import Schedule, check_schedule, factor
from smoothout.select import Predicate, Selected, frozen_parameters, not_normalisation, select_parameters
from smoothout.sharding import is_dtensor
from smoothout.summary import Summary, summarise


class SmoothOut:
    """Trains on C̄(w) = E[C(w + θ)]: perturb, take the gradient there, put the weights back exactly, step.

    Args:
        model: any module; its parameters are perturbed in place and put back bit for bit.
        strength: a, the size of the noise. Any time later it may be set anew (`smooth.strength = …`).
        noise: `"uniform"`, `"gaussian"`, `"rademacher"`, or an object with `draw(parameter, generator)`.
        scale: `"absolute"` θ = a·n; `"filter"` ‖θᵢ‖ = a·‖wᵢ‖ for every filter i; `"weight"` θ = a·w·n.
        schedule: step → factor on the strength, see `smoothout.schedule`.
        select: predicate (name, parameter, module) → bool on the trainable floating-point parameters; by default all
            but those of normalisation layers. Asked once: after unfreezing layers make a new SmoothOut.
        seed: of a private generator: dropout, data order and the global generators are never touched.
        denoise: False leaves θ in the weights (the paper's ablation), and then all ranks draw the same; an exception
            still takes it back.
        shared_noise: under DDP all ranks draw the same θ; by default each its own, so that N ranks average N draws.

    Examples:
        >>> smooth = SmoothOut(model, strength=0.0375)
        >>> for x, y in loader:
        ...     with smooth.perturbed():
        ...         loss_fn(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        strength: float = 0.0375,
        *,
        noise: str | Noise = "uniform",
        scale: str | Scale = "absolute",
        schedule: Schedule | None = None,
        select: Predicate | None = None,
        seed: int = 0,
        denoise: bool = True,
        shared_noise: bool = False,
    ) -> None:
        check_model(model)
        self.strength = strength
        if schedule is not None:
            check_schedule(schedule)
        for name, flag in (("denoise", denoise), ("shared_noise", shared_noise)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r}: give True or False")
        self.schedule, self.denoise = schedule, denoise
        shared_noise = shared_noise or not denoise  # or what stays would leave each rank with weights of its own
        self._perturbation = make_perturbation(model, noise, scale, select, seed, shared_noise)
        self._select, self._frozen = select, frozen_parameters(model)
        self._guard = LateBackwardGuard(model, self._perturbation)
        self._attachment: Attachment | None = None
        self._sampling = False  # inside samples(), where between two draws no noise is applied
        self._step = 0
        self._draw = 0

    # ---- Algorithm 1 -------------------------------------------------------------------------------------------------

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """One draw: inside, the weights are w + θ; on every way out they are w, bit for bit, in the same storage."""
        self._refuse_if_busy("perturbed()")
        w, a = self._perturbation, self.current_strength
        try:
            w.apply(a, self._step)
            with self._guard.watching():
                yield
            self._denoise()
        except BaseException:
            self._take_back()
            raise
        finally:
            self._step += 1

    @contextmanager
    def samples(self, n: int, antithetic: bool = False) -> Iterator[Iterator[int]]:
        """n draws for one update: iterate over what this yields, one backward of `loss / n` in each turn.

        Args:
            n: the number of draws.
            antithetic: draws come in pairs +θ, −θ, which cancels odd orders of the noise; n must be even.

        Examples:
            >>> with smooth.samples(4) as draws:
            ...     for _ in draws:
            ...         (loss_fn(model(x), y) / 4).backward()
        """
        if not is_whole(n) or n < 1 or (antithetic and n % 2):
            raise ValueError(f"samples(n={n!r}): n is a whole number of at least 1, and even with antithetic=True")
        self._refuse_if_busy("samples()")
        w, a, taken = self._perturbation, self.current_strength, 0

        def draws() -> Iterator[int]:
            nonlocal taken
            for i in range(n):
                if not self._sampling:
                    raise RuntimeError("samples() is over: iterate over its draws inside the `with` block")
                if w.active and self.denoise:
                    w.restore()
                add = w.add if w.active else w.apply
                add(a, self._step, i // 2 if antithetic else i, -1.0 if antithetic and i % 2 else 1.0)
                self._guard.new_draw()
                taken += 1
                yield i
            self._denoise()

        try:
            self._sampling = True
            with self._guard.watching():
                yield draws()
            self._denoise()
            if not taken:
                raise RuntimeError("samples() ended without a draw, so without noise: `for _ in draws:` takes them")
            if a and self._guard.forwards[False] and not self._guard.forwards[True]:
                warnings.warn(  # no error: loops that call a part of the model alone are not seen
                    "no forward inside samples() was under noise: each draw lasts until the next one is taken, so do "
                    "the passes in `for _ in draws:`, not after list(draws)",
                    stacklevel=3,
                )
        except BaseException:
            self._take_back()
            raise
        finally:
            self._sampling = False
            self._step += 1

    def attach(
        self, optimizer: Optimizer | Sequence[Optimizer], draw: Literal["step", "forward"] = "step"
    ) -> Attachment:
        """Hooks only: not a line of the loop changes. A forward in training mode with gradients enabled perturbs, and
        the weights come back when its backward ends, before clipping, the step, evaluation or saving.

        Args:
            optimizer: whose `step()` ends a step of the schedule; a list for several.
            draw: `"step"`: the same θ for every micro-batch until the optimizer steps; `"forward"`: a new one each.

        Returns:
            A handle with `.restore()` (take the noise of a forward back whose backward never came) and `.remove()`.
        """
        if self._perturbation.active or self._sampling:
            raise RuntimeError("attach() while noise is applied: leave the context, or finish the backward, first")
        attached = self._attachment is not None and not self._attachment.removed
        attachment = self._attachment if attached else Attachment(self, draw)
        assert attachment is not None
        try:
            attachment.add(optimizer, draw)
        except BaseException:
            if not attached:
                attachment.remove()
            raise
        self._attachment = attachment
        return attachment

    def _denoise(self) -> None:
        if self._perturbation.active:
            self._perturbation.restore() if self.denoise else self._perturbation.keep()

    def _take_back(self) -> None:
        """After an exception: noise goes, and so does whatever else was written; the exception says what happened."""
        if self._perturbation.active:
            self._perturbation.restore(check=False)

    def _refuse_if_busy(self, what: str) -> None:
        if self._attachment is not None and not self._attachment.removed:
            raise RuntimeError(f"{what} on a SmoothOut that is attached: the hooks do it already; remove() them first")
        if self._perturbation.active or self._sampling:
            raise RuntimeError(f"{what} inside perturbed() or samples() of the same SmoothOut: noise does not nest")

    # ---- strength and position ---------------------------------------------------------------------------------------

    @property
    def strength(self) -> float:
        """a, before the schedule."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = check_strength(value)

    @property
    def step_count(self) -> int:
        """Steps of the schedule so far: one `perturbed()` or `samples()` is one; attached, one `optimizer.step()`."""
        return self._step

    @property
    def current_strength(self) -> float:
        """a times the schedule's factor at this step."""
        return self.strength * factor(self.schedule, self._step)

    @property
    def perturbation(self) -> Perturbation:
        """What draws and restores, for code that arranges a step's draws itself, such as a captured CUDA graph."""
        return self._perturbation

    def count_step(self) -> None:
        """One step more, whose noise was drawn by way of `perturbation`."""
        self._step += 1

    def _left_out(self) -> list[str]:
        """Parameters that were frozen when this was made, train now, and would be chosen: they take no noise."""
        takes_noise = not_normalisation if self._select is None else self._select
        found = ((name, owner, owner._parameters.get(slot)) for name, owner, slot in self._frozen)
        return [name for name, owner, p in found if p is not None and p.requires_grad and takes_noise(name, p, owner)]

    def summary(self) -> Summary:
        """Per tensor: how many filters, and ‖θ‖/‖w‖ of the draw that comes next. `print` it."""
        return summarise(self._perturbation, self.current_strength, self._step)

    # ---- resume ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Seed, position and generator kind: with it a resumed run draws the noise an uninterrupted one would have."""
        return {
            "seed": self._perturbation.seed,
            "step": self._step,
            "draw": self._draw,
            "generator": self._perturbation.generator_kind,
            "strength": self.strength,
            "parameters": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}: give what state_dict() returned")
        missing = {"seed", "step", "draw", "generator", "parameters"} - set(state)
        if missing:
            raise ValueError(f"this is no state of a SmoothOut: {sorted(missing)} missing, it has {sorted(state)}")
        for key in ("seed", "step", "draw"):
            if not is_whole(state[key]) or not (-(2**63) if key == "seed" else 0) <= state[key] < 2**63:
                raise ValueError(f"this is no state of a SmoothOut: its {key!r} is {state[key]!r}")
        if self._perturbation.active or self._sampling:
            raise RuntimeError(
                "load_state_dict() while noise is applied: leave the context first, or restore() the handle of attach()"
            )
        if state["parameters"] != self._fingerprint():
            raise ValueError(
                f"this state is of another model or selection: its perturbed tensors were {state['parameters']!r}, "
                f"here they are {self._fingerprint()!r}"
            )
        self._perturbation.find_weights()
        if state["generator"] != self._perturbation.generator_kind:
            warnings.warn(
                f"the state was saved with noise from the {state['generator']!r} generator, here it is "
                f"{self._perturbation.generator_kind!r}: the same law, other numbers than an uninterrupted run's",
                stacklevel=2,
            )
        if state.get("strength", self.strength) != self.strength:
            warnings.warn(
                f"the state was saved with strength={state['strength']!r}, here it is {self.strength!r}, which stays: "
                "set smooth.strength to go on as an uninterrupted run would",
                stacklevel=2,
            )
        self._perturbation.seed = state["seed"]
        self._step, self._draw = state["step"], state["draw"]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not attached: hooks stay with the model and the optimizer they were made for."""
        if self._perturbation.active or self._sampling:
            raise RuntimeError("a SmoothOut cannot be copied or pickled while its noise is applied: do it afterwards")
        return self.__dict__ | {"_attachment": None, "_select": None, "_frozen": []}  # a lambda cannot be pickled

    def _fingerprint(self) -> str:
        shapes = [(s.plain_name, tuple(s.parameter.shape)) for s in self._perturbation.selected]
        elements = sum(math.prod(shape) for _, shape in shapes)
        return f"{len(shapes)} tensors, {elements} elements, {hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]}"

    def __repr__(self) -> str:
        p = self._perturbation
        return f"{type(self).__name__}(strength={self.strength}, noise={p.noise}, scale={p.scale}, step={self._step})"


class AdaSmoothOut(SmoothOut):
    """SmoothOut with noise scaled to each filter: ‖θ̂ᵢ‖ = strength · ‖wᵢ‖ for every filter i.

    Its step ignores ∂θ̂/∂w: "the exact gradient of C̄" holds for `SmoothOut` alone.
    """

    def __init__(
        self, model: nn.Module, strength: float = 0.15, *, scale: str | Scale = "filter", **others: Any
    ) -> None:
        if not isinstance(as_scale(scale), Filter):
            raise ValueError(f"scale={scale!r}: AdaSmoothOut scales noise by filters; for another scale take SmoothOut")
        super().__init__(model, strength, scale=scale, **others)


def make_perturbation(
    model: nn.Module,
    noise: str | Noise,
    scale: str | Scale,
    select: Predicate | None,
    seed: int,
    shared_noise: bool,
) -> Perturbation:
    """Check the arguments and find the parameters."""
    seed = seed_number(seed)
    the_noise, the_scale = as_noise(noise), as_scale(scale)
    selected = select_parameters(model, select)
    if not any(s.parameter.numel() for s in selected):
        raise ValueError(
            f"nothing to perturb in {type(model).__name__}: no trainable floating-point parameter "
            + ("outside normalisation layers" if select is None else "for which select holds")
        )
    for each in selected:
        if reason := _why_no_noise(each):
            raise ValueError(f"{each.name} is {reason}")
    return Perturbation(model, selected, the_noise, the_scale, seed, shared_noise)


def _why_no_noise(selected: Selected) -> str:
    """What a parameter is that cannot take noise, and what to do; empty if it can."""
    p = selected.parameter
    if p.is_meta:
        return "on the meta device and has no values: give the model its weights first"
    if getattr(selected.layer, "max_norm", None) is not None:
        return "rescaled by its layer in every forward (max_norm), which goes with the noise: leave it out by select"
    if is_traceable_wrapper_subclass(p) and not is_dtensor(p):
        return f"a {type(p).__name__}, whose inner tensors cannot be backed up: leave it out by select"
    return f"{p.dtype}, in which torch cannot add: leave it out by select" if p.dtype.itemsize < 2 else ""
