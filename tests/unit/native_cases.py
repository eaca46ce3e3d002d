"""What the native tests share: an fp32 reference in numpy, parts over one buffer, their digests.

The reference does one rounded operation at a time; numpy's basic operations are correctly rounded
on every processor, torch's CPU square root is not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

F32 = np.float32
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}

# Around vector widths, tiles, tree blocks and chunks.
SIZES = [0, 1, 2, 7, 15, 16, 17, 67, 199, 1023, 1024, 1025, 4095, 4096, 4097, 70001]

SPECIAL = np.array(
    [
        *(0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1e-40, 3.4028235e38, -3.4028235e38, 1.0, -1.0),
        *(65504.0, 65519.9, 65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 2.980233e-8, 1e-7, 1.00390625),
        *(np.inf, -np.inf, np.nan),
    ],
    dtype=F32,
)


def canonical(values: np.ndarray) -> np.ndarray:
    """Bits with every NaN made the same one: NaN payloads are outside the law."""
    if values.dtype == np.float32:
        return np.where(np.isnan(values), F32(np.nan), values).view(np.uint32)
    if values.dtype == np.float16:
        return np.where(np.isnan(values), np.float16(np.nan), values).view(np.uint16)
    return values


def canonical_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits with every NaN made the same one."""
    return np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), bits)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Half away from zero in the bit pattern, as uint16."""
    bits = values.astype(F32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x8000) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Exact."""
    return (bits.astype(np.uint32) << 16).view(F32)


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values in an element type: uint16 for bfloat16."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return to_bf16(values)
        return values.astype(np.float16 if dtype == "float16" else F32)


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `narrow`, exact."""
    return from_bf16(values) if dtype == "bfloat16" else values.astype(F32)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Hyper numbers, float32-rounded."""

    decay_mode: str = "decoupled"
    decay: float = float(F32(1 - 1e-3 * 0.01))
    one_minus_beta1: float = float(F32(0.1))
    beta2: float = float(F32(0.999))
    one_minus_beta2: float = float(F32(0.001))
    eps: float = float(F32(1e-8))
    bias_correction2_sqrt: float = float(F32(0.0447))
    step_size: float = float(F32(2e-3))

    def hyper(self, core: Any) -> Any:
        return core.Hyper(
            self.decay_mode,
            self.decay,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.eps,
            self.bias_correction2_sqrt,
            self.step_size,
        )


def adam(p, m, v, g, numbers: Numbers, scale: float):
    """(p, m, v) after one step; every operation rounded to fp32."""
    n = numbers
    with np.errstate(all="ignore"):
        g = g * F32(scale)
        if n.decay_mode == "l2":
            g = g + F32(n.decay) * p
        if n.decay_mode == "decoupled":
            p = p * F32(n.decay)
        m = m + F32(n.one_minus_beta1) * (g - m)
        v = F32(n.beta2) * v + (F32(n.one_minus_beta2) * g) * g
        denominator = np.sqrt(v) / F32(n.bias_correction2_sqrt) + F32(n.eps)
        return p - (F32(n.step_size) * m) / denominator, m, v


def aligned(nbytes: int, shift: int = 0) -> np.ndarray:
    """Bytes whose address is 64 k + shift."""
    raw = np.zeros(nbytes + 128, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + nbytes]


def placed(values: np.ndarray, shift: int = 0) -> np.ndarray:
    """A copy of the values at an address of 64 k + shift items."""
    room = aligned(values.nbytes, shift * values.itemsize).view(values.dtype)
    room[:] = values
    return room


def address(values: np.ndarray) -> int:
    return values.ctypes.data


