"""The host's side of the fused kernels: which tensors they can do, and the launches.

It imports Triton: `perturb` imports it only when there is a CUDA device to use it on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from smoothout import filters, kernels, noise, philox
from smoothout.filters import FilterLayout
from smoothout.tables import Launch, Part, describe_group, in_order, merged_dimensions, on, pinned

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}
_LAWS: dict[type, tl.constexpr] = {
    noise.Uniform: philox.UNIFORM,
    noise.Gaussian: philox.GAUSSIAN,
    noise.Rademacher: philox.RADEMACHER,
}
_SCALES: dict[type, tl.constexpr] = {
    filters.Absolute: kernels.ABSOLUTE,
    filters.Weight: kernels.WEIGHT,
    filters.Filter: kernels.FILTER,
}

# Arguments of a launch whose seed, step and strength are in device memory.
_IN_MEMORY = (0, 0, 0, 0, 0.0, 1)


def _halves(number: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit number, each with a sign, as Triton passes them whatever their size."""
    low, high = number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def can_fuse(parts: Sequence[Part], law: noise.Noise) -> bool:
    """Whether the kernels can draw this noise for these tensors; where not, foreach does.

    Not: double precision, more than four dimensions that do not merge, a stride of 0, 2³¹ elements or more (2³⁴ if
    all is in order, and a row has less than 2³¹), more than one device.
    """
    if type(law) not in _LAWS or len({part.weights.device for part in parts}) != 1:
        return False
    return all(
        part.weights.dtype in _DTYPES
        and merged_dimensions(part.weights) is not None
        and part.row_size < 2**31 - 2**16
        and part.first + part.weights.numel() < (2**34 if in_order(part) else 2**31 - 2**16)
        for part in parts
    )


def fuse(parts: Sequence[Part], law: noise.Noise, scale: filters.Scale) -> Fused | None:
    """The kernels for these parts, or None: where they cannot do them, or where Triton does not work."""
    if not can_fuse(parts, law):
        return None
    try:
        fused = Fused(parts, law, scale)
        fused.rehearse(law, scale)
    except Exception as error:
        warnings.warn(f"Triton does not work here, so noise takes more and smaller kernels: {error!r}", stacklevel=2)
        return None
    return fused


