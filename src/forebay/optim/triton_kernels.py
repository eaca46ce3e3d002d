# mypy: disallow_untyped_decorators=False
# ruff: noqa: PLR0913, PLR0917 - a kernel takes a pointer for each role
"""Triton kernels for CUDA: the update and the sum of squares, bit for bit as the torch reference.

The kernels only; `forebay.optim.triton_math` prepares their tables and launches them. Importing
this module needs Triton, which comes with CUDA builds of torch.

[Note: launch options] `enable_fp_fusion=False` keeps each multiplication and addition separate.
Root and quotient are written as instructions, because `tl.sqrt_rn` and `tl.div_rn` flush subnormals
in some versions (3.2 emits `sqrt.rn.ftz.f32`). A test reads the assembly for both.

[Note: segment table] One launch serves many tensors. Its int64 table is stored by columns; a
program finds its row by counting the rows that begin at or before it, so no search loop runs. A
table has at most `MAX_ROWS` rows, since each program reads the whole column of first programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "BLOCK",
    "LAUNCH_OPTIONS",
    "MAX_ROWS",
    "NUMBERS_PER_HYPER",
    "TILE",
    "UPDATE_BLOCK",
    "block_sums_kernel",
    "update_kernel",
]

# See [Note: launch options].
LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}

# See [Note: segment table].
MAX_ROWS = 1024

# Elements of a block of the norm tree, as `forebay.optim.squares` defines it.
BLOCK = 4096
# Blocks that one program sums: the last 256 sums are halved by exchanging data between threads
# eight times, and four blocks share each exchange.
TILE = 4

# 8 elements for each of 128 threads: two 16-byte accesses to fp32 roles, one to 16-bit roles.
UPDATE_BLOCK = 1024

# decay, 1 - beta1, beta2, 1 - beta2, eps, bias_correction2_sqrt, step_size, decay mode.
NUMBERS_PER_HYPER = 8

# What kernels may read of the above.
_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)
_UPDATE_BLOCK = tl.constexpr(UPDATE_BLOCK)
_NUMBERS = tl.constexpr(NUMBERS_PER_HYPER)


@triton.jit
def _row_of(
    first: tl.tensor, program: tl.tensor, rows: tl.tensor, capacity: tl.constexpr
) -> tl.tensor:
    """The last row whose first program is this one or an earlier one."""
    index = tl.arange(0, capacity)
    starts = tl.load(first + index, mask=index < rows, other=0x7FFFFFFF)
    return tl.sum((starts <= program).to(tl.int32), axis=0) - 1


@triton.jit
def _widen(value: tl.tensor) -> tl.tensor:
    """fp32, fp16 or the int16 bits of bf16 as fp32, exactly."""
    if value.dtype == tl.int16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _square_at(
    source: tl.tensor,
    offsets: tl.tensor,
    elements: tl.tensor,
    part: tl.constexpr,
    full: tl.constexpr,
) -> tl.tensor:
    """256 elements of each block, from 256 * part on, as squared doubles."""
    at = offsets + part * 256
    value = tl.load(source + at) if full else tl.load(source + at, mask=at < elements, other=0)
    if value.dtype == tl.float64:
        # A list of sums is summed by the same tree, without squares.
        return value
    value = _widen(value).to(tl.float64)
    return value * value


@triton.jit
def _sum_2(
    source: tl.tensor,
    offsets: tl.tensor,
    elements: tl.tensor,
    part: tl.constexpr,
    full: tl.constexpr,
) -> tl.tensor:
    # x[i] + x[i + 2048]
    return _square_at(source, offsets, elements, part, full) + _square_at(
        source, offsets, elements, part + 8, full
    )


@triton.jit
def _sum_4(
    source: tl.tensor,
    offsets: tl.tensor,
    elements: tl.tensor,
    part: tl.constexpr,
    full: tl.constexpr,
) -> tl.tensor:
    # Two of those, 1024 apart.
    return _sum_2(source, offsets, elements, part, full) + _sum_2(
        source, offsets, elements, part + 4, full
    )


@triton.jit
def _sum_16(
    source: tl.tensor, offsets: tl.tensor, elements: tl.tensor, full: tl.constexpr
) -> tl.tensor:
    # 512 apart, then 256 apart: 256 sums of each block are left.
    even = _sum_4(source, offsets, elements, 0, full) + _sum_4(source, offsets, elements, 2, full)
    odd = _sum_4(source, offsets, elements, 1, full) + _sum_4(source, offsets, elements, 3, full)
    return even + odd


@triton.jit(do_not_specialize=["rows"])
def block_sums_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    capacity: tl.constexpr,
    kind: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Sum blocks of 4096 by halving: one level of the tree for every row of the table.

    Grid: one program for `TILE` blocks. Columns: address of the values, number of values,
    address of the fp64 results, first program.

    Args:
        table: int64, 4 columns of `rows`.
        rows: Rows in use, at most `capacity`.
        capacity: A power of two.
        kind: dtype of the values, int16 for bf16 bits; their squares are summed, except that
            float64 values are summed as they are.
        aligned: Whether every address is a multiple of 16.
    """
    program = tl.program_id(0)
    row = _row_of(table + 3 * rows, program, rows, capacity)
    source = tl.load(table + row).to(tl.pointer_type(kind))
    if aligned:
        source = tl.multiple_of(source, 16)
    elements = tl.load(table + rows + row)
    results = tl.load(table + 2 * rows + row).to(tl.pointer_type(tl.float64))
    first_block = (program - tl.load(table + 3 * rows + row)) * _TILE
    block = first_block + tl.arange(0, _TILE)
    offsets = block[:, None] * _BLOCK + tl.arange(0, 256)[None, :]
    if (first_block + _TILE) * _BLOCK <= elements:
        sums = _sum_16(source, offsets, elements, full=True)
    else:
        sums = _sum_16(source, offsets, elements, full=False)
    # Each reduction adds exactly two numbers, so the order that Triton chooses does not matter.
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 128)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 64)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 32)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 16)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 8)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 4)), axis=1)
    sums = tl.sum(tl.reshape(sums, (_TILE, 2, 2)), axis=1)
    sums = tl.sum(sums, axis=1)
    tl.store(results + block, sums, mask=block * _BLOCK < elements)


