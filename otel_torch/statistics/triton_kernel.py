"""The Triton kernel: reads a tensor on a GPU once, as `kernel.c` does on a CPU.

Torch's operators read a tensor once for each statistic, through fp64 copies and with many launches.
Here there are two launches: `partial`, in which each program reduces its share of the tensor to a
row, and `combine`, which combines these rows. A tensor that one program handles needs only the
first. There are no atomic additions, so that the bits of a row depend on the tensor alone.

`gpu_kernel.py` compiles, tests and launches this. Nothing else imports this file, because Triton
may be missing and takes half a second to import.
"""
# mypy: ignore-errors
# (Triton's types are not Python's)

from __future__ import annotations

import triton
import triton.language as tl

from otel_torch.statistics import row_layout, sketch, sketch_format

FOLD = tl.constexpr(sketch.FOLD)
NUMBERS = tl.constexpr(sketch_format.SIZE)
BINS = tl.constexpr(row_layout.BINS)
FIRST_BIN = tl.constexpr(len(row_layout.SCALARS))
# A tile has 8 rows: for a sketch of FOLD elements, one per lane, otherwise of 1024. A piece of the
# sketch has 16 tiles.
LANES, ROWS = tl.constexpr(1024), tl.constexpr(8)
TILES_A_PIECE = tl.constexpr(sketch.PIECE // sketch.FOLD // 8)
# PROGRAMS: the most programs of `partial`, the same on every device, so that bits do not depend on
# the device. COMBINED: numbers of a row that one program of `combine` handles.
PROGRAMS, COMBINED = tl.constexpr(512), tl.constexpr(8)


@triton.jit
def _bin(number):
    """Return the bin of each magnitude, as in `histogram.py`, except that zeros are in bin 1."""
    if number.dtype == tl.float64:
        exponent = ((number.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023
        special = exponent == 1024
    else:
        exponent = ((number.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        special = exponent == 128
    return tl.where(special, 63, tl.minimum(tl.maximum(exponent + 42, 1), 62))


@triton.jit
def _add(
    state,
    data,
    tile,
    start,
    end,
    signs,
    turns,
    HISTOGRAM: tl.constexpr,
    SKETCH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add the elements of a tile to the state.

    Unless the tile is WHOLE, elements outside flat positions `start` to `end` are skipped.
    """
    low, high, total, squares, magnitudes, nonfinite, zeros, counts, folded = state
    lane = tl.arange(0, LANES)
    width: tl.constexpr = FOLD if SKETCH else LANES
    place = lane
    if SKETCH:
        # each lane reads the element that this piece's shift assigns to its column, so that
        # columns never move
        piece = tile // TILES_A_PIECE
        turn = tl.load(turns + piece)
        place = lane - (turn >> 1)
        place = tl.where(place < 0, place + FOLD, place)
        negative = tl.load(signs + (tile - piece * TILES_A_PIECE) * LANES + place).to(tl.int32)
        columns = tl.zeros([LANES], tl.float64)
    for row in tl.static_range(ROWS):
        position = (tile * ROWS + row) * width + place
        inside = lane < width
        if not WHOLE:
            inside = inside & (position >= start) & (position < end)
        offset = position
        if SKETCH:
            offset = position - start
        number = tl.load(data + offset, mask=inside, other=0)
        if number.dtype != tl.float64:
            number = number.to(tl.float32)
        wide = number.to(tl.float64)
        low = tl.minimum(low, tl.where(inside, number, float("inf")))
        high = tl.maximum(high, tl.where(inside, number, float("-inf")))
        total += wide
        squares += wide * wide
        magnitudes += tl.abs(wide)
        nonfinite += tl.where(tl.abs(number) < float("inf"), 0, 1)
        zeros += tl.where(inside & (number == 0), 1, 0)
        if HISTOGRAM:
            counts += tl.histogram(_bin(number), BINS, mask=inside)
        if SKETCH:
            columns += tl.where((negative >> row) & 1 != 0, -wide, wide)
    if SKETCH:
        folded += tl.where(turn & 1 != 0, columns, -columns)
    return low, high, total, squares, magnitudes, nonfinite, zeros, counts, folded


@triton.jit
def partial(
    data, out, start, end, signs, turns, projection, HISTOGRAM: tl.constexpr, SKETCH: tl.constexpr
):
    """Write one row per program to `out`. Program i takes tiles i, i + programs, …

    The elements have flat positions `start` to `end`, and the first one is at `data`. signs: a byte
    per lane and tile of a piece; bit r is set if the sign in row r is negative. turns: for each
    piece twice its shift, plus 1 if its sign is positive. projection: 64 bits per column, set where
    a sign is negative.
    """
    kind: tl.constexpr = tl.float64 if data.dtype.element_ty == tl.float64 else tl.float32
    none, count = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.int32)
    low, high = tl.full([LANES], float("inf"), kind), tl.full([LANES], float("-inf"), kind)
    state = (low, high, none, none, none, count, count, tl.zeros([BINS], tl.int32), none)
    size: tl.constexpr = ROWS * (FOLD if SKETCH else LANES)
    for tile in range(start // size + tl.program_id(0), tl.cdiv(end, size), tl.num_programs(0)):
        if tile * size >= start and (tile + 1) * size <= end:
            state = _add(state, data, tile, start, end, signs, turns, HISTOGRAM, SKETCH, True)
        else:
            state = _add(state, data, tile, start, end, signs, turns, HISTOGRAM, SKETCH, False)
    low, high, total, squares, magnitudes, nonfinite, zeros, counts, folded = state

    numbers: tl.constexpr = FIRST_BIN + (BINS if HISTOGRAM else 0) + (NUMBERS if SKETCH else 0)
    out += tl.program_id(0) * numbers
    of_magnitudes, of_zeros = tl.sum(magnitudes, 0), tl.sum(zeros, 0)
    nan = of_magnitudes != of_magnitudes  # minimum and maximum ignore NaN
    tl.store(out, tl.where(nan, float("nan"), tl.min(low, 0).to(tl.float64)))
    tl.store(out + 1, tl.where(nan, float("nan"), tl.max(high, 0).to(tl.float64)))
    tl.store(out + 2, tl.sum(total, 0))
    tl.store(out + 3, tl.sum(squares, 0))
    tl.store(out + 4, of_magnitudes)
    tl.store(out + 5, tl.sum(nonfinite, 0).to(tl.float64))
    tl.store(out + 6, of_zeros.to(tl.float64))
    if HISTOGRAM:
        bin_index = tl.arange(0, BINS)
        counts = tl.where(
            bin_index == 0, of_zeros, tl.where(bin_index == 1, counts - of_zeros, counts)
        )
        tl.store(out + FIRST_BIN + bin_index, counts.to(tl.float64))
    if SKETCH:
        words = tl.load(projection + tl.arange(0, LANES))
        for first in range(0, NUMBERS, 4):
            row = first + tl.arange(0, 4)
            negative = (words[None, :] >> row[:, None].to(tl.int64)) & 1
            signed = tl.where(negative != 0, -folded[None, :], folded[None, :])
            tl.store(
                out + numbers - NUMBERS + row, tl.sum(signed, 1) * 0.125
            )  # divided by sqrt(64)


@triton.jit
def combine(partials, row, programs, SIZE: tl.constexpr):
    """Combine the rows of all `programs` of `partial` into one row of SIZE numbers.

    Each program of `combine` handles COMBINED of these numbers.
    """
    number = tl.program_id(0) * COMBINED + tl.arange(0, COMBINED)
    program = tl.arange(0, PROGRAMS)
    inside = (program < programs)[:, None] & (number < SIZE)[None, :]
    parts = tl.load(partials + program[:, None] * SIZE + number[None, :], mask=inside, other=0)
    low, high = tl.where(inside, parts, float("inf")), tl.where(inside, parts, float("-inf"))
    combined = tl.where(
        number == 0, tl.min(low, 0), tl.where(number == 1, tl.max(high, 0), tl.sum(parts, 0))
    )
    nan = tl.max(tl.where(parts != parts, 1, 0), 0) > 0
    tl.store(row + number, tl.where(nan & (number < 2), float("nan"), combined), mask=number < SIZE)
