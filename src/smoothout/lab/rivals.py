"""Rivals in the same loop: SAM and ASAM (pytorch_optimizer, the extra `rivals`), SWA and EMA (torch.optim.swa_utils).

All use the update of plain training, so ghost batches, clipping, fp16 scaling and several processes mean the same for
every method, and a step's cost is counted alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from smoothout.extras import install
from smoothout.lab.methods import Plain, StepResult, TrainingImages
from smoothout.lab.train.ghost_step import Batch, GhostStep
from smoothout.lab.train.statistics import measure_statistics


class SharpnessAware(Plain):
    """SAM: the gradient at w + ρ·g/‖g‖, where g is that at w; ASAM (`adaptive`) at w + ρ·w²g/‖w·g‖.

    Both passes go over all ghosts, and both gradients are summed over processes. g is that of the whole batch. fp16
    needs no unscaling before the climb, which depends on the direction of g alone; a climb that overflowed makes the
    second gradient NaN, and the scaler skips the step. Only the second gradient is clipped. BatchNorm's running
    statistics move in the first pass alone; dropout draws new masks in the second. The loss is that of the first.
    """

    def __init__(self, update: GhostStep, rho: float, adaptive: bool = False) -> None:
        super().__init__(update)
        self.strength = rho
        sam = _sam_of_the_extra("asam" if adaptive else "sam")
        self._climb = sam(update.parameters, _NoUpdate, rho=rho, adaptive=adaptive)

    def step(self, batch: Batch) -> StepResult:
        seen = self._backward(batch)
        with self._uphill():
            self._backward(batch)
        self.update.update()
        return StepResult(*seen, evaluations=2)

    @contextmanager
    def _uphill(self) -> Iterator[None]:
        """Inside, the weights are at the top of the climb and the gradients are zero; all comes back on any way out."""
        update = self.update
        update.processes.sum_gradients(update.parameters)
        # Copied back rather than frozen: a captured CUDA graph would move them whatever the layers' flags say.
        with _kept(list(update.model.buffers())):
            try:
                self._climb.first_step()
                for parameter in update.parameters:
                    if parameter.grad is not None:
                        parameter.grad.zero_()  # in place, since graphs write to it
                yield
            finally:
                self._climb.second_step()  # copies the weights back; its optimizer does nothing


class _NoUpdate(Optimizer):
    """The optimizer inside SAM: the run's own one steps, after scaler and clipping."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return None


def _sam_of_the_extra(method: str) -> Any:
    try:
        from pytorch_optimizer import SAM
    except ImportError as error:
        raise ValueError(f"method={method!r} needs the extra: {install('rivals')}") from error
    return SAM


class Averaged(Plain):
    """Plain training, judged at an average of its weights.

    The weights that train, their learning rate and every random number are those of plain training. Until something
    is averaged, training's own weights are judged. BatchNorm statistics of the average are measured anew on the
    training images each time: passes forward, which count in seconds and not as evaluations.

    Args:
        how: `multi_avg_fn` of `AveragedModel`.
        is_due: from the number of updates so far to whether the weights are taken into the average now.
    """

    def __init__(self, update: GhostStep, how: Callable[..., None], is_due: Callable[[int], bool]) -> None:
        super().__init__(update)
        self._model: nn.Module = getattr(update.model, "_orig_mod", update.model)  # a compiled one cannot be copied
        self.average = AveragedModel(self._model, multi_avg_fn=how)
        self._is_due, self._updates = is_due, 0

    def step(self, batch: Batch) -> StepResult:
        result = super().step(batch)
        self._updates += 1
        if self._is_due(self._updates):
            self.average.update_parameters(self._model)
        return result

    @contextmanager
    def judged(self, training_images: TrainingImages) -> Iterator[None]:
        if not self.average.n_averaged:
            yield
            return
        parameters = list(self._model.parameters())
        with _kept([*parameters, *self._model.buffers()]):
            with torch.no_grad():
                for parameter, mean in zip(parameters, self.average.module.parameters(), strict=True):
                    parameter.copy_(mean)
            measure_statistics(self._model, training_images(), self.update.precision(), self.update.processes)
            yield

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        self.average.load_state_dict(state["average"])


def swa(update: GhostStep, start: float, steps: int, steps_per_epoch: int) -> Averaged:
    """The plain mean of the weights at the ends of epochs, once the fraction `start` of training is over."""
    epochs = steps // steps_per_epoch
    # 0.7 · 90 is a little less than 63 in floating point. At least the last epoch counts.
    before = min(math.floor(round(start * epochs, 6)), epochs - 1)
    return Averaged(
        update,
        get_swa_multi_avg_fn(),
        lambda updates: updates % steps_per_epoch == 0 and updates > before * steps_per_epoch,
    )


def ema(update: GhostStep, decay: float) -> Averaged:
    """The exponential moving average of the weights after every update; it begins with those after the first."""
    return Averaged(update, get_ema_multi_avg_fn(decay), lambda updates: True)


@contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Tensors have their old values, in their old storage, on every way out."""
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values):
                tensor.copy_(value)