@triton.jit
def _round_high(p: tl.tensor) -> tl.tensor:
    """bf16 bits of p, half away from zero, as int32; a NaN keeps its upper half, made quiet."""
    bits = p.to(tl.int32, bitcast=True)
    is_nan = p != p  # noqa: PLR0124
    return tl.where(is_nan, (bits >> 16) | 0x0040, (bits + 0x8000) >> 16)


@triton.jit
def _root(value: tl.tensor, compiled: tl.constexpr) -> tl.tensor:
    """Square root, rounded to nearest, subnormals kept; see [Note: launch options]."""
    if compiled:
        return tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt_rn(value)


@triton.jit
def _quotient(value: tl.tensor, divisor: tl.tensor, compiled: tl.constexpr) -> tl.tensor:
    """Quotient, rounded to nearest, subnormals kept; see [Note: launch options]."""
    if compiled:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [value, divisor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.div_rn(value, divisor)


@triton.jit
def _update_range(
    grad: tl.tensor,
    number: tl.tensor,
    scale: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    out: tl.tensor,
    local: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    compiled: tl.constexpr,
) -> None:
    """`forebay.optim.reference.update_` for the elements at `at`; mask None means all."""
    g = _widen(tl.load(grad + local, mask=mask)) * scale
    if low is None:
        p = tl.load(high + at, mask=mask)
    else:
        upper = tl.load(high + at, mask=mask).to(tl.int32) << 16
        p = (upper + tl.load(low + at, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    m = tl.load(exp_avg + at, mask=mask)
    v = tl.load(exp_avg_sq + at, mask=mask)
    decay = tl.load(number)
    mode = tl.load(number + 7)
    # Only one of the two changes anything, so their order is free.
    p = tl.where(mode == 1.0, p * decay, p)
    g = tl.where(mode == 2.0, g + decay * p, g)
    m = m + tl.load(number + 1) * (g - m)
    v = tl.load(number + 2) * v + (tl.load(number + 3) * g) * g
    correction = tl.zeros_like(v) + tl.load(number + 5)
    denominator = _quotient(_root(v, compiled), correction, compiled) + tl.load(number + 4)
    p = p - _quotient(tl.load(number + 6) * m, denominator, compiled)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    if low is None:
        tl.store(high + at, p, mask=mask)
    else:
        tl.store(high + at, _round_high(p).to(tl.int16), mask=mask)
        # The low 16 bits of `bits - (high << 16)` are those of `bits`.
        tl.store(low + at, p.to(tl.int32, bitcast=True).to(tl.int16), mask=mask)
    if out is not None:
        if out.dtype.element_ty == tl.int16:
            tl.store(out + at, _round_high(p).to(tl.int16), mask=mask)
        else:
            tl.store(out + at, p.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def update_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    numbers: tl.tensor,
    scale: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    out: tl.tensor,
    capacity: tl.constexpr,
    kind: tl.constexpr,
    aligned: tl.constexpr,
    compiled: tl.constexpr,
) -> None:
    """Update segments of a part in place, each with its own gradient and hyperparameters.

    Grid: one program for `UPDATE_BLOCK` elements of a segment. Columns: address of the gradient,
    first element in the part, number of elements, hyperparameters, first program.

    Args:
        table: int64, 5 columns of `rows`.
        rows: Rows in use, at most `capacity`.
        numbers: fp32, `NUMBERS_PER_HYPER` for each set of hyperparameters; the last is 0 for no
            decay, 1 for decoupled, 2 for l2.
        scale: One fp32 that gradients are multiplied by, read on the device.
        high: fp32 master; int16 bits of the bf16 weight in the split layout.
        low: int16 low half; None makes the layout whole.
        exp_avg: fp32.
        exp_avg_sq: fp32.
        out: New weights: fp32, fp16, or int16 bits of bf16; None for none.
        capacity: A power of two.
        kind: dtype of the gradients, int16 for bf16 bits.
        aligned: Whether every address and first element is a multiple of 16.
        compiled: False under Triton's interpreter, which executes no instructions.
    """
    program = tl.program_id(0)
    row = _row_of(table + 4 * rows, program, rows, capacity)
    grad = tl.load(table + row).to(tl.pointer_type(kind))
    first = tl.load(table + rows + row)
    if aligned:
        grad = tl.multiple_of(grad, 16)
        first = tl.multiple_of(first, 16)
    elements = tl.load(table + 2 * rows + row)
    number = numbers + tl.load(table + 3 * rows + row) * _NUMBERS
    begin = (program - tl.load(table + 4 * rows + row)) * _UPDATE_BLOCK
    local = begin + tl.arange(0, _UPDATE_BLOCK)
    at = first + local
    factor = tl.load(scale)
    if begin + _UPDATE_BLOCK <= elements:
        _update_range(
            grad, number, factor, high, low, exp_avg, exp_avg_sq, out, local, at, None, compiled
        )
    else:
        inside = local < elements
        _update_range(
            grad, number, factor, high, low, exp_avg, exp_avg_sq, out, local, at, inside, compiled
        )
