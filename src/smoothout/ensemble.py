"""Deterministic SmoothOut, Eq. 1 of the paper: N fixed perturbations that share w, and their mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless

from smoothout.attach import paused
from smoothout.checks import check_model, check_strength, scalar_loss, whole_number
from smoothout.filters import Scale, precision
from smoothout.hooks import untraced
from smoothout.late_backward import tensors_with_grad
from smoothout.noise import Noise
from smoothout.select import Predicate
from smoothout.sharding import sharded_modules
from smoothout.smooth import make_perturbation

LossFunction = Callable[[nn.Module, Any], Tensor]


class SmoothOutEnsemble:
    """C̄_N(w) = (1/N)·Σᵢ C(w + θᵢ) with N raw θᵢ fixed once and for all (kept as seeds, drawn anew when needed).

    Args:
        model: its parameters are w; they are never written to.
        copies: N.
        strength, noise, scale, select, seed: as those of `SmoothOut`. Filter scaling follows the current w and counts
            as a constant in the gradient.
        chunk: copies evaluated at once (by vmap where the model allows it); memory grows with it, not with `copies`.
            By default one at a time.

    Examples:
        >>> ensemble = SmoothOutEnsemble(model, copies=16)
        >>> loss = ensemble.loss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y))
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        copies: int,
        strength: float = 0.0375,
        *,
        noise: str | Noise = "uniform",
        scale: str | Scale = "absolute",
        select: Predicate | None = None,
        seed: int = 0,
        chunk: int | None = None,
    ) -> None:
        check_model(model)
        if sharded_modules(model):
            raise ValueError("model is sharded by FSDP2: the ensemble needs whole weights in one process")
        for option in ("find_unused_parameters", "static_graph"):  # with which DDP follows the graphs of the copies
            if any(isinstance(m, DistributedDataParallel) and getattr(m, option) for m in model.modules()):
                raise ValueError(
                    f"model is a DistributedDataParallel with {option}=True, which does not see the ensemble's one "
                    f"backward for all copies: leave {option} out, every parameter gets a gradient here"
                )
        self.model, self.copies = model, whole_number("copies", copies)
        self.chunk = 1 if chunk is None else whole_number("chunk", chunk)
        self.strength = check_strength(strength)
        self._perturbation = make_perturbation(model, noise, scale, select, seed, shared_noise=True)
        self._vmap_works = True

    def loss(self, loss_fn: LossFunction, batch: Any) -> Tensor:
        """The mean of `loss_fn(model at w + θᵢ, batch)`; its backward gives the mean gradient (first derivatives only).

        The gradient is taken here, chunk by chunk, and handed out by `backward()`, to the model's own parameters only;
        without gradients enabled only the loss is computed.
        """
        if torch.is_grad_enabled() and tensors_with_grad(batch):
            raise ValueError("batch holds a tensor that requires a gradient, but only the model's get one: detach it")
        with paused(self.model):  # an attached model takes no noise beside the copies' own
            return self._loss(loss_fn, batch)

    def _loss(self, loss_fn: LossFunction, batch: Any) -> Tensor:
        objective = _Objective(self.model, loss_fn)
        trainable: dict[str, Tensor] = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        if not torch.is_grad_enabled() or not trainable:
            with torch.no_grad():
                losses = torch.stack([objective.at(trainable, θ, batch) for θ in map(self._noise, range(self.copies))])
                return losses.mean(dtype=precision(losses))
        total, gradients = self._loss_and_gradients(objective, trainable, batch)
        return _MeanLoss.apply(total, gradients, *trainable.values())

    def _loss_and_gradients(
        self, objective: _Objective, trainable: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Sums of many small numbers: in fp32 at least, rounded once at the end."""
        total: Tensor | float = 0.0
        gradients = [torch.zeros_like(p, dtype=precision(p)) for p in trainable.values()]
        for first in range(0, self.copies, self.chunk):
            chunk = [self._noise(i) for i in range(first, min(first + self.chunk, self.copies))]
            for loss, grads in self._chunk(objective, trainable, chunk, batch):
                total = total + loss / self.copies
                torch._foreach_add_(gradients, [g.to(s.dtype) for g, s in zip(grads, gradients)], alpha=1 / self.copies)
        assert isinstance(total, Tensor)
        return total, gradients

    def _chunk(
        self,
        objective: _Objective,
        trainable: dict[str, Tensor],
        chunk: list[dict[str, Tensor]],
        batch: Any,
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Loss and gradient of every copy in a chunk: all at once if vmap can, one after another if not."""
        if len(chunk) > 1 and self._vmap_works and vmap_can_run(self.model):
            sums = self._at_once(objective, trainable, chunk, batch)
            if sums is not None:
                yield sums
                return
        for θ in chunk:
            w = {name: p.detach().requires_grad_() for name, p in trainable.items()}
            with objective.moved_to(w, θ):  # in the backward, too: activation checkpointing reads the weights again
                loss = objective.loss(batch)
                grads = torch.autograd.grad(loss, list(w.values()), allow_unused=True)
            yield (
                loss.detach().to(precision(loss)),
                [torch.zeros_like(p) if g is None else g for g, p in zip(grads, w.values())],
            )

    def _at_once(
        self, objective: _Objective, trainable: dict[str, Tensor], chunk: list[dict[str, Tensor]], batch: Any
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Sums of a chunk's losses and gradients by vmap; None if it cannot, now and from then on."""
        noise = {name: torch.stack([θ[name] for θ in chunk]) for name in chunk[0]}
        w = {name: p.detach() for name, p in trainable.items()}

        def at(w: dict[str, Tensor], θ: dict[str, Tensor]) -> Tensor:
            return objective.at(w, θ, batch)

        buffers = [(module._buffers, slot, b) for module in self.model.modules() for slot, b in module._buffers.items()]
        try:
            grads, losses = vmap(grad_and_value(at), in_dims=(None, 0), randomness="different")(w, noise)
            # What a forward puts in a buffer's place is of all copies at once, and means nothing outside vmap.
            self._vmap_works = all(held.get(slot) is buffer for held, slot, buffer in buffers)
        except RuntimeError:  # an operation without a batching rule; an error of the loss itself comes in the loop, too
            self._vmap_works = False
            return None
        finally:
            for held, slot, buffer in buffers:
                held[slot] = buffer
        if not self._vmap_works:
            return None
        return losses.sum(dtype=precision(losses)), [g.sum(0, dtype=precision(g)) for g in grads.values()]

    @untraced
    def _noise(self, i: int) -> dict[str, Tensor]:
        """The θ of one copy at the current w, by the parameters' names."""
        names = [f"model.{s.name}" for s in self._perturbation.selected]
        return dict(zip(names, self._perturbation.draw(self.strength, step=0, draw=i)))


class _Objective(nn.Module):
    """`loss_fn(model, batch)` as a module, so that torch can swap the model's parameters."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

        # Every place of a parameter, under one name each. functional_call's own tie_weights visits a module that is
        # used twice twice, and leaves the swapped tensors in it.
        names = {id(p): name for name, p in self.named_parameters()}
        self._places = {
            f"{module_name}.{slot}": names[id(p)]
            for module_name, module in self.named_modules()
            for slot, p in module._parameters.items()
            if p is not None
        }

    def forward(self, batch: Any) -> Tensor:
        return self._loss_fn(self.model, batch)

    @contextmanager
    def moved_to(self, w: dict[str, Tensor], θ: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the parameters are w + θ, where there is a θ; computed in fp32 at least and rounded once."""
        frozen_since = {name: self.get_parameter(name).detach() for name in θ if name not in w}
        shifted = {name: (p + θ[name]).to(p.dtype) if name in θ else p for name, p in (w | frozen_since).items()}
        everywhere = {place: shifted[name] for place, name in self._places.items() if name in shifted}
        with stateless._reparametrize_module(self, everywhere, tie_weights=False):
            yield

    def at(self, w: dict[str, Tensor], θ: dict[str, Tensor], batch: Any) -> Tensor:
        """The loss at w + θ."""
        with self.moved_to(w, θ):
            return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        """At the parameters as they are; a scalar."""
        return scalar_loss(self(batch))


class _MeanLoss(torch.autograd.Function):
    """Hands out gradients that were computed in advance."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients, ctx.dtypes = gradients, [p.dtype for p in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the ensemble's loss has first derivatives only: no create_graph=True")
        (scale,) = grad_outputs
        return None, None, *((scale.to(g.dtype) * g).to(dtype) for g, dtype in zip(ctx.gradients, ctx.dtypes))


def vmap_can_run(model: nn.Module) -> bool:
    """vmap cannot update BatchNorm's running statistics in place, nor batch the fused LSTM and GRU kernels."""
    return not any(
        isinstance(m, nn.RNNBase)
        or (isinstance(m, _BatchNorm) and m.training and m.track_running_stats and m.running_mean is not None)
        for m in model.modules()
    )
