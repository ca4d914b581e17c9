"""Fused twins of perturb's draw and restore for CUDA, in Triton: one launch each for all tensors of a dtype.

This is the device's side, `fused` is the host's.

Raw noise comes from Philox inside the kernel and is never stored. The value of an element depends on (seed, step, draw,
replica, parameter, index of the element in C order) and on nothing else: not on the launch, the memory format or the
sharding. Philox itself makes a key of the first four; its counter holds the parameter and a quarter of the index, since
one call gives the words of four elements.

A table in device memory says where every tensor lies and how it divides into filters; a list of items, one for each
program, says which part of which tensor to do. There are two ways to do a part. "Vector": memory order is index order
and all boundaries are multiples of four, so a Philox call serves four neighbours and accesses are 16 bytes wide. "Any":
one Philox call an element and an offset computed from strides, for everything else.

Seed, step and strength are read from device memory. So a captured CUDA graph draws anew at every replay, and nothing
here waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smoothout import filters

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
COLUMNS_OF_TABLE = tl.constexpr(21)

# Cells of the state. BACKED_UP has one for each dtype: a restore before its draw was launched must write nothing.
SEED, STEP, STRENGTH, BACKED_UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

UNIFORM, GAUSSIAN, RADEMACHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ABSOLUTE, WEIGHT, FILTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What a launch writes: weights and backups; weights alone; w + θ elsewhere; θ alone elsewhere, in fp32.
APPLY, ADD, INTO, NOISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SMALLEST_NORM = tl.constexpr(filters.SMALLEST_NORM)

# Ways to do an item. The first two go element by element, the others filter by filter, so many elements at a time.
# "Any" tiles are a quarter as large: they take more registers.
VECTOR, VECTOR_64, VECTOR_256, VECTOR_1024 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
VECTOR_TILE, VECTOR_LARGE = tl.constexpr(4), tl.constexpr(5)
ANY, ANY_32, ANY_LARGE = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)


# ---- noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def _stream(state, tensor, draw):
    """What Philox takes beside the index: a key and two words from (seed, step, draw, replica), and the parameter."""
    seed, step, replica = tl.load(state + SEED), tl.load(state + STEP), tl.load(tensor + REPLICA)
    high, low, salt, pepper = tl.philox(
        seed, step.to(tl.uint32), (step >> 32).to(tl.uint32), draw.to(tl.uint32), replica.to(tl.uint32)
    )
    key = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return key, tl.load(tensor + PARAMETER).to(tl.uint32), salt, pepper


@triton.jit
def _from_word(word, LAW: tl.constexpr):
    if LAW == RADEMACHER:
        return tl.where((word >> 31) == 0, 1.0, -1.0)
    # U(−1, 1): the odd multiples of 2⁻²³, which fp32 holds exactly; symmetric, and never 0.
    return (((word >> 8) | 1).to(tl.int32) - 8388608).to(tl.float32) * (1.0 / 8388608.0)


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
def _noise_of_quads(stream, quad, LAW: tl.constexpr):
    """Raw noise of four neighbours for every index/4: a tile four times as wide."""
    a, b, c, d = tl.philox(stream[0], quad, stream[1], stream[2], stream[3])
    if LAW == GAUSSIAN:
        n0, n1 = _from_two_words(a, b)
        n2, n3 = _from_two_words(c, d)
    else:
        n0, n1, n2, n3 = _from_word(a, LAW), _from_word(b, LAW), _from_word(c, LAW), _from_word(d, LAW)
    return tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), (quad.shape[0], 4 * quad.shape[1]))


@triton.jit
def _noise_of_elements(stream, index, LAW: tl.constexpr):
    """The same values, for elements in any order."""
    a, b, c, d = tl.philox(stream[0], (index >> 2).to(tl.uint32), stream[1], stream[2], stream[3])
    lane = (index & 3).to(tl.int32)
    even, odd = tl.where(lane < 2, a, c), tl.where(lane < 2, b, d)
    if LAW == GAUSSIAN:
        n0, n1 = _from_two_words(even, odd)
        return tl.where(lane % 2 == 0, n0, n1)
    return _from_word(tl.where(lane % 2 == 0, even, odd), LAW)


# ---- tiles -----------------------------------------------------------------------------------------------------------


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
def _tile(
    tensor, stream, row, column, LAW, HAS_CLEAN, IS_VECTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Filters × their elements from (row, column) on: offsets in memory, which of them exist, raw noise."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    size = tl.load(tensor + FILTER_SIZE)
    rows_left = tl.minimum(tl.load(tensor + FILTERS) - row, ROWS).to(tl.int32)
    columns_left = tl.minimum(size - column, WIDTH).to(tl.int32)
    if IS_VECTOR:
        size = tl.multiple_of(size, 4)
        base = tl.multiple_of(row * size + column, 4)
        inside = (rows < rows_left) & (columns // 4 * 4 < columns_left)  # the compiler sees: the same for four at once
        index = base + (rows * size.to(tl.int32) + columns)
        first_quad = ((tl.load(tensor + FIRST) + base) >> 2).to(tl.uint32)
        quads = rows * (size >> 2).to(tl.int32) + tl.arange(0, WIDTH // 4)[None, :]
        n = _noise_of_quads(stream, first_quad + quads.to(tl.uint32), LAW)
        offset = index
    else:
        inside = (rows < rows_left) & (columns < columns_left)
        index = tl.where(inside, _index(tensor, rows + row.to(tl.int32), columns + column.to(tl.int32)), 0)
        n = _noise_of_elements(stream, tl.load(tensor + FIRST) + index, LAW)
        offset = _offset_in_memory(tensor, index)
    if HAS_CLEAN:
        n = tl.where((index >= tl.load(tensor + CLEAN_FROM)) & (index < tl.load(tensor + CLEAN_TO)), 0.0, n)
    return offset, inside, n


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
def _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, IS_VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    """Noise that needs no more of the weights than its own element."""
    tensor, weights, other, stream, tile, scaling = job
    offset, inside, n = _tile(tensor, stream, tile * 0, tile * WIDTH, LAW, HAS_CLEAN, IS_VECTOR, 1, WIDTH)
    w = tl.load(weights + offset, inside)
    if SCALE == ABSOLUTE:
        theta = n * scaling[0]
    elif SCALE == WEIGHT:
        theta = n * w.to(tl.float32) * scaling[0]
    else:  # every element is a filter of its own
        theta = n * _factor(tl.abs(w.to(tl.float32)), tl.abs(n), scaling)
    _write(weights, other, offset, inside, w, theta, OUTPUT)


@triton.jit
def _norm(squares):
    return tl.sqrt_rn(tl.sum(squares, 1)[:, None])


@triton.jit
def _perturb_whole_filters(job, LAW, OUTPUT, HAS_CLEAN, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Filters that fit into a tile: read and drawn once."""
    tensor, weights, other, stream, tile, scaling = job
    offset, inside, n = _tile(tensor, stream, tile * ROWS, tile * 0, LAW, HAS_CLEAN, True, ROWS, WIDTH)
    w = tl.load(weights + offset, inside, other=0.0)
    w32 = w.to(tl.float32)
    factor = _factor(_norm(w32 * w32), _norm(tl.where(inside, n * n, 0.0)), scaling)
    _write(weights, other, offset, inside, w, n * factor, OUTPUT)


