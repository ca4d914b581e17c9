"""Noise by torch's own operations, block by block (see `blocks`): on a CPU, and wherever the fused kernels cannot.

Each block has a generator of its own, seeded with (seed, step, draw, replica, block): many tensors take few operations,
and scratch memory is one block, and the random integers of a few.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smoothout import filters, sharding
from smoothout.blocks import Block, Piece, filter_factors
from smoothout.noise import ElementwiseNoise, MadeOfInt16, Noise, random_int16, shares_fills, state_of_words
from smoothout.select import Selected

# Elements whose random integers, 4 MiB, are drawn before the first is used. One thread draws and all read: memory
# that is written again while the others still have it in their caches costs more than the integers themselves.
DRAWN_AHEAD = 2**21


@dataclass(frozen=True, eq=False)
class _Job:
    """A block, and the views that a draw needs of it: made once, since each costs as much as a small operation."""

    block: Block
    raw: Tensor  # scratch memory, flat
    θ: list[Tensor]  # the pieces' noise in it
    weights: list[Tensor]
    backups: list[Tensor]


class Foreach:
    """Draws for a fixed list of tensors.

    Args:
        blocks: of the tensors that take noise.
        selected: the parameters that the blocks' pieces count.
        weights, backups: all local tensors in the order of `selected`, and beside each one with its shape.
        overlap: some weights share memory.
        noise, scale: raw noise and how it is scaled.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        selected: Sequence[Selected],
        weights: list[Tensor],
        backups: list[Tensor],
        noise: Noise,
        scale: filters.Scale,
        overlap: bool,
    ) -> None:
        self._overlap = overlap
        self._selected, self._weights, self._backups = selected, weights, backups
        self._noise, self._scale = noise, scale
        self._generators: dict[torch.device, torch.Generator] = {}
        self.scratch: dict[torch.device, Tensor] = {}
        for block in blocks:
            largest = max(block.elements, len(self.scratch.get(block.device, ())))
            self.scratch[block.device] = torch.empty(largest, dtype=torch.float32, device=block.device)
        self._jobs = [
            _Job(
                block,
                self.scratch[block.device][: block.elements],
                [piece.noise_in(self.scratch[block.device]) for piece in block.pieces],
                [piece.weights for piece in block.pieces],
                [piece.rows_of(backups[piece.parameter]) for piece in block.pieces],
            )
            for block in blocks
        ]
        self._windows = list(_windows(self._jobs))
        self._backed_up = 0  # so many jobs are: the weights of the others are clean

    # ---- apply and restore -------------------------------------------------------------------------------------------

    def forget_backups(self) -> None:
        """The weights are clean, and what is in the backups is old."""
        self._backed_up = 0

    def apply(self, seed: int, strength: float, step: int, draw: int) -> None:
        """backup ← w, w ← w + θ, block by block: the norms and the sum find the weights in a cache."""
        if self._overlap:  # one block's weights may be another's
            torch._foreach_copy_(self._backups, self._weights)
            self._backed_up = len(self._jobs)
        for number, (job, raw, θ) in enumerate(self._raw((seed, step, draw))):
            if not self._overlap:
                torch._foreach_copy_(job.backups, job.weights)
                self._backed_up = number + 1  # before the sum: an interrupt between them does no harm
            torch._foreach_add_(job.weights, self._scaled(job, raw, θ, strength))

    def add(self, seed: int, strength: float, step: int, draw: int) -> None:
        """w ← w + θ; the backups stay."""
        for job, raw, θ in self._raw((seed, step, draw)):
            torch._foreach_add_(job.weights, self._scaled(job, raw, θ, strength))

    def restore(self) -> None:
        """w ← backup, where there is one."""
        if self._backed_up == len(self._jobs):
            torch._foreach_copy_(self._weights, self._backups)
        else:
            for job in self._jobs[: self._backed_up]:
                torch._foreach_copy_(job.weights, job.backups)

    def complete_backups(self) -> None:
        """Back up what `apply` has not come to yet."""
        for job in self._jobs[self._backed_up :]:
            torch._foreach_copy_(job.backups, job.weights)

    # ---- noise -------------------------------------------------------------------------------------------------------

    def noise(self, seed: int, strength: float, step: int, draw: int) -> Iterator[tuple[Piece, Tensor]]:
        """θ of every piece: a view of scratch memory that the next block overwrites."""
        for job, raw, θ in self._raw((seed, step, draw)):
            yield from zip(job.block.pieces, self._scaled(job, raw, θ, strength))

    def _scaled(self, job: _Job, raw: Tensor, θ: list[Tensor], strength: float) -> list[Tensor]:
        for row in job.block.clean_rows(θ):
            row.zero_()
        if isinstance(self._scale, filters.Filter):
            factors = filter_factors(job.block.pieces, θ, strength, self._scale.epsilon)
            # In place if it can be: the noise of double-precision weights is scaled in double precision.
            if any(factor.dtype != torch.float32 for factor in factors):
                return list(torch._foreach_mul(θ, factors))
            torch._foreach_mul_(θ, factors)
        else:
            if isinstance(self._scale, filters.Weight):
                if any(weight.dtype == torch.float64 for weight in job.weights):
                    return list(torch._foreach_mul(torch._foreach_mul(θ, job.weights), strength))
                torch._foreach_mul_(θ, job.weights)
            raw.mul_(strength)
        return θ

    def _raw(self, position: tuple[int, int, int]) -> Iterator[tuple[_Job, Tensor, list[Tensor]]]:
        """Block by block n in fp32, flat, and its pieces."""
        noise = self._noise
        # All states first: each megabyte of words drives what Python and torch need out of the cache.
        states = {job: state_of_words(self._generator(job, position)) for job in self._jobs if self._as_integers(job)}
        for window in self._windows:
            drawn = [random_int16(len(job.raw), states[job]) if job in states else None for job in window]
            for job, integers in zip(window, drawn):
                raw, θ = job.raw, job.θ
                if integers is not None:
                    assert isinstance(noise, MadeOfInt16)
                    noise.make(integers, raw)
                elif isinstance(noise, ElementwiseNoise) and shares_fills(noise):
                    noise.fill(raw, self._generator(job, position))
                else:
                    raw = self._users_own(job.block, self._generator(job, position))
                    θ = [piece.noise_in(raw) for piece in job.block.pieces]
                yield job, raw, θ

    def _as_integers(self, job: _Job) -> bool:
        """Whether integers are drawn first: not if a class derived from ours fills in a way of its own."""
        own = shares_fills(self._noise) and getattr(type(self._noise), "fill", None) is MadeOfInt16.fill
        return own and job.block.device.type == "cpu"

    def _users_own(self, block: Block, generator: torch.Generator) -> Tensor:
        (piece,) = block.pieces
        selected = self._selected[piece.parameter]
        parameter = sharding.whole(selected.parameter)
        raw = self._noise.draw(parameter, generator)
        if not isinstance(raw, Tensor):
            raise TypeError(
                f"noise {self._noise!r} drew a {type(raw).__name__} for {selected.name}: draw(parameter, generator) "
                "must return a tensor of the parameter's shape"
            )
        if raw.shape != parameter.shape:
            raise ValueError(
                f"noise {self._noise!r} drew a tensor of shape {tuple(raw.shape)} for {selected.name}, whose shape is "
                f"{tuple(parameter.shape)}"
            )
        return raw.detach().to(block.device, torch.float32, copy=True).reshape(-1)

    def _generator(self, job: _Job, position: tuple[int, int, int]) -> torch.Generator:
        """The device's generator, with the block's seed."""
        block = job.block
        key = struct.pack("<5q", *position, block.replica, block.index)
        if block.device not in self._generators:
            self._generators[block.device] = torch.Generator(block.device)
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
        return self._generators[block.device].manual_seed(seed)


def _windows(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Runs of jobs whose integers are drawn together."""
    window: list[_Job] = []
    for job in jobs:
        if window and sum(len(other.raw) for other in window) + len(job.raw) > DRAWN_AHEAD:
            yield window
            window = []
        window.append(job)
    if window:
        yield window
