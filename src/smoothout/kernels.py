"""Fused twins of perturb's draw and restore for CUDA, in Triton: one launch each for all tensors of a dtype.

This is the device's side, `fused` is the host's.

Raw noise comes from Philox inside the kernel and is never stored. The value of an element depends on (seed, step, draw,
replica, parameter, index) and on nothing else, not on the launch or the sharding. The index counts rows (dimension 0),
and within a row elements as they lie in memory, if they lie there without gaps. So it depends on the memory format: a
channels-last weight has the noise of a contiguous one in another order. With gaps it is C order. Philox itself makes a
key of the first four; the counter holds the parameter and a quarter of the index, since a call gives four words (see
`philox`).

A table in device memory says where every tensor lies and how it divides into filters; a list of items, one for each
program, says which part of which tensor to do. There are two kinds of ways to do it. "Vector": memory order is index
order and all boundaries are multiples of four, so a Philox call serves four neighbours and accesses are 16 bytes wide.
"Any": one Philox call an element and an offset computed from strides, for everything else.

Seed, step and strength may be read from device memory. So a captured CUDA graph draws anew at every replay, and nothing
here waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smoothout import filters
from smoothout.philox import BACKED_UP, noise_of_elements, noise_of_quads, position, stream_of

# Columns of the table of tensors. Geometry: element (i, j) of filter (g, f) has the index
# g·GROUP_STRIDE + f·FILTER_STRIDE + i·OUTER_STRIDE + j, with j < INNER, f < FILTERS_IN_GROUP.
WEIGHTS = tl.constexpr(0)  # address
PARAMETER = tl.constexpr(1)  # its number in the model
REPLICA = tl.constexpr(2)
FIRST = tl.constexpr(3)  # index, in the unsharded parameter, of the first element here
CLEAN_FROM = tl.constexpr(4)  # elements here that take no noise
CLEAN_TO = tl.constexpr(5)
ELEMENTS = tl.constexpr(6)
FILTERS = tl.constexpr(7)
FILTER_SIZE = tl.constexpr(8)
FILTERS_IN_GROUP = tl.constexpr(9)
GROUP_STRIDE = tl.constexpr(10)
FILTER_STRIDE = tl.constexpr(11)
INNER = tl.constexpr(12)
OUTER_STRIDE = tl.constexpr(13)
SIZES = tl.constexpr(14)  # of the last three of four dimensions
STRIDES = tl.constexpr(17)  # of all four, in memory
IN_MEMORY_ORDER = tl.constexpr(21)  # within a row the noise's index counts as memory does
COLUMNS_OF_TABLE = tl.constexpr(22)

ABSOLUTE, WEIGHT, FILTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What a launch writes: weights and backups; weights alone; w + θ elsewhere; θ alone elsewhere, in fp32.
APPLY, ADD, INTO, NOISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SMALLEST_NORM = tl.constexpr(filters.SMALLEST_NORM)

# Ways to do an item, as bits. Element by element, or filter by filter: gone through twice, so many elements at a time.
# "Any" tiles are smaller: they take more registers.
VECTOR, ANY, ANY_32, ANY_LARGE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
TWICE_32, TWICE_128, TWICE_LARGE = tl.constexpr(16), tl.constexpr(32), tl.constexpr(64)


# ---- vector ways -----------------------------------------------------------------------------------------------------


@triton.jit
def _span(tensor, stream, base, rows, size):
    """Rows × size neighbours in memory from element `base` on. What is inside counts from there, in 32 bits."""
    first_quad = ((tl.load(tensor + FIRST) + base) >> 2).to(tl.uint32)
    return stream, first_quad, rows.to(tl.int32), tl.multiple_of(size.to(tl.int32), 4)


@triton.jit
def _chunk(span, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a span: offsets, and which of them exist."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    # Masked by fours, so that the compiler sees that it may read and write four at once.
    inside = (rows < span[2]) & (column + columns // 4 * 4 < span[3])
    return rows * span[3] + (column + columns), inside


@triton.jit
def _noise_of_chunk(span, column, LAW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    quads = tl.arange(0, ROWS)[:, None] * (span[3] >> 2) + ((column >> 2) + tl.arange(0, WIDTH // 4)[None, :])
    return noise_of_quads(span[0], span[1] + quads.to(tl.uint32), LAW)


@triton.jit
def _write(weights, other, offset, inside, w, theta, OUTPUT):
    if OUTPUT == NOISE:
        tl.store(other + offset, theta, inside)
    else:
        moved = w.to(tl.float32) + theta  # in fp32, rounded once
        if OUTPUT == INTO:
            tl.store(other + offset, moved.to(other.dtype.element_ty), inside)
        else:
            if OUTPUT == APPLY:
                tl.store(other + offset, w, inside)
            tl.store(weights + offset, moved.to(w.dtype), inside)


@triton.jit
def _factor(norm_w, norm_n, scaling):
    """a·‖w‖/‖n‖, from (a, epsilon)."""
    return tl.div_rn(norm_w * scaling[0], tl.maximum(norm_n + scaling[1], SMALLEST_NORM))


@triton.jit
def _scaled(n, w, scaling, SCALE):
    """θ where it needs no more of the weights than its own element."""
    if SCALE == ABSOLUTE:
        return n * scaling[0]
    if SCALE == WEIGHT:
        return n * w.to(tl.float32) * scaling[0]
    return n * _factor(tl.abs(w.to(tl.float32)), tl.abs(n), scaling)  # every element is a filter of its own


@triton.jit
def _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    tensor, weights, other, stream, tile, scaling = job
    base = tl.multiple_of(tile * (COUNT * WIDTH), 4)
    left = tl.minimum(tl.load(tensor + ELEMENTS) - base, COUNT * WIDTH)
    span = _span(tensor, stream, base, left * 0 + 1, left)
    weights, other = weights + base, other + base
    held = ()
    for c in tl.static_range(COUNT):  # all reads first: they wait for memory together
        offset, inside = _chunk(span, c * WIDTH, 1, WIDTH)
        held = held + (tl.load(weights + offset, inside),)  # noqa: RUF005 (Triton knows no other way)
    for c in tl.static_range(COUNT):
        if c * WIDTH < left:
            offset, inside = _chunk(span, c * WIDTH, 1, WIDTH)
            theta = _scaled(_noise_of_chunk(span, c * WIDTH, LAW, 1, WIDTH), held[c], scaling, SCALE)
            if HAS_CLEAN:
                theta = tl.where(_is_clean(tensor, base + offset), 0.0, theta)
            _write(weights, other, offset, inside, held[c], theta, OUTPUT)


@triton.jit
def _is_clean(tensor, index):
    return (index >= tl.load(tensor + CLEAN_FROM)) & (index < tl.load(tensor + CLEAN_TO))


@triton.jit
def _filters(job, ROWS: tl.constexpr):
    """The next ROWS filters: their span, and pointers to its start."""
    tensor, weights, other, stream, tile, _ = job
    size = tl.multiple_of(tl.load(tensor + FILTER_SIZE), 4)
    base = tl.multiple_of(tile * ROWS * size, 4)
    rows = tl.minimum(tl.load(tensor + FILTERS) - tile * ROWS, ROWS)
    return _span(tensor, stream, base, rows, size), weights + base, other + base


@triton.jit
def _filter_factors(job, squares, HAS_CLEAN: tl.constexpr, ROWS: tl.constexpr):
    """From the squares of w and n in pairs.

    In pairs, since apart the compiler would lay them out differently, and move the noise from one layout to the other.
    """
    tensor, _, _, _, tile, scaling = job
    sum_w, sum_n = tl.split(tl.sum(squares, 1))
    factor = _factor(tl.sqrt_rn(sum_w[:, None]), tl.sqrt_rn(sum_n[:, None]), scaling)
    if HAS_CLEAN:
        first = (tile * ROWS + tl.arange(0, ROWS)[:, None]) * tl.load(tensor + FILTER_SIZE)
        factor = tl.where(_is_clean(tensor, first), 0.0, factor)
    return factor


@triton.jit
def _squares(span, column, w, inside, LAW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    w32, n = w.to(tl.float32), _noise_of_chunk(span, column, LAW, ROWS, WIDTH)
    return tl.join(w32 * w32, tl.where(inside, n * n, 0.0))


@triton.jit
def _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Filters of any size: gone through for the norms, and again (from the cache, and the same draw) to write."""
    span, weights, other = _filters(job, ROWS)
    size = span[3]
    squares = tl.zeros((ROWS, WIDTH, 2), tl.float32)
    column = size * 0
    while column < size:  # two chunks, so that two reads wait for memory together
        offset, inside = _chunk(span, column, ROWS, WIDTH)
        next_offset, next_inside = _chunk(span, column + WIDTH, ROWS, WIDTH)
        w = tl.load(weights + offset, inside, other=0.0)
        next_w = tl.load(weights + next_offset, next_inside, other=0.0)
        squares += _squares(span, column, w, inside, LAW, ROWS, WIDTH)
        if column + WIDTH < size:
            squares += _squares(span, column + WIDTH, next_w, next_inside, LAW, ROWS, WIDTH)
        column += 2 * WIDTH
    factor = _filter_factors(job, squares, HAS_CLEAN, ROWS)
    column = size * 0
    while column < size:
        offset, inside = _chunk(span, column, ROWS, WIDTH)
        theta = _noise_of_chunk(span, column, LAW, ROWS, WIDTH) * factor
        _write(weights, other, offset, inside, tl.load(weights + offset, inside), theta, OUTPUT)
        column += WIDTH


