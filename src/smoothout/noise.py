"""Raw noise n: zero-mean values in fp32, before any strength or scale."""

from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class Noise(Protocol):
    """What `SmoothOut(noise=…)` accepts: one method that gives raw values for a parameter.

    The values are fp32, have the parameter's shape and depend on nothing but the generator (and, if you like, the
    parameter): strength, scale, schedule and rounding are applied by the library.
    """

    def draw(self, parameter: Tensor, generator: torch.Generator) -> Tensor: ...


class _ElementwiseNoise:
    """Noise whose elements are independent and alike, so that many tensors can share one fill."""

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        """Write raw values into `out`: fp32, one-dimensional, contiguous."""
        raise NotImplementedError

    def draw(self, parameter: Tensor, generator: torch.Generator) -> Tensor:
        out = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
        self.fill(out, generator)
        return out.view(parameter.shape)


_own = threading.local()  # each thread's bit generator: to make one takes as long as to fill a small tensor


def _fill_with_random_int16(out: Tensor, generator: torch.Generator) -> None:
    """Independent uniform integers in [−2¹⁵, 2¹⁵), four out of each 64-bit word: a sixth of the cost of `uniform_`.

    The words come from SFC64, twice as fast as torch's Mersenne twister. Its state is a hash of the generator's own
    seed, all 64 bits of it (the twister uses 32), and of a draw, so that the generator moves on.
    """
    draw = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    key = struct.pack("<Qq", generator.initial_seed() % 2**64, int(draw))
    state = np.frombuffer(hashlib.blake2b(key, digest_size=24).digest(), dtype="<u8")
    if not hasattr(_own, "bits"):
        _own.bits = np.random.SFC64(0)
    counted = {"state": np.append(state, np.uint64(1))}  # the fourth word counts
    _own.bits.state = {"bit_generator": "SFC64", "state": counted, "has_uint32": 0, "uinteger": 0}
    words = _own.bits.random_raw((out.numel() + 3) // 4)
    out.copy_(torch.from_numpy(words.view(np.int16))[: out.numel()])


_HALF_A_STEP = torch.tensor(2.0**-16, device="cpu")


@dataclass(frozen=True)
class Uniform(_ElementwiseNoise):
    """n ~ U(−1, 1), so that θ = a·n is the paper's U(−a, a); variance ⅓.

    On a CPU the values are the 65,536 midpoints of a regular grid on (−1, 1), which has the same mean and, to 2e−10,
    the same variance.
    """

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        if out.device.type == "cpu":
            _fill_with_random_int16(out, generator)
            # (k + ½)·2⁻¹⁵ in one pass, and exact
            torch.add(_HALF_A_STEP, out, alpha=2.0**-15, out=out)
        else:
            out.uniform_(-1.0, 1.0, generator=generator)


@dataclass(frozen=True)
class Gaussian(_ElementwiseNoise):
    """n ~ N(0, 1): the strength a is the standard deviation."""

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        out.normal_(generator=generator)


@dataclass(frozen=True)
class Rademacher(_ElementwiseNoise):
    """n = ±1 with equal probability."""

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        if out.device.type == "cpu":
            _fill_with_random_int16(out, generator)
            out.add_(0.5).sign_()
        else:
            out.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)


@dataclass(frozen=True)
class Bernoulli(_ElementwiseNoise):
    """n = −1 with probability p, else 0. With `scale="weight"` and a = 1 this is the paper's view of dropout.

    Args:
        p: the probability that a weight is dropped.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"Bernoulli(p={self.p!r}): p is a probability, between 0 and 1")

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        out.bernoulli_(self.p, generator=generator).neg_()


NAMES: dict[str, type[_ElementwiseNoise]] = {
    "uniform": Uniform,
    "gaussian": Gaussian,
    "rademacher": Rademacher,
    "bernoulli": Bernoulli,
}


def as_noise(noise: str | Noise) -> Noise:
    """A noise from its name, or the object itself if it has a `draw` method."""
    if isinstance(noise, str):
        if noise not in NAMES:
            raise ValueError(f"noise={noise!r} is not known: use one of {sorted(NAMES)}, or an object with draw()")
        return NAMES[noise]()
    if isinstance(noise, type) or not isinstance(noise, Noise):
        raise TypeError(
            f"noise={noise!r} has no method draw(parameter, generator): use one of {sorted(NAMES)}, "
            "or an object that has one"
        )
    return noise
