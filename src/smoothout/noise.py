"""Raw noise n: zero-mean values in fp32, before any strength or scale."""

from __future__ import annotations

import hashlib
import numbers
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


class ElementwiseNoise:
    """Noise whose elements are independent and alike, so that many tensors can share one fill."""

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        """Write raw values into `out`: fp32, one-dimensional, contiguous."""
        raise NotImplementedError

    def draw(self, parameter: Tensor, generator: torch.Generator) -> Tensor:
        out = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
        self.fill(out, generator)
        return out.view(parameter.shape)


def shares_fills(noise: Noise) -> bool:
    """Whether many tensors can share one fill. A class derived from ours may have a `draw` of its own: that counts."""
    return isinstance(noise, ElementwiseNoise) and type(noise).draw is ElementwiseNoise.draw


_own = threading.local()  # each thread's bit generator: to make one takes as long as to fill a small tensor
_COUNT_FROM_1 = struct.pack("<Q", 1)


def state_of_words(generator: torch.Generator) -> bytes:
    """Where the words of `random_int16` start: a hash of the generator's seed and of a number drawn from it.

    The seed, since torch's Mersenne twister uses 32 of its 64 bits; the number, so that the generator moves on.
    """
    draw = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    key = struct.pack("<Qq", generator.initial_seed() % 2**64, int(draw))
    return hashlib.blake2b(key, digest_size=24).digest() + _COUNT_FROM_1  # the fourth word of the state counts


def random_int16(count: int, state: bytes) -> Tensor:
    """Independent uniform integers in [−2¹⁵, 2¹⁵), four out of each 64-bit word: a sixth of the cost of `uniform_`.

    The words come from SFC64, twice as fast as torch's Mersenne twister.
    """
    if not hasattr(_own, "bits"):
        _own.bits = np.random.SFC64(0)
    words = {"state": np.frombuffer(state, dtype="<u8")}
    _own.bits.state = {"bit_generator": "SFC64", "state": words, "has_uint32": 0, "uinteger": 0}
    return torch.from_numpy(_own.bits.random_raw((count + 3) // 4).view(np.int16)[:count])


class MadeOfInt16(ElementwiseNoise):
    """Noise that on a CPU is made of random integers, which can be drawn before there is room for the noise."""

    def make(self, integers: Tensor, out: Tensor) -> None:
        """Turn integers of `random_int16` into raw values."""
        raise NotImplementedError

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        if out.device.type == "cpu":
            self.make(random_int16(out.numel(), state_of_words(generator)), out)
        else:
            self.fill_on_device(out, generator)

    def fill_on_device(self, out: Tensor, generator: torch.Generator) -> None:
        """`fill` elsewhere than on a CPU."""
        raise NotImplementedError


_HALF_A_STEP = torch.tensor(2.0**-16, device="cpu")


@dataclass(frozen=True)
class Uniform(MadeOfInt16):
    """n ~ U(−1, 1), so that θ = a·n is the paper's U(−a, a); variance ⅓.

    On a CPU the values are the 65,536 midpoints of a regular grid on (−1, 1), which has the same mean and, to 2e−10,
    the same variance.
    """

    def make(self, integers: Tensor, out: Tensor) -> None:
        out.copy_(integers)
        # (k + ½)·2⁻¹⁵ in one pass, and exact
        torch.add(_HALF_A_STEP, out, alpha=2.0**-15, out=out)

    def fill_on_device(self, out: Tensor, generator: torch.Generator) -> None:
        out.uniform_(-1.0, 1.0, generator=generator)


@dataclass(frozen=True)
class Gaussian(ElementwiseNoise):
    """n ~ N(0, 1): the strength a is the standard deviation."""

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        out.normal_(generator=generator)


@dataclass(frozen=True)
class Rademacher(MadeOfInt16):
    """n = ±1 with equal probability."""

    def make(self, integers: Tensor, out: Tensor) -> None:
        out.copy_(integers).add_(0.5).sign_()

    def fill_on_device(self, out: Tensor, generator: torch.Generator) -> None:
        out.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)


@dataclass(frozen=True)
class Bernoulli(ElementwiseNoise):
    """n = −1 with probability p, else 0. With `scale="weight"` and a = 1 this is the paper's view of dropout.

    Args:
        p: the probability that a weight is dropped.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.p, numbers.Real):
            raise TypeError(f"Bernoulli(p={self.p!r}): p is a probability, a number between 0 and 1")
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"Bernoulli(p={self.p!r}): p is a probability, between 0 and 1")
        object.__setattr__(self, "p", float(self.p))

    def fill(self, out: Tensor, generator: torch.Generator) -> None:
        out.bernoulli_(self.p, generator=generator).neg_()


NAMES: dict[str, type[ElementwiseNoise]] = {
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
