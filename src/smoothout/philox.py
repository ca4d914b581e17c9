"""Raw noise out of Philox, and where in its stream a draw is, on the device: part of `kernels`.

A call of Philox 4×32 gives four words, for four neighbours. It has seven rounds, the fewest with which it passes all of
BigCrush (Salmon et al., 2011); three more would be margin, and cost a third of the noise's time.

A stream is what Philox takes beside the index: a key, and three words of its counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIFORM, GAUSSIAN, RADEMACHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUNDS = tl.constexpr(7)
# Cells of the state. BACKED_UP has one for each dtype, with the token of the draw that backed up last: a restore whose
# draw was never launched must write nothing.
SEED, STEP, STRENGTH, BACKED_UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def position(state, seed_low, seed_high, step_low, step_high, strength, in_memory):
    """Seed, step and strength: as given, or from memory, where a given one is kept for draws that come later."""
    if in_memory != 0:
        seed, step = tl.load(state + SEED), tl.load(state + STEP)
        strength = tl.load((state + STRENGTH).to(tl.pointer_type(tl.float32)))
    else:
        seed = (seed_high.to(tl.int64) << 32) | seed_low.to(tl.uint32).to(tl.int64)
        step = (step_high.to(tl.int64) << 32) | step_low.to(tl.uint32).to(tl.int64)
        first = tl.program_id(0) == 0
        tl.store(state + SEED, seed, first)
        tl.store(state + STEP, step, first)
        tl.store((state + STRENGTH).to(tl.pointer_type(tl.float32)), strength, first)
    return seed, step, strength


@triton.jit
def stream_of(seed, step, draw, replica, parameter):
    """What Philox takes beside the index: a key and two words from (seed, step, draw, replica), and the parameter."""
    high, low, salt, pepper = tl.philox(
        seed,
        step.to(tl.uint32),
        (step >> 32).to(tl.uint32),
        draw.to(tl.uint32),
        replica.to(tl.uint32),
    )
    key = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return key, parameter.to(tl.uint32), salt, pepper


@triton.jit
def _from_word(word, LAW: tl.constexpr):
    if LAW == RADEMACHER:
        return ((word & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)  # 1, with a random sign
    # U(−1, 1): odd multiples of 2⁻²³, symmetric and never 0. The word's low bits are those of a number in [2, 4), what
    # is added then is exact. To convert integers would take four times as long.
    return (((word & 0x7FFFFF) | 0x40000000).to(tl.float32, bitcast=True) - 3.0) + (1.0 / 8388608.0)


@triton.jit
def _from_two_words(word, other):
    """Two independent normal values, by Box and Muller.

    The angle is quarter turns from two bits and the rest, |x| ≤ π/4, from thirty: there short polynomials give sine
    and cosine to fp32's precision, without the slow path for large arguments that library functions carry.
    """
    u = (word.to(tl.float32) + 1.0) * (1.0 / 4294967296.0)
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(u), 0.0))
    x = ((other >> 2).to(tl.int32) - 536870912).to(tl.float32) * (1.5707963267948966 / 1073741824.0)
    y = x * x
    sine = x * (1.0 + y * (-1.6666667e-1 + y * (8.3333310e-3 + y * (-1.9840874e-4 + y * 2.7525562e-6))))
    cosine = 1.0 + y * (-0.5 + y * (4.1666638e-2 + y * (-1.3888378e-3 + y * 2.4760495e-5)))
    swap, negate = (other & 1) != 0, (other & 2) != 0
    first, second = tl.where(swap, -sine, cosine) * radius, tl.where(swap, cosine, sine) * radius
    return tl.where(negate, -first, first), tl.where(negate, -second, second)


@triton.jit
def noise_of_quads(stream, quad, LAW: tl.constexpr):
    """Raw noise of four neighbours for every index/4: a tile four times as wide."""
    a, b, c, d = tl.philox(stream[0], quad, stream[1], stream[2], stream[3], n_rounds=ROUNDS)
    if LAW == GAUSSIAN:
        n0, n1 = _from_two_words(a, b)
        n2, n3 = _from_two_words(c, d)
    else:
        n0, n1, n2, n3 = _from_word(a, LAW), _from_word(b, LAW), _from_word(c, LAW), _from_word(d, LAW)
    return tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), (quad.shape[0], 4 * quad.shape[1]))


@triton.jit
def noise_of_elements(stream, index, LAW: tl.constexpr):
    """The same values, for elements in any order."""
    a, b, c, d = tl.philox(stream[0], (index >> 2).to(tl.uint32), stream[1], stream[2], stream[3], n_rounds=ROUNDS)
    lane = (index & 3).to(tl.int32)
    even, odd = tl.where(lane < 2, a, c), tl.where(lane < 2, b, d)
    if LAW == GAUSSIAN:
        n0, n1 = _from_two_words(even, odd)
        return tl.where(lane % 2 == 0, n0, n1)
    return _from_word(tl.where(lane % 2 == 0, even, odd), LAW)
