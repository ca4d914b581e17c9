"""Draw θ, back up w, apply, restore: the one place that writes to weights.

It works on detached tensors and needs no `torch.no_grad()`, which an interrupt at the wrong moment leaves switched on.
"""

from __future__ import annotations

import operator
import os
import sys
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import parametrize, stateless
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from smoothout import filters, sharding
from smoothout.blocks import cut_into_blocks, overlap
from smoothout.filters import FilterLayout, filter_layout
from smoothout.foreach import Foreach
from smoothout.hooks import Hook, StateDictHook, nothing, remove_all, untraced, weak
from smoothout.noise import Bernoulli, Noise, shares_fills
from smoothout.select import Edge, Selected, are_there, edges_to, owners_of
from smoothout.witness import Witness

if TYPE_CHECKING:
    from smoothout.fused import Fused


class Perturbation:
    """Noise on a fixed set of a model's parameters, applied and taken back exactly.

    Args:
        model: whose `state_dict()` stays clean while noise is applied.
        selected: the parameters that take noise.
        noise, scale: raw noise and how it is scaled.
        seed: of the raw noise. The generator is private: the global one is never touched.
        shared_noise: every data-parallel rank draws the same θ.
    """

    def __init__(
        self,
        model: nn.Module,
        selected: list[Selected],
        noise: Noise,
        scale: filters.Scale,
        seed: int,
        shared_noise: bool,
    ) -> None:
        if isinstance(noise, Bernoulli) and not isinstance(scale, filters.Weight):
            raise ValueError(f'noise={noise} needs scale="weight" (the paper\'s view of dropout), not scale={scale}')
        self.model, self.selected = model, selected
        self.noise, self.scale, self.seed, self.shared_noise = noise, scale, seed, shared_noise
        self.active = False  # a backup is held; what is in the weights may be noisy
        self.noisy = False  # a draw was added
        self._fused: Fused | None = None  # draws, where it can; else foreach does
        self._backed_up_by_draw = False
        self._position = (0.0, 0)
        self._parameters: list[Tensor] = []
        self._addresses: list[int] = []
        self._rank = 0
        self._state_dict_hook = StateDictHook([], Hook(nothing))
        self._global_hooks: list[Any] = []
        weakref.finalize(self, remove_all, self._global_hooks)
        self._stepped: set[int] = set()  # parameters that an optimizer stepped on while noise was applied
        self._edges: list[Edge] = []
        self.sharded_modules = sharding.sharded_modules(model)
        self.find_weights()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles find their tensors again: a pickle would store each of them anew, next to the model's."""
        found_again = ("_weights", "_backups", "_slots", "_blocks", "_foreach", "_witness")
        kept = {k: v for k, v in self.__dict__.items() if k not in found_again}
        return kept | {"_parameters": [], "_addresses": [], "_edges": [], "_fused": None}

    @property
    def generator_kind(self) -> str:
        """The kind of generator that drew last: raw θ is reproducible within a kind, and differs between kinds."""
        if not self._parameters:  # a copy, which has not drawn
            self.find_weights()
        return self._weights[0].device.type if self._fused is None else "fused"

    # ---- apply and restore -------------------------------------------------------------------------------------------

    @untraced
    def apply(self, strength: float, step: int, draw: int = 0, sign: float = 1.0) -> None:
        """w ← w + sign·θ, with θ a function of (seed, step, draw) and the clean weights. Strength 0 writes nothing."""
        with _outside_inference_mode():
            self.find_weights()
            self._refuse_nesting()
            if strength == 0.0:
                torch._foreach_copy_(self._backups, self._weights)
            elif self._fused is not None:
                self._fused.at(self.seed, step, strength)
            # A draw backs up on its way: the fused one in its launch, the other block by block.
            self._foreach.forget_backups()
            self._backed_up_by_draw = strength != 0.0
        self._versions = [p._version for p in self._parameters]
        self._stepped = set()
        _applied.add(self)
        self._state_dict_hook.put_on()
        self._global_hooks.append(register_optimizer_step_post_hook(weak(self._note_step)))
        self._add(strength, step, draw, sign, back_up=True)

    @untraced
    def add(self, strength: float, step: int, draw: int = 0, sign: float = 1.0) -> None:
        """Add a draw to weights that are backed up already. An interrupt on the way takes all noise back."""
        if self._fused is not None:
            self._fused.at(self.seed, step, strength, backed_up=True)
        self._add(strength, step, draw, sign, back_up=False)

    def _add(self, strength: float, step: int, draw: int, sign: float, back_up: bool) -> None:
        self.active = True
        if strength == 0.0:
            return
        self.noisy = True
        try:
            with _outside_inference_mode():
                if self._fused is not None:
                    (self._fused.apply if back_up else self._fused.add)(draw, sign)
                    increment_version(self._weights)  # autograd does not see what a kernel of ours writes
                else:
                    (self._foreach.apply if back_up else self._foreach.add)(self.seed, sign * strength, step, draw)
            self._after_write()
            self._witness.look()
        except BaseException:
            self._copy_back()
            raise

    def _refuse_nesting(self) -> None:
        others = {id(p) for other in list(_applied) if other is not self for p in other._parameters}
        if others and not others.isdisjoint(map(id, self._parameters)):
            raise RuntimeError(
                "another SmoothOut has noise in these weights now: noise does not nest; leave its context or finish "
                "its backward first, or remove() the handle that an earlier attach() gave"
            )

    @property
    def local_weights(self) -> list[Tensor]:
        """This rank's part of every perturbed parameter, in the order of `selected`."""
        self.find_weights()
        return self._weights

    @untraced
    def restore(self, check: bool = True) -> None:
        """w ← w as it was, bit for bit; with `check` raises if somebody else wrote to a weight in between."""
        try:
            written = self._written()
            moved = self._bring_back_moved() if self.noisy else []
            if self.noisy or written:
                self._copy_back()
            else:
                self.keep()
        except BaseException:  # an interrupt half-way: to copy again is harmless, to stop there is not
            self._copy_back()
            raise
        if moved and check:
            raise RuntimeError(
                f"{moved[0]} was replaced or got other memory while noise was applied: model.to() or `.data =` inside "
                "the context? It has its values from before the noise again. Convert or replace weights outside it."
            )
        if written and check:
            others = f" and {len(written) - 1} other weights were" if len(written) > 1 else " was"
            raise RuntimeError(
                f"{written[0]}{others} written while noise was applied: an optimizer.step() inside the context, or a "
                "write between an attached forward and its backward? Its change is undone, the weights are those from "
                "before the noise. Step after the context."
            )

    def keep(self) -> None:
        """Leave the weights as they are now: training without de-noising, the paper's ablation."""
        self.active = self.noisy = False
        _applied.discard(self)
        self._state_dict_hook.remove()
        remove_all(self._global_hooks)

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers, and those that write to `.data`, leave the version counters alone.
        written = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._stepped |= written & {id(p) for p in self._parameters}

    def _written(self) -> list[str]:
        """Names of the weights that somebody else wrote to since the noise was added."""
        if self._stepped or [p._version for p in self._parameters] != self._versions:
            whose = zip(self.selected, self._parameters, self._versions)
            return [s.name for s, p, version in whose if p._version != version or id(p) in self._stepped]
        return [self.selected[i].name for i in self._witness.changed()] if self.noisy else []

    def _bring_back_moved(self) -> list[str]:
        """Clean values for parameters that were replaced, or their memory was, under the noise; and their names."""
        sharding.reshard(self.sharded_modules)
        parameters = [s.owner._parameters.get(s.slot) for s in self.selected]
        addresses = _addresses(self._parameters)
        if addresses == self._addresses and all(map(operator.is_, parameters, self._parameters)):
            return []
        moved = []
        for i, (selected, new, old) in enumerate(zip(self.selected, parameters, self._parameters)):
            if new is not old or addresses[i] != self._addresses[i]:
                moved.append(selected.name)
                local = None if new is None else sharding.local_part(new).local
                if local is not None and local.shape == self._backups[i].shape:
                    local.copy_(self._backups[i])
        return moved

    def _copy_back(self) -> None:
        with _outside_inference_mode():
            if not self._backed_up_by_draw:
                torch._foreach_copy_(self._weights, self._backups)
            elif self._fused is not None:
                self._fused.restore()  # nothing, if an interrupt came before the launch that backs up
                increment_version(self._weights)
            else:
                self._foreach.restore()  # the blocks that an interrupt let it come to
        self._after_write()
        self.keep()

    def _after_write(self) -> None:
        sharding.reshard(self.sharded_modules)  # copies gathered from the old values must not be used again
        torch.clear_autocast_cache()
        parametrize._cache.clear()  # of parametrize.cached()
        self._versions = [p._version for p in self._parameters]

    def swap_in_clean(self) -> list[Tensor]:
        """Put the clean weights in place without autograd noticing; returns the noisy ones for `swap_in`."""
        noisy = [w.clone() for w in self._weights]
        self.swap_in(self._backups)
        return noisy

    def swap_in(self, values: list[Tensor]) -> None:
        """Write values that a pending backward must not notice: what it saved is put back before it runs."""
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._weights)):
            torch._foreach_copy_(self._weights, values)
        self._after_write()

    def _clean_state_dict(self, owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """`state_dict()` while noise is applied: clones of the backups take the place of noisy weights."""
        if not self.active:  # an interrupt came between the hook and the noise
            return
        if self._backed_up_by_draw:  # a signal's handler may save in the midst of a draw
            self._foreach.complete_backups()
        for slot, index in self._slots[owner]:
            if prefix + slot in state:
                state[prefix + slot] = sharding.like(self._parameters[index], self._backups[index].clone())

    def _warn_of_copies(self) -> None:
        """Called where the model is copied or pickled, as by `copy.deepcopy(model)` or `torch.save(model)`."""
        if self.noisy:
            warnings.warn(
                "this copy of a model has the noise in its weights: copy or save state_dict(), which is clean, or do "
                "it outside the context (attached: after the backward, or after restore() of the handle)",
                stacklevel=4,
            )

    # ---- noise -------------------------------------------------------------------------------------------------------

    def draw(self, strength: float, step: int, draw: int = 0) -> list[Tensor]:
        """The θ that `apply` would add, as new tensors (this rank's shards), in the order of `selected`."""
        if self.active:
            raise RuntimeError(
                "θ follows the clean weights, and noise is applied to them now: leave the context first, or restore() "
                "the handle of attach()"
            )
        self.find_weights()
        if self._fused is not None:
            self._fused.at(self.seed, step, strength)
            return self._fused.noise(draw)
        result = [torch.zeros(w.shape, dtype=filters.precision(w), device=w.device) for w in self._weights]
        for piece, values in self._foreach.noise(self.seed, strength, step, draw):
            piece.rows_of(result[piece.parameter]).copy_(values)
        return result

    def set_position(self, strength: float, step: int) -> None:
        """Strength and step of the `draw_into` that follow. On CUDA an asynchronous copy, on the current stream."""
        self.find_weights()
        self._position = (strength, step)
        if self._fused is not None:
            self._fused.set_position(self.seed, step, strength)

    def advance(self) -> None:
        """One step further for the `draw_into` that follow; the strength stays.

        With the fused kernels the step is in device memory: captured in a CUDA graph before its draws, this makes each
        replay draw the next step's noise. `set_position` outside the graph starts anew.
        """
        strength, step = self._position
        self._position = (strength, step + 1)
        if self._fused is not None:
            self._fused.advance()

    def draw_into(self, destinations: list[Tensor], draw: int = 0, sign: float = 1.0) -> None:
        """destinations ← w + sign·θ, for tensors with the strides of `local_weights`; w stays.

        They may be in bf16 or fp16 where the weights are in fp32: the sum is made in fp32 and rounded once, to the
        destination's dtype (one for all weights of a dtype). Streams in parallel may each do a draw.
        """
        if self._fused is not None:
            self._fused.draw_into(destinations, draw, sign)
        else:
            strength, step = self._position
            θ = self.draw(sign * strength, step, draw)
            torch._foreach_copy_(destinations, torch._foreach_add(θ, self._weights))
        increment_version(destinations)

    # ---- where everything is -----------------------------------------------------------------------------------------

    def find_weights(self) -> None:
        """Find the parameters again: a model that moved, changed its dtype or was sharded since has new tensors."""
        sharding.reshard(self.sharded_modules)
        if not are_there(self._edges):  # wrapped, or replaced, which raises
            self._edges = edges_to(self.model, self.selected)
        parameters = [s.owner._parameters.get(s.slot) for s in self.selected]
        same = len(self._parameters) == len(parameters) and all(map(operator.is_, parameters, self._parameters))
        rank = sharding.rank()  # a process group may begin after this object was made
        if same and rank == self._rank and _addresses(self._parameters) == self._addresses:
            return
        are_lent = _in_functional_call() or any(not isinstance(p, nn.Parameter | None) for p in parameters)
        if self._parameters and are_lent:
            raise RuntimeError(
                "torch.func.functional_call gave this attached model other tensors, to which no noise can be added; "
                "remove() the hooks, and call it inside `with smooth.perturbed():`, with tensors taken from the "
                "model's parameters there"
            )
        self._rank = rank
        with _outside_inference_mode():
            self._find_tensors()

    def _find_tensors(self) -> None:
        """All that depends on where the parameters are."""
        self.sharded_modules = sharding.sharded_modules(self.model)
        sharding.reshard(self.sharded_modules)
        self._parameters = [s.parameter for s in self.selected]
        if len(set(map(id, self._parameters))) < len(self._parameters):
            raise RuntimeError("weights were tied after SmoothOut was made: make a new one for this model")
        self._addresses = _addresses(self._parameters)
        shards = [sharding.local_part(p) for p in self._parameters]
        self._weights = [shard.local for shard in shards]
        self._backups = [
            torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device) for w in self._weights
        ]
        self._versions = [p._version for p in self._parameters]
        self._edges = edges_to(self.model, self.selected)
        self._witness = Witness(self._weights)
        self._slots = owners_of(self.model, self._parameters)
        self._state_dict_hook.remove()
        self._state_dict_hook = StateDictHook(
            self._slots, Hook(weak(self._clean_state_dict), weak(self._warn_of_copies))
        )
        layouts = [filter_layout(s.layer, s.layer_slot, p) for s, p in zip(self.selected, self._parameters)]
        overlaps = overlap(self._weights)
        if overlaps:
            warnings.warn(
                "perturbed parameters share memory, which takes the noise of each of them: tie weights as one "
                "parameter (b.weight = a.weight), not by their .data",
                stacklevel=2,
            )
        replicas = sharding.replicas(self.model, self._parameters, self.shared_noise)
        self._fused = None if overlaps else self._fuse(shards, layouts, replicas)
        self._blocks = []
        if self._fused is None:
            may_share = shares_fills(self.noise)  # a user's own noise draws parameter by parameter
            self._blocks = cut_into_blocks(self._parameters, shards, layouts, replicas, may_share)
        self._foreach = Foreach(
            self._blocks, self.selected, self._weights, self._backups, self.noise, self.scale, overlaps
        )

    def _fuse(self, shards: list[sharding.Shard], layouts: list[FilterLayout], replicas: list[int]) -> Fused | None:
        """The fused kernels if they can do these weights, else None.

        They can on one CUDA device that Triton supports, with the noises of this library, for tensors that are whole or
        cut by rows, if no filter spans ranks. SMOOTHOUT_KERNELS chooses: "auto" (the default): where they can; "fused":
        also in Triton's interpreter; "foreach": never.
        """
        wanted = os.environ.get("SMOOTHOUT_KERNELS", "auto")
        capable = all(w.is_cuda and torch.cuda.get_device_capability(w.device) >= (8, 0) for w in self._weights)
        whole_rows = all(shard.local.shape[1:] == p.shape[1:] for shard, p in zip(shards, self._parameters))
        cut_filters = isinstance(self.scale, filters.Filter) and any(
            sharding.groups_that_share_filters(p, layout) for p, layout in zip(self._parameters, layouts)
        )
        if wanted == "foreach" or not (capable or wanted == "fused") or not whole_rows or cut_filters:
            return None
        try:
            from smoothout.fused import fuse
            from smoothout.tables import Part
        except ImportError:
            return None
        parts = [
            Part(shard.local, backup, layout, i, replica, shard.start[0] if shard.start else 0)
            for i, (shard, backup, layout, replica) in enumerate(zip(shards, self._backups, layouts, replicas))
        ]
        return fuse(parts, self.noise, self.scale)


_applied: weakref.WeakSet[Perturbation] = weakref.WeakSet()  # those whose noise is in weights now


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """Buffers made in inference mode could not be written outside it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _in_functional_call() -> bool:
    """Whether the parameters may be lent ones, which go when the call ends, as far as the stack tells."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def _addresses(parameters: list[Tensor]) -> list[int]:
    if set(map(type, parameters)) == {nn.Parameter}:
        return list(map(Tensor.data_ptr, parameters))  # in a loop of C
    return [getattr(p, "_local_tensor", p).data_ptr() for p in parameters]