class Fused:
    """Draws for a fixed list of tensors on one device.

    Args:
        parts: what takes noise.
        law, scale: raw noise and how it is scaled.
        launch: speed.
    """

    def __init__(
        self, parts: Sequence[Part], law: noise.Noise, scale: filters.Scale, launch: Launch | None = None, ways: int = 0
    ) -> None:
        self._parts = list(parts)
        self._options = launch = Launch() if launch is None else launch
        self._device = parts[0].weights.device
        self._law, self._scale = _LAWS[type(law)], _SCALES[type(scale)]
        self._epsilon = scale.epsilon if isinstance(scale, filters.Filter) else 0.0
        dtypes = dict.fromkeys(part.weights.dtype for part in parts)
        self._groups = [
            describe_group(parts, dtype, isinstance(scale, filters.Filter), launch, ways) for dtype in dtypes
        ]
        self._state = torch.zeros(philox.BACKED_UP.value + len(self._groups), dtype=torch.int64, device=self._device)
        self._destinations: dict[tuple[int, ...], list[Tensor]] = {}
        self._captured_step: int | None = None
        self._arguments = _IN_MEMORY
        self._token = 0  # of the last draw that backs up
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": {}}

    def rehearse(self, law: noise.Noise, scale: filters.Scale) -> None:
        """Compile the kernels and try them on a few weights: a machine may lack what Triton needs."""
        for group in self._groups:
            weights = torch.ones(2, 4, dtype=group.dtype, device=self._device)
            layout = FilterLayout(0, 1, 0 if group.has_clean else None)
            part = Part(weights, torch.zeros_like(weights), layout, 0, 0, 0)
            trial = Fused([part], law, scale, self._options, group.ways)
            trial.set_position(0, 0, 0.5)
            trial.apply()
            noisy = weights.clone()
            trial.restore()
            if not (weights == 1.0).all() or (noisy[1] == 1.0).all():
                raise RuntimeError(f"a draw gave {noisy.tolist()}, a restore {weights.tolist()}")

    # ---- position ----------------------------------------------------------------------------------------------------

    def at(self, seed: int, step: int, strength: float, backed_up: bool = False) -> None:
        """What the next launches draw with, as arguments of theirs.

        In a CUDA graph that is being captured, arguments would stay the same for ever. There every new `step` adds one
        to the step in device memory, so each replay draws the next step's noise, with the strength that was set last.

        Args:
            backed_up: the backups stay those of before.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if step != self._captured_step:
                self.advance()
            self._captured_step = step
            return
        self._captured_step = None
        self._arguments = (*_halves(seed), *_halves(step), float(strength), 0)
        if not backed_up:
            self._token = self._token % (2**31 - 1) + 1

    def set_position(self, seed: int, step: int, strength: float) -> None:
        """The same in device memory, by an asynchronous copy: for launches on other streams, or in a captured graph."""
        self.at(seed, step, strength)
        if self._captured_step is None:
            bits = int(np.float32(strength).view(np.uint32))
            values = np.array([seed, step, bits, *[0] * len(self._groups)], dtype=np.int64)
            self._state.copy_(pinned(values, self._device), non_blocking=True)
            self._arguments = _IN_MEMORY

    def advance(self) -> None:
        """Go on to the next step, in device memory: captured in a CUDA graph, every replay draws other noise."""
        self._state[philox.STEP.value].add_(1)
        self._arguments = _IN_MEMORY

    # ---- launches ----------------------------------------------------------------------------------------------------

    def apply(self, draw: int = 0, sign: float = 1.0) -> None:
        """backup ← w, w ← w + θ."""
        self._draw(kernels.APPLY, [group.backups for group in self._groups], draw, sign)

    def add(self, draw: int = 0, sign: float = 1.0) -> None:
        """w ← w + θ; the backups stay."""
        self._draw(kernels.ADD, [group.backups for group in self._groups], draw, sign)

    def draw_into(self, destinations: Sequence[Tensor], draw: int = 0, sign: float = 1.0) -> None:
        """destination ← w + θ, for tensors with the strides of the weights; w stays.

        They may have another dtype (fp32, bf16, fp16) than the weights, the same one for all weights of a dtype: w + θ
        is computed in fp32 and rounded to it once. Streams in parallel may do this for several draws of one position.
        Before it is captured in a CUDA graph it must have run once with these destinations.
        """
        for part, t in zip(self._parts, destinations, strict=True):
            same = t.shape == part.weights.shape and t.stride() == part.weights.stride()
            if not same or t.dtype not in _DTYPES or t.device != self._device or t.data_ptr() % 16:
                raise ValueError(
                    "a destination needs its weight's shape, strides and device, a dtype of 16 or 32 bits, and 16-byte "
                    f"alignment; one for {tuple(part.weights.shape)} is {t.dtype}, {tuple(t.shape)}, with strides "
                    f"{t.stride()}, on {t.device}"
                )
        dtypes = [{destinations[i].dtype for i in group.parts} for group in self._groups]
        if any(len(kinds) > 1 for kinds in dtypes):
            raise ValueError(f"destinations of weights of one dtype have several: {dtypes}")
        addresses = tuple(t.data_ptr() for t in destinations)
        if addresses not in self._destinations:
            self._destinations[addresses] = self._addresses(destinations)
        self._draw(kernels.INTO, self._destinations[addresses], draw, sign, [next(iter(kinds)) for kinds in dtypes])

    def noise(self, draw: int = 0) -> list[Tensor]:
        """θ in fp32, as new tensors."""
        like = [part.weights for part in self._parts]
        result = [torch.empty_strided(w.shape, w.stride(), dtype=torch.float32, device=w.device) for w in like]
        self._draw(kernels.NOISE, self._addresses(result), draw, 1.0, [torch.float32] * len(self._groups))
        return result

    def restore(self) -> None:
        """w ← backup, if `apply` was launched since the position was set."""
        for number, group in enumerate(self._groups):
            operands = (group.restore_items, group.table, group.backups, self._state, number, self._token)
            constants = {"DTYPE": _BITS[group.dtype]}
            self._launch(kernels.restore_kernel, group.restore_programs, operands, constants, (number, "restore"))

    def _draw(
        self,
        output: tl.constexpr,
        others: list[Tensor],
        draw: int,
        sign: float,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        dtypes = [group.dtype for group in self._groups] if dtypes is None else dtypes
        for number, (group, addresses, dtype) in enumerate(zip(self._groups, others, dtypes)):
            operands = (group.items, group.table, addresses, self._state, number, self._token, draw, sign)
            operands += (self._epsilon, *self._arguments)
            constants = {
                "DTYPE": _DTYPES[group.dtype],
                "OTHER_DTYPE": _DTYPES[dtype],
                "LAW": self._law.value,
                "SCALE": self._scale.value,
                "OUTPUT": output.value,
                "HAS_CLEAN": group.has_clean,
                "WAYS": group.ways,
            }
            key = (number, output.value, dtype)
            # Without fusion w + a·n rounds a·n first, as `noise` and foreach do.
            self._launch(kernels.draw_kernel, group.programs, operands, constants, key, enable_fp_fusion=False)

    def _launch(
        self, kernel: Any, programs: int, operands: tuple[Any, ...], constants: dict[str, Any], key: Any, **options: Any
    ) -> None:
        """Once through Triton's front end, then by what it compiled: the front end takes longer than the device."""
        if not programs:
            return
        constants |= {"TILE": self._options.tile}
        device = self._device
        here = device.type != "cuda" or torch.cuda.current_device() == device.index
        with nullcontext() if here else torch.cuda.device(device):
            if (compiled := self._compiled.get(key)) is not None:
                compiled[(programs, 1, 1)](*operands, *constants.values())
            else:
                options |= {"num_warps": self._options.warps}
                # Triton's interpreter compiles nothing, and gives None.
                self._compiled[key] = kernel[(programs,)](*operands, **constants, **options)

    def _addresses(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Per group, the addresses of tensors that stand beside the parts."""
        return [
            on(self._device, np.array([tensors[i].data_ptr() for i in group.parts], dtype=np.int64))
            for group in self._groups
        ]
