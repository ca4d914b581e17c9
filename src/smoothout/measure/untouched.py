"""A measurement may write to weights, statistics and generators: afterwards everything is as it was."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that a forward pass or a data loader may use."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]
    own: list[tuple[torch.Generator, Tensor]]  # generators of the data loader
    epochs: list[tuple[Any, str, int]]  # which the loader and its samplers count, and shuffle by

    @classmethod
    def now(cls, batches: Any = ()) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        parts = _parts_of(batches)
        generators = {id(g): g for p in parts if isinstance(g := getattr(p, "generator", None), torch.Generator)}
        own = [(generator, generator.get_state()) for generator in generators.values()]
        counts = ((p, name, getattr(p, "__dict__", {}).get(name)) for p in parts for name in ("epoch", "iteration"))
        epochs = [(part, name, count) for part, name, count in counts if isinstance(count, int)]
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda, own, epochs)

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in self.own:
            generator.set_state(state)
        for part, name, count in self.epochs:
            setattr(part, name, count)


def _parts_of(batches: Any) -> list[Any]:
    """A DataLoader and its samplers: going through it advances their generators, and Accelerate's epochs."""
    found: dict[int, Any] = {}
    waiting = [batches]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
    return list(found.values())


def keep_workers(batches: Any, workers: Any) -> None:
    """Give a DataLoader with `persistent_workers` those that its next pass is to use; None: new ones."""
    if getattr(batches, "persistent_workers", False):
        getattr(batches, "base_dataloader", batches)._iterator = workers  # the loader that Accelerate's goes through


def forget_computed_weights() -> None:
    """After a write: what autocast and `parametrize.cached()` keep was computed from the weights before it."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def copy_back(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor its old shape and values: the first pass of a quantisation observer resizes its buffers."""
    if tensor.shape != values.shape:
        tensor.resize_(values.shape)
    tensor.copy_(values)


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Inside, DistributedDataParallel is its module: its own forward would wait for other ranks, which may not come."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    replaced = [wrapper.__dict__.get("forward") for wrapper in wrappers]  # the class has one, too
    try:
        for wrapper in wrappers:
            wrapper.__dict__["forward"] = wrapper.module.__call__
        yield
    finally:
        for wrapper, forward in zip(wrappers, replaced):
            wrapper.__dict__.pop("forward", None)
            if forward is not None:
                wrapper.__dict__["forward"] = forward


@contextmanager
def without_gradient_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, hooks on gradients, of parameters and modules, do not run: they clip, scale or mask for training."""
    holders = [(p, "_backward_hooks", None) for p in model.parameters()]
    for module in model.modules():
        holders += [(module, name, OrderedDict()) for name in ("_backward_hooks", "_backward_pre_hooks")]
    hooks = [(holder, name, none, kept) for holder, name, none in holders if (kept := getattr(holder, name))]
    try:
        for holder, name, none, _ in hooks:
            object.__setattr__(holder, name, none)  # a compiled module's own way sets what is of the module inside
        yield
    finally:
        _even_if_interrupted(lambda: [object.__setattr__(holder, name, kept) for holder, name, _, kept in hooks])


def _even_if_interrupted(put_back: Callable[[], Any]) -> None:
    """Put back, and once more if an interrupt came between: twice is harmless, half is not."""
    try:
        put_back()
    except BaseException:
        put_back()
        raise


@contextmanager
def untouched(model: nn.Module, batches: Any = ()) -> Iterator[tuple[RandomState, list[tuple[Tensor, Tensor]]]]:
    """On every way out parameters, buffers, `.grad`s, modes and all generators are what they were, bit for bit.

    Version counters of the weights, too: a graph that was recorded before still runs backward, and rightly so, for the
    values are the same. Yields the random state and the buffers that can be written to, each with its values, so that
    every evaluation inside can start from the same ones.
    """
    random_state = RandomState.now(batches)
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    modes = {module: module.training for module in model.modules()}
    slots = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    tensors: list[Tensor] = [*parameters, *(buffer for _, _, buffer in slots if buffer is not None)]
    copies = [t.detach().clone() for t in tensors]
    workers = getattr(batches, "_iterator", None)  # which a DataLoader keeps, perhaps in the midst of an epoch

    def put_back() -> None:
        for module, name, buffer in slots:
            module._buffers[name] = buffer
        for tensor, copy in zip(tensors, copies):
            # A buffer that was computed in inference mode can be written to only there, the others only outside.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                copy_back(tensor, copy)
        forget_computed_weights()
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
        keep_workers(batches, workers)
        random_state.put_back()

    with torch.autograd._unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference())):
        try:
            for parameter in parameters:
                parameter.grad = None
            # Those of inference mode cannot change outside it.
            buffers = [(t, c) for t, c in list(zip(tensors, copies))[len(parameters) :] if not t.is_inference()]
            yield random_state, buffers
        finally:
            _even_if_interrupted(put_back)
