"""Catches a backward that runs after its noise is gone.

Where autograd saved a perturbed weight, torch itself raises, since restoring the weight moved its version counter.
Activation checkpointing and FSDP2 save no weights: they read them again in the backward and would silently use the
clean ones. So every output of the model remembers the number of its draw, and its gradient hook compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from smoothout.hooks import Hook, remove_all
from smoothout.perturb import Perturbation


def tensors_with_grad(output: Any, depth: int = 3) -> list[Tensor]:
    """The tensors inside a model's output that a backward can start from, in containers and objects of any kind."""
    found: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif depth:
            found += tensors_with_grad(list(leaf.values()) if isinstance(leaf, Mapping) else _parts(leaf), depth - 1)
    return found


def to_watch(output: Any, inputs: Any) -> list[Tensor]:
    """The tensors whose gradients tell that a backward has come to a model's output.

    Among them is what a view is a view of: after an operation in place (`out /= 2` after `squeeze`) the gradient comes
    there and not to the view. What the model only hands on, its input or a parameter (`return loss, self.log_var`), is
    not: other backwards come there, too. An input is, if there is nothing else: it may have been written to in place.
    """
    tensors, given = tensors_with_grad(output), {id(tensor) for tensor in tensors_with_grad(inputs)}
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    computed = [each for each in (*tensors, *bases) if each.grad_fn is not None]
    return [each for each in computed if id(each) not in given] or [
        each for each in tensors if each.grad_fn is not None
    ]


def _parts(thing: Any) -> list[Any]:
    """What an object holds, in its `__dict__` and in slots (dataclasses have either)."""
    slots = [getattr(cls, "__slots__", ()) for cls in type(thing).__mro__]
    names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot) if name[:2] != "__"]
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in names)]


def in_backward() -> bool:
    """Whether this code runs inside a backward pass (a recomputation by activation checkpointing, for instance)."""
    return torch._C._current_graph_task_id() != -1


LATE = (
    "this backward belongs to a forward at perturbed weights whose noise is gone by now, so its gradient would be "
    "wrong: call backward() inside the context (or, attached, once for each forward and before the next one)"
)


class LateBackwardGuard:
    """Watches a model's outputs while noise is applied."""

    def __init__(self, model: nn.Module, perturbation: Perturbation) -> None:
        self._model, self._perturbation = model, perturbation
        self._draw_number = 0
        self._recompute_hook: Any = None
        self._recomputed_draw = 0
        self.forwards = {True: 0, False: 0}  # of the model, with gradients, while watched: under noise, and without

    def new_draw(self) -> None:
        """From now on gradients of earlier forwards are late."""
        self._draw_number += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the outputs of every forward inside; at the end their draw is over."""
        self.new_draw()
        self.forwards = {True: 0, False: 0}
        self._stop_watching_recomputes()
        # The loop may call a part of the model alone. Where FSDP2 manages that, its backward reads weights again.
        called = dict.fromkeys((self._model, *self._perturbation.sharded_modules))
        hooks = [module.register_forward_hook(Hook(self._mark), with_kwargs=True) for module in called]
        try:
            yield
        finally:
            self.new_draw()
            remove_all(hooks)

    def _mark(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        # An interrupt between a hook and torch's note that it takes keywords leaves one that gets none.
        *kwargs, output = kwargs_and_output
        # Traced into a compiled graph this does nothing: such a graph saves its weights, and autograd checks those.
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and tensors_with_grad(output):
            self.forwards[self._perturbation.noisy] += 1
        if not self._perturbation.noisy:
            return
        draw_number = self._draw_number
        for tensor in to_watch(output, (args, kwargs)):
            tensor.register_hook(lambda grad: self.check(draw_number))
        # Re-entrant checkpointing runs the forward without gradients and again, with them, inside the backward.
        if not torch.is_grad_enabled() and tensors_with_grad((args, kwargs)):
            self._recomputed_draw = draw_number
            if self._recompute_hook is None:
                self._recompute_hook = self._model.register_forward_pre_hook(Hook(self._before_forward))

    def _before_forward(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and in_backward():
            self.check(self._recomputed_draw)

    def check(self, draw_number: int) -> None:
        """Raise unless the draw is the one that is applied now."""
        if draw_number != self._draw_number:
            raise RuntimeError(LATE)

    def _stop_watching_recomputes(self) -> None:
        if self._recompute_hook is not None:
            self._recompute_hook.remove()
            self._recompute_hook = None