def random_state(elements: int, seed: int, *, special: bool = False):
    """(p, m, v, g) fp32; with special values in every role but a negative v."""
    rng = np.random.default_rng(seed)
    p = rng.standard_normal(elements).astype(F32)
    m = (rng.standard_normal(elements) * 0.1).astype(F32)
    v = (rng.random(elements) * 0.01).astype(F32)
    g = (rng.standard_normal(elements) * np.exp(rng.uniform(-30, 10, elements))).astype(F32)
    if special and elements:
        for role in (p, m, g):
            where = rng.integers(0, elements, elements // 3 + 1)
            role[where] = SPECIAL[rng.integers(0, len(SPECIAL), where.size)]
        where = rng.integers(0, elements, elements // 3 + 1)
        v[where] = np.abs(SPECIAL)[rng.integers(0, len(SPECIAL), where.size)]
    return p, m, v, g


@dataclass(kw_only=True)
class Part:
    """One part's arrays, ready for a core, with what an update should make of them."""

    elements: int
    grad_dtype: str = "float32"
    layout: str = "whole"
    out: str = "none"  # none, apart, over (the gradient)
    out_dtype: str = "bfloat16"
    segments: list[tuple[int, int]] | None = None
    piece_elements: int = 1 << 20
    seed: int = 0
    special: bool = False
    shift: int = 0
    numbers: list[Numbers] = field(default_factory=lambda: [Numbers()])
    hyper_of_segment: list[int] | None = None
    scale: float = 0.375

    def __post_init__(self) -> None:
        p, m, v, g = random_state(self.elements, self.seed, special=self.special)
        self.grad = placed(narrow(g, self.grad_dtype), self.shift)
        self.exp_avg = placed(m, self.shift)
        self.exp_avg_sq = placed(v, self.shift)
        self.low = np.zeros(0, dtype=np.uint16)
        if self.layout == "split":
            high = to_bf16(p)
            rest = (p.view(np.uint32) - (high.astype(np.uint32) << 16)).astype(np.uint16)
            self.master = placed(high, self.shift)
            self.low = placed(rest, self.shift)
        else:
            self.master = placed(p, self.shift)
        self.weight = placed(narrow(np.zeros(self.elements, F32), self.out_dtype), self.shift)
        if self.segments is None:
            self.segments = [(0, self.elements)]
        if self.hyper_of_segment is None:
            self.hyper_of_segment = [0] * len(self.segments)

    def master_values(self) -> np.ndarray:
        """fp32 master, joined where it is split."""
        if self.layout == "whole":
            return self.master.copy()
        distance = self.low.view(np.int16).astype(np.int32).view(np.uint32)
        return ((self.master.astype(np.uint32) << 16) + distance).view(F32)

    def state(self, core: Any) -> Any:
        out = {"none": 0, "apart": address(self.weight), "over": address(self.grad)}[self.out]
        return core.PartState(
            address(self.grad),
            self.grad_dtype,
            self.layout,
            address(self.master),
            address(self.low) if self.layout == "split" else 0,
            address(self.exp_avg),
            address(self.exp_avg_sq),
            out,
            self.out_dtype,
            self.segments,
            self.elements,
        )

    def update(self, core: Any, pool: Any, **options: Any) -> Any:
        hypers = [numbers.hyper(core) for numbers in self.numbers]
        return pool.update(
            self.state(core),
            hypers,
            self.hyper_of_segment,
            self.scale,
            self.piece_elements,
            **options,
        )

    def written_over(self) -> np.ndarray:
        """New weights found where the gradient was, piece by piece."""
        item, out_item = ITEM[self.grad_dtype], ITEM[self.out_dtype]
        raw = self.grad.view(np.uint8)
        pieces = []
        for start in range(0, self.elements, self.piece_elements):
            count = min(self.piece_elements, self.elements - start)
            pieces.append(raw[start * item : start * item + count * out_item])
        return np.concatenate([np.zeros(0, np.uint8), *pieces]).view(self.weight.dtype)

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(p, m, v, present) by the reference, from the arrays as they are now."""
        p, m, v = self.master_values(), self.exp_avg.copy(), self.exp_avg_sq.copy()
        g = widen(self.grad, self.grad_dtype)
        present = np.zeros(self.elements, dtype=bool)
        for (offset, count), hyper in zip(self.segments, self.hyper_of_segment, strict=True):
            if hyper < 0:
                continue
            here = slice(offset, offset + count)
            numbers = self.numbers[hyper]
            p[here], m[here], v[here] = adam(
                p[here], m[here], v[here], g[here], numbers, self.scale
            )
            present[here] = True
        return p, m, v, present

    def digest(self) -> str:
        """Of all bits, NaNs made equal."""
        digest = hashlib.sha256()
        for values in (self.master_values(), self.exp_avg, self.exp_avg_sq):
            digest.update(canonical(values).tobytes())
        for values, dtype in ((self.grad, self.grad_dtype), (self.weight, self.out_dtype)):
            over = self.written_over() if self.out == "over" and values is self.grad else values
            kind = self.out_dtype if over is not values else dtype
            plain = canonical_bf16(over) if kind == "bfloat16" else canonical(over)
            digest.update(plain.tobytes())
        return digest.hexdigest()


def check_update(core: Any, pool: Any, part: Part) -> None:
    """Update the part and compare every bit with the reference."""
    p, m, v, present = part.expected()
    old_weight = part.weight.copy()
    assert part.update(core, pool).wait(30)
    assert np.array_equal(canonical(part.exp_avg), canonical(m))
    assert np.array_equal(canonical(part.exp_avg_sq), canonical(v))
    assert np.array_equal(canonical(part.master_values()), canonical(p))
    if part.layout == "split":
        high = canonical_bf16(to_bf16(p))[present]
        assert np.array_equal(canonical_bf16(part.master)[present], high)
    if part.out == "none":
        return
    found = part.written_over() if part.out == "over" else part.weight
    wanted = narrow(p, part.out_dtype)
    if part.out_dtype == "bfloat16":
        found, wanted = canonical_bf16(found), canonical_bf16(wanted)
    assert np.array_equal(canonical(found[present]), canonical(wanted[present]))
    if part.out == "apart":
        assert np.array_equal(part.weight[~present], old_weight[~present])


def square_tree(values: np.ndarray) -> float:
    """The square-sum tree, written as its definition says."""
    with np.errstate(all="ignore"):
        level = values.astype(np.float64) ** 2
        if not level.size:
            return 0.0
        while True:
            blocks = []
            for start in range(0, level.size, 4096):
                block = np.zeros(4096)
                part = level[start : start + 4096]
                block[: part.size] = part
                while block.size > 1:
                    block = block[: block.size // 2] + block[block.size // 2 :]
                blocks.append(block[0])
            level = np.array(blocks)
            if level.size == 1:
                return float(level[0])