# ---- any ways --------------------------------------------------------------------------------------------------------


@triton.jit
def _index(tensor, filter, element):
    """The index of an element of a filter (see the table's geometry)."""
    in_group, inner = tl.load(tensor + FILTERS_IN_GROUP).to(tl.int32), tl.load(tensor + INNER).to(tl.int32)
    of_group = (filter // in_group) * tl.load(tensor + GROUP_STRIDE).to(tl.int32)
    of_filter = (filter % in_group) * tl.load(tensor + FILTER_STRIDE).to(tl.int32)
    return of_group + of_filter + (element // inner) * tl.load(tensor + OUTER_STRIDE).to(tl.int32) + element % inner


@triton.jit
def _offset_in_memory(tensor, index):
    """Where in memory the element of this index lies, by up to four dimensions."""
    size3, size2, size1 = tl.load(tensor + SIZES + 2), tl.load(tensor + SIZES + 1), tl.load(tensor + SIZES)
    rest, i3 = index // size3.to(tl.int32), index % size3.to(tl.int32)
    rest, i2 = rest // size2.to(tl.int32), rest % size2.to(tl.int32)
    i0, i1 = rest // size1.to(tl.int32), rest % size1.to(tl.int32)
    outer = i0 * tl.load(tensor + STRIDES) + i1 * tl.load(tensor + STRIDES + 1)
    return outer + i2 * tl.load(tensor + STRIDES + 2) + i3 * tl.load(tensor + STRIDES + 3)


@triton.jit
def _any_tile(tensor, stream, row, column, LAW, HAS_CLEAN, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Filters × their elements from (row, column) on: offsets in memory, which of them exist, raw noise."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    rows_left = tl.minimum(tl.load(tensor + FILTERS) - row, ROWS).to(tl.int32)
    columns_left = tl.minimum(tl.load(tensor + FILTER_SIZE) - column, WIDTH).to(tl.int32)
    inside = (rows < rows_left) & (columns < columns_left)
    index = tl.where(inside, _index(tensor, rows + row.to(tl.int32), columns + column.to(tl.int32)), 0)
    offset = _offset_in_memory(tensor, index)
    numbered = tl.where(tl.load(tensor + IN_MEMORY_ORDER) != 0, offset, index.to(tl.int64))
    n = noise_of_elements(stream, tl.load(tensor + FIRST) + numbered, LAW)
    if HAS_CLEAN:  # whole rows: the same in either order
        n = tl.where(_is_clean(tensor, index), 0.0, n)
    return offset, inside, n


@triton.jit
def _perturb_any_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, WIDTH: tl.constexpr):
    tensor, weights, other, stream, tile, scaling = job
    offset, inside, n = _any_tile(tensor, stream, tile * 0, tile * WIDTH, LAW, HAS_CLEAN, 1, WIDTH)
    w = tl.load(weights + offset, inside)
    _write(weights, other, offset, inside, w, _scaled(n, w, scaling, SCALE), OUTPUT)


@triton.jit
def _perturb_any_filters(job, LAW, OUTPUT, HAS_CLEAN, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    tensor, weights, other, stream, tile, _ = job
    size = tl.load(tensor + FILTER_SIZE)
    squares = tl.zeros((ROWS, WIDTH, 2), tl.float32)
    column = tile * 0
    while column < size:
        offset, inside, n = _any_tile(tensor, stream, tile * ROWS, column, LAW, HAS_CLEAN, ROWS, WIDTH)
        w32 = tl.load(weights + offset, inside, other=0.0).to(tl.float32)
        squares += tl.join(w32 * w32, tl.where(inside, n * n, 0.0))
        column += WIDTH
    factor = _filter_factors(job, squares, False, ROWS)
    column = tile * 0
    while column < size:
        offset, inside, n = _any_tile(tensor, stream, tile * ROWS, column, LAW, HAS_CLEAN, ROWS, WIDTH)
        _write(weights, other, offset, inside, tl.load(weights + offset, inside), n * factor, OUTPUT)
        column += WIDTH


# ---- the two launches ------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """From an address in a table. "Vector" accesses are of aligned tensors only, and no other is wide."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), 16)  # pyrefly: ignore[bad-argument-type]


_NUMBERS = ["group", "token", "draw", "sign", "epsilon", "strength", "in_memory"]
_NUMBERS += ["seed_low", "seed_high", "step_low", "step_high"]


@triton.jit(do_not_specialize=_NUMBERS)
def draw_kernel(
    items, table, others, state, group, token, draw, sign, epsilon,
    seed_low, seed_high, step_low, step_high, strength, in_memory,
    DTYPE: tl.constexpr, OTHER_DTYPE: tl.constexpr, LAW: tl.constexpr, SCALE: tl.constexpr, OUTPUT: tl.constexpr,
    HAS_CLEAN: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """WAYS has a bit for each way that the items take: others need no registers, and no time to compile."""
    item = items + tl.program_id(0) * 3
    number, tile, way = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64), tl.load(item + 2)
    tensor = table + number * COLUMNS_OF_TABLE
    seed, step, strength = position(state, seed_low, seed_high, step_low, step_high, strength, in_memory)
    stream = stream_of(seed, step, draw, tl.load(tensor + REPLICA), tl.load(tensor + PARAMETER))
    weights = _pointer(tensor + WEIGHTS, DTYPE)
    other = _pointer(others + number, OTHER_DTYPE)
    tl.store(state + BACKED_UP + group, token, mask=(tl.program_id(0) == 0) & (OUTPUT == APPLY))

    job = (tensor, weights, other, stream, tile, (strength * sign, epsilon))
    if way == VECTOR:
        if VECTOR & WAYS:
            if SCALE == FILTER:  # then these are biases: a small tile for them leaves registers to the others
                _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, 1, TILE // 4)
            else:
                _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, 4, TILE // 4)
    elif way == ANY:
        if ANY & WAYS:
            _perturb_any_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, TILE // 8)
    elif SCALE == FILTER:
        if way == ANY_32:
            if ANY_32 & WAYS:
                _perturb_any_filters(job, LAW, OUTPUT, HAS_CLEAN, TILE // 256, 32)
        elif way == ANY_LARGE:
            if ANY_LARGE & WAYS:
                _perturb_any_filters(job, LAW, OUTPUT, HAS_CLEAN, 1, TILE // 8)
        elif way == TWICE_32:
            if TWICE_32 & WAYS:
                _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, TILE // 128, 32)
        elif way == TWICE_128:
            if TWICE_128 & WAYS:
                _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, TILE // 512, 128)
        elif way == TWICE_LARGE:  # noqa: SIM102
            if TWICE_LARGE & WAYS:
                _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, 1, TILE // 4)


@triton.jit
def _copy(tensor, weights, backup, tile, elements, IS_VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    start, numbers = tile * WIDTH, tl.arange(0, WIDTH)
    left = tl.minimum(elements - start, WIDTH).to(tl.int32)
    if IS_VECTOR:
        start = tl.multiple_of(start, 4)
        weights, backup = weights + start, backup + start
        inside = numbers // 4 * 4 < left
        offset = numbers
    else:
        inside = numbers < left
        offset = _offset_in_memory(tensor, tl.where(inside, start.to(tl.int32) + numbers, 0))
    tl.store(weights + offset, tl.load(backup + offset, inside), inside)


@triton.jit(do_not_specialize=["group", "token"])
def restore_kernel(items, table, backups, state, group, token, DTYPE: tl.constexpr, TILE: tl.constexpr):
    item = items + tl.program_id(0) * 3
    number, tile, way = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64), tl.load(item + 2)
    tensor = table + number * COLUMNS_OF_TABLE
    weights = _pointer(tensor + WEIGHTS, DTYPE)
    backup = _pointer(backups + number, DTYPE)
    elements = tl.where(tl.load(state + BACKED_UP + group) == token, tl.load(tensor + ELEMENTS), 0)
    if way == VECTOR:
        _copy(tensor, weights, backup, tile, elements, True, TILE)
    else:
        _copy(tensor, weights, backup, tile, elements, False, TILE // 8)
