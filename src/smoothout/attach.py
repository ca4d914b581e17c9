"""SmoothOut by hooks alone: the training loop stays as it is.

A forward pre-hook perturbs. A gradient hook on the outputs, which fires when the backward begins, queues a callback on
the autograd engine, which restores when the backward has ended: before clipping, unscaling and the optimizer's step.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from smoothout.hooks import Hook, remove_all, untraced, weak
from smoothout.late_backward import LATE, in_backward, tensors_with_grad, to_watch

if TYPE_CHECKING:
    from smoothout.perturb import Perturbation
    from smoothout.smooth import SmoothOut

IN_BACKWARD = (
    "a parameter has a post-accumulate-grad hook or an optimizer of its own, which steps inside the backward: it would "
    "write to weights that hold noise; step after the backward instead"
)


def check_draw(draw: str) -> None:
    if draw not in ("step", "forward"):
        raise ValueError(f'draw={draw!r}: use "step" (one θ until the optimizer steps) or "forward" (always new)')


class Attachment:
    """The handle that `SmoothOut.attach` returns."""

    def __init__(self, smooth: SmoothOut, draw: Literal["step", "forward"]) -> None:
        check_draw(draw)
        self._smooth, self.draw = smooth, draw
        self._weights = smooth._perturbation
        self._model = self._weights.model
        self.removed = False
        self._draw_number = 0  # of the forward whose noise is applied
        self._backward_task = -1  # of the backward that will restore
        self._hooks_on_leaves: list[Any] = []
        self._forward_ended = True
        self._forward_since_step = False
        self._noise_stays = False  # until the step: that of a backward without de-noising
        self._stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of other models
        self._warned = self._warned_of_unfrozen = False
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # parameters in each
        self._clean_passes = _CleanPasses(self._weights)
        self._refuse_second()
        _refuse_if_compiled_code_ignores_hooks(self._model)
        self._hooks: list[Any] = [
            # Before FSDP's own pre-hook, which gathers the weights.
            self._model.register_forward_pre_hook(Hook(self._before_forward), prepend=True),
            self._model.register_forward_hook(Hook(self._after_forward), always_call=True, with_kwargs=True),
            # New weights end a pending forward, such as one that Ctrl-C left: its backup must not come back over them.
            *(m.register_load_state_dict_pre_hook(Hook(self._before_load)) for m in self._model.modules()),
        ]
        self._global_hooks = [register_optimizer_step_post_hook(weak(self._after_any_step))]
        weakref.finalize(self, remove_all, self._global_hooks)
        _attachments.add(self)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # what was compiled before does not see these hooks

    # ---- what users call ---------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Take back the noise of a forward whose backward never came. Nothing happens if there is none."""
        remove_all(self._hooks_on_leaves)
        self._clean_passes.stop()
        if self._weights.active:
            self._weights.restore()

    def remove(self) -> None:
        """Take all hooks away, and the noise if there is any."""
        self.restore()
        remove_all(self._hooks)
        remove_all(self._global_hooks)
        self.removed = True

    def add(self, optimizers: Optimizer | Sequence[Optimizer], draw: str) -> None:
        """Follow one more optimizer, or several."""
        if draw != self.draw:
            raise ValueError(f"draw={draw!r}, but this SmoothOut is attached with draw={self.draw!r}")
        several = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        unwrapped = [_unwrap(optimizer) for optimizer in several]
        if not unwrapped:
            raise ValueError("optimizer is empty: give at least one, whose step() ends a step and brings new noise")
        for optimizer in unwrapped:
            self._refuse(optimizer)
        for optimizer in unwrapped:
            if optimizer not in self._optimizers:
                if not self._holds_weights(optimizer):
                    warnings.warn(
                        f"this {type(optimizer).__name__} holds none of {type(self._model).__name__}'s parameters, yet "
                        "its step() is what brings new noise: is it the optimizer of another model?",
                        stacklevel=4,
                    )
                self._optimizers[optimizer] = False
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def _refuse_second(self) -> None:
        own = {id(s.parameter) for s in self._weights.selected}
        for other in _attachments:
            if not other.removed and not own.isdisjoint(map(id, other._weights._parameters)):
                raise RuntimeError(
                    "another SmoothOut is attached to these weights: remove() the handle that its attach() gave first. "
                    "Keep it: handle = smooth.attach(optimizer)"
                )

    def _refuse(self, optimizer: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or a list")
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS evaluates its closure at several points in one step: it cannot be attached")
        signs = ("_post_accumulate_grad_hooks", "_in_backward_optimizers")
        if any(getattr(s.parameter, sign, None) for s in self._weights.selected for sign in signs):
            raise ValueError(IN_BACKWARD)

    def _before_load(self, *_: Any) -> None:
        self.restore()

    # ---- forward and backward ----------------------------------------------------------------------------------------

    @untraced
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if _paused.get():
            return
        if not torch.is_grad_enabled():  # clean: see _CleanPasses, which start when the forward has ended
            if self._weights.active and not self._forward_ended and not _calls_itself(self._model):
                self.restore()  # an interrupt ended it: torch calls no hooks then
            return
        if in_backward():  # activation checkpointing recomputes: at the weights its forward saw
            if module.training and not self._weights.active and self._smooth.current_strength:
                raise RuntimeError(
                    "the whole model is recomputed inside a backward, but its forward ran without gradients and noise "
                    "(re-entrant checkpointing): use checkpoint(..., use_reentrant=False)"
                )
            return
        if not module.training:
            self.restore()  # an evaluation with gradients: the pending forward, if any, is given up
            return
        self._clean_passes.stop()
        if self._weights.active:
            if self.draw == "step":
                return  # another forward of the same step: the same θ is in place
            remove_all(self._hooks_on_leaves)
            self._weights.restore()
        smooth = self._smooth
        if self.draw == "step" and self._noise_stays:
            return  # another forward of the same step: its θ was left in the weights
        self._draw_number += 1
        self._forward_ended = False
        self._weights.apply(smooth.current_strength, smooth.step_count, smooth._draw)
        if self.draw == "forward":
            smooth._draw += 1

    @untraced
    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._weights.active or not torch.is_grad_enabled() or in_backward() or not module.training:
            return
        if sys.exc_info()[0] is not None and output is None:  # the forward raised
            self.restore()
            return
        if isinstance(output, Iterator):
            self.restore()
            raise RuntimeError(
                f"the forward of {type(module).__name__} gives a {type(output).__name__}, whose passes come after the "
                "hooks, at clean weights: it cannot be attached, use perturbed()"
            )
        self._forward_since_step = True
        for optimizer in self._optimizers:
            self._optimizers[optimizer] = True
        outputs, draw_number, noisy = to_watch(output, (args, kwargs)), self._draw_number, self._weights.noisy
        hooks = [t.register_hook(lambda grad: self._backward_begins(draw_number, noisy)) for t in outputs]
        if not hooks:  # a model that gives nothing but its parameters, or its input, which outlive the backward
            remove_all(self._hooks_on_leaves)
            leaves = tensors_with_grad(output)
            hooks = [t.register_hook(lambda grad: self._backward_begins(draw_number, noisy)) for t in leaves]
            self._hooks_on_leaves += hooks
        if not hooks:
            self.restore()  # no backward can start here
            return
        self._clean_passes.start()
        self._forward_ended = True  # last: a forward that an interrupt ended before has no clean passes

    def _backward_begins(self, draw_number: int, noisy: bool) -> None:
        if draw_number != self._draw_number or not self._weights.active:
            if noisy or self._weights.noisy:
                raise RuntimeError(LATE)
            return  # strength 0, then and now: as without the library
        task = torch._C._current_graph_task_id()
        if task != self._backward_task:
            self._backward_task = task
            self._clean_passes.end()  # one that an interrupt ended: torch calls no hooks then
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._backward_task = -1
        remove_all(self._hooks_on_leaves)
        self._clean_passes.end()
        if self._weights.active:
            self._noise_stays = not self._smooth.denoise
            self._weights.restore() if self._smooth.denoise else self._weights.keep()
        self._clean_passes.stop()  # last: an interrupt on the way leaves passes without gradients clean

    # ---- the optimizer's step ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()  # noise of a forward that had no backward
        if in_backward():
            raise RuntimeError(IN_BACKWARD)
        self._stepping.add(optimizer)

    def _after_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warn of an optimizer that nobody attached, such as one made anew every epoch: θ would never change."""
        if self._warned or not self._forward_since_step or self._stepping or optimizer in self._strangers:
            return
        if optimizer in self._optimizers:
            return
        if not self._holds_weights(optimizer):
            self._strangers.add(optimizer)
            return
        self._warned = True
        warnings.warn(
            f"a {type(optimizer).__name__} that is not attached stepped on {type(self._model).__name__}: the noise and "
            "the schedule move with attached optimizers only. Give attach() every optimizer, new ones too.",
            stacklevel=3,
        )

    def _holds_weights(self, optimizer: Optimizer) -> bool:
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._stepping:
            return  # a step() that calls its base class's ends twice
        self._stepping.discard(optimizer)
        if not self._optimizers[optimizer] and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.step() without a perturbed forward since the last step: SmoothOut is "
                f"attached to {type(self._model).__name__}, whose forward was not called in training mode with "
                "gradients enabled. Attach to the module that your loop calls, or to each of several; training in "
                "eval() mode needs perturbed().",
                stacklevel=3,
            )
        self._optimizers[optimizer] = False
        if self._forward_since_step:
            self._forward_since_step = self._noise_stays = False
            self._smooth._step += 1
            self._smooth._draw = 0
        self._warn_of_unfrozen(optimizer)

    def _warn_of_unfrozen(self, optimizer: Optimizer) -> None:
        """Looked for where a group was added to the optimizer, and now and then: it takes longer than the rest."""
        size, step = sum(len(group["params"]) for group in optimizer.param_groups), self._smooth.step_count
        known, self._sizes[optimizer] = self._sizes.get(optimizer, size), size
        if self._warned_of_unfrozen or (size == known and step & (step - 1)):
            return
        left_out = self._smooth._left_out()
        if left_out:
            self._warned_of_unfrozen = True
            others = f" and {len(left_out) - 1} other parameters" if len(left_out) > 1 else ""
            warnings.warn(
                f"{left_out[0]}{others}, frozen when SmoothOut was made, train now and take no noise: remove() the "
                "handle, and make and attach a new SmoothOut (with a callback, fit() anew)",
                stacklevel=4,
            )


class _CleanPasses:
    """While a backward is pending, passes without gradients (of the model or any part of it) see clean weights.

    Global hooks, because any part may be called; weak ones, so that a model may be thrown away in the meantime.
    """

    def __init__(self, weights: Perturbation) -> None:
        self._weights = weights
        self._modules: set[nn.Module] = set()
        self._hooks: list[Any] = []
        self._inside: nn.Module | None = None
        self._noisy: list[Tensor] = []
        weakref.finalize(self, remove_all, self._hooks)

    def start(self) -> None:
        if not self._hooks and self._weights.noisy:
            self._modules = set(self._weights.model.modules())
            self._hooks += [
                register_module_forward_pre_hook(weak(self._enter)),
                register_module_forward_hook(weak(self._leave), always_call=True),
            ]

    def stop(self) -> None:
        self.end()
        remove_all(self._hooks)

    def end(self) -> None:
        """The pass that is under way is over: the noise is in place again."""
        if self._inside is not None:
            self._inside = None
            self._weights.swap_in(self._noisy)
            self._noisy = []

    @untraced
    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self._inside is None and not torch.is_grad_enabled() and not in_backward() and module in self._modules:
            self._noisy = self._weights.swap_in_clean()
            self._inside = module

    @untraced
    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._inside:
            self.end()


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
_paused: ContextVar[bool] = ContextVar("_paused", default=False)


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Attached models take no noise inside, whatever their mode: a measurement is of the weights that it is given.

    Those of a forward that waits for its backward are two, the noisy and the clean ones, so that is refused.
    """
    parts = set(model.modules())
    noisy = [each._model for each in _attachments if not each.removed and each._weights.noisy]
    if any(not parts.isdisjoint(each.modules()) for each in noisy):
        raise RuntimeError(
            "a forward of this attached model waits for its backward, with noise in the weights: measure after it, or "
            "call restore() of the handle that attach() gave"
        )
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def _calls_itself(model: nn.Module) -> bool:
    """Whether this call of the model was made inside another one, as far as the stack tells."""
    calls, frame = 0, sys._getframe(1)
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls != 1


def _refuse_if_compiled_code_ignores_hooks(model: nn.Module) -> None:
    """Compiled code that holds the model's own call has no guard on hooks: those that come later would never run.

    That is so after `model.compile()`, and for torch's own containers (`nn.Sequential`) inside `torch.compile`.
    """
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            "this model was compiled in place by model.compile(), which does not see hooks that come later: attach "
            "first, or use torch.compile(model)"
        )
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None or not type(model).__module__.startswith("torch.nn."):
        return
    for wrapper in (o for o in gc.get_objects() if type(o) is compiler.OptimizedModule):
        if wrapper._orig_mod is model:
            raise ValueError(
                f"this {type(model).__name__} was compiled before, and the compiled code does not see hooks that come "
                "later: give SmoothOut the compiled model, SmoothOut(torch.compile(model))"
            )


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as Accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