@triton.jit
def _perturb_filters_twice(
    job, LAW, OUTPUT, HAS_CLEAN, IS_VECTOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Filters of any size: gone through for the norms, and again (the same draw) to write."""
    tensor, weights, other, stream, tile, scaling = job
    size = tl.load(tensor + FILTER_SIZE)
    squares_w, squares_n = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    column = tile * 0
    while column < size:
        offset, inside, n = _tile(tensor, stream, tile * ROWS, column, LAW, HAS_CLEAN, IS_VECTOR, ROWS, WIDTH)
        w32 = tl.load(weights + offset, inside, other=0.0).to(tl.float32)
        squares_w += w32 * w32
        squares_n += tl.where(inside, n * n, 0.0)
        column += WIDTH
    factor = _factor(_norm(squares_w), _norm(squares_n), scaling)
    column = tile * 0
    while column < size:
        offset, inside, n = _tile(tensor, stream, tile * ROWS, column, LAW, HAS_CLEAN, IS_VECTOR, ROWS, WIDTH)
        _write(weights, other, offset, inside, tl.load(weights + offset, inside), n * factor, OUTPUT)
        column += WIDTH


# ---- the two launches ------------------------------------------------------------------------------------------------


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """From an address in a table. "Vector" accesses are of aligned tensors only, and no other is wide."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), 16)  # pyrefly: ignore[bad-argument-type]


@triton.jit(do_not_specialize=["draw", "sign", "epsilon", "group"])
def draw_kernel(
    items, table, others, state, group, draw, sign, epsilon,
    DTYPE: tl.constexpr, OTHER_DTYPE: tl.constexpr, LAW: tl.constexpr, SCALE: tl.constexpr, OUTPUT: tl.constexpr,
    HAS_CLEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) * 3
    number, tile, way = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64), tl.load(item + 2)
    tensor = table + number * COLUMNS_OF_TABLE
    stream = _stream(state, tensor, draw)
    strength = tl.load((state + STRENGTH).to(tl.pointer_type(tl.float32)))
    weights = _pointer(tensor + WEIGHTS, DTYPE)
    other = _pointer(others + number, OTHER_DTYPE)
    tl.store(state + BACKED_UP + group, 1, mask=(tl.program_id(0) == 0) & (OUTPUT == APPLY))

    job = (tensor, weights, other, stream, tile, (strength * sign, epsilon))
    if way == VECTOR:
        _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, True, TILE)
    elif way == ANY:
        _perturb_elements(job, LAW, SCALE, OUTPUT, HAS_CLEAN, False, TILE // 4)
    elif SCALE == FILTER:
        if way == VECTOR_64:
            _perturb_whole_filters(job, LAW, OUTPUT, HAS_CLEAN, TILE // 64, 64)
        elif way == VECTOR_256:
            _perturb_whole_filters(job, LAW, OUTPUT, HAS_CLEAN, TILE // 256, 256)
        elif way == VECTOR_1024:
            _perturb_whole_filters(job, LAW, OUTPUT, HAS_CLEAN, TILE // 1024, 1024)
        elif way == VECTOR_TILE:
            _perturb_whole_filters(job, LAW, OUTPUT, HAS_CLEAN, 1, TILE)
        elif way == VECTOR_LARGE:
            _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, True, 1, TILE // 4)
        elif way == ANY_32:
            _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, False, TILE // 128, 32)
        else:
            _perturb_filters_twice(job, LAW, OUTPUT, HAS_CLEAN, False, 4, TILE // 16)


@triton.jit
def _copy(tensor, weights, backup, tile, elements, IS_VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    start, numbers = tile * WIDTH, tl.arange(0, WIDTH)
    left = tl.minimum(elements - start, WIDTH).to(tl.int32)
    if IS_VECTOR:
        inside = numbers // 4 * 4 < left
        offset = tl.multiple_of(start, 4) + numbers
    else:
        inside = numbers < left
        offset = _offset_in_memory(tensor, tl.where(inside, start.to(tl.int32) + numbers, 0))
    tl.store(weights + offset, tl.load(backup + offset, inside), inside)


@triton.jit(do_not_specialize=["group"])
def restore_kernel(items, table, backups, state, group, DTYPE: tl.constexpr, TILE: tl.constexpr):
    item = items + tl.program_id(0) * 3
    number, tile, way = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64), tl.load(item + 2)
    tensor = table + number * COLUMNS_OF_TABLE
    weights = _pointer(tensor + WEIGHTS, DTYPE)
    backup = _pointer(backups + number, DTYPE)
    elements = tl.where(tl.load(state + BACKED_UP + group) != 0, tl.load(tensor + ELEMENTS), 0)
    if way == VECTOR:
        _copy(tensor, weights, backup, tile, elements, True, TILE)
    else:
        _copy(tensor, weights, backup, tile, elements, False, TILE // 4)
