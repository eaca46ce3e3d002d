"""Update, fold and square-sum in torch operations, each rounded apart.

[Note: square root] torch's fp32 square root on CPU comes from a vector library and is off by one
unit in the last place for some values. The root in fp64, rounded once more to fp32, is the
correctly rounded one: an fp32 operand's root is never closer than 2^-50 to a rounding boundary.
"""

# The signatures are the native core's.
# ruff: noqa: FBT001, PLR0913, PLR0917

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

import torch

from forebay._fallback import memory
from forebay._fallback.sums import BlockSums, StateSums
from forebay._fallback.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Hyper", "PartState", "Pool"]

_TREE_BLOCK = 4096
# Elements worked on at a time: bounds temporaries to a few MB.
_RUN_ELEMENTS = 1 << 18
# The state is updated where it is.
_IN_PLACE = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of one Adam step, rounded to float32."""

    decay_mode: str
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    bias_correction2_sqrt: float
    step_size: float

    def __post_init__(self) -> None:
        if self.decay_mode not in ("decoupled", "l2", "none"):
            raise ValueError(
                f"unknown decay mode {self.decay_mode!r}\nhint: one of decoupled, l2, none"
            )
        for number in fields(self)[1:]:
            object.__setattr__(self, number.name, _float32(getattr(self, number.name)))


@dataclass(frozen=True, slots=True)
class PartState:
    """Base addresses of one part; every role has the same element offsets."""

    grad: int
    grad_dtype: str
    master_layout: str
    master: int
    low: int
    exp_avg: int
    exp_avg_sq: int
    out: int
    out_dtype: str
    segments: Sequence[tuple[int, int]]
    elements: int
    grad_item: int = field(init=False)
    out_item: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grad_item", memory.dtype_of(self.grad_dtype).itemsize)
        object.__setattr__(self, "out_item", memory.dtype_of(self.out_dtype).itemsize)
        if self.master_layout not in ("whole", "split"):
            raise ValueError(f"unknown master layout {self.master_layout!r}\nhint: whole or split")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Elements [begin, end) of one segment in the piece that starts at `start`."""

    segment: int
    start: int
    begin: int
    end: int


class Pool:
    """Computes in the calling thread, with torch's own threads."""

    def __init__(self, threads: int, cpus: Sequence[int] = ()) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least 1 thread, not {threads}")
        self.threads = threads
        self.cpus = tuple(cpus)
        self.pinning_error = ""
        self.kernel_level = "fallback"
        self._closed = False

    def update(
        self,
        part: PartState,
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float,
        piece_elements: int,
        grads: Sequence[int] | None = None,
        after: Sequence[Ticket] = (),
        sums: int = 0,
        names: Sequence[str] = (),
        source: tuple[int, int, int, int] = _IN_PLACE,
    ) -> Ticket:
        """One Adam step over the present segments."""
        self._check_open()
        _check(part, hypers, hyper_of_segment, piece_elements, grads)
        _check_source(part, source, sums=sums)
        checks = StateSums(part, address=sums, names=names, piece_elements=piece_elements)
        blocks = checks.blocks([i for i, hyper in enumerate(hyper_of_segment) if hyper >= 0])
        runs = list(_runs(part, hyper_of_segment, piece_elements))
        factor = _float32(scale)

        def work() -> None:
            checks.verify(blocks)
            for run in runs:
                offset = run.begin - part.segments[run.segment][0]
                base = part.grad + run.begin * part.grad_item
                if grads:
                    base = grads[run.segment] + offset * part.grad_item
                _fill(part, run, source)
                _update_run(part, run, hypers[hyper_of_segment[run.segment]], factor, base)
            checks.seal(blocks)

        return Ticket.of(-(-part.elements // piece_elements), after=after, work=work)

    def fold(
        self,
        spans: Sequence[tuple[int, int, int]],
        src_dtype: str,
        first: bool,
        after: Sequence[Ticket] = (),
        scale: float = 1.0,
    ) -> Ticket:
        """Set or add to fp32 accumulators, sources multiplied by `scale` first."""
        self._check_open()
        dtype = memory.dtype_of(src_dtype)
        for index, (accumulator, source, elements) in enumerate(spans):
            if elements:
                memory.check_address(f"span {index}", address=accumulator, item=4)
                memory.check_address(f"span {index}", address=source, item=dtype.itemsize)

        def work() -> None:
            for accumulator, source, elements in spans:
                target = memory.view(accumulator, dtype=torch.float32, elements=elements)
                values = memory.load(source, dtype=dtype, elements=elements).float()
                if scale != 1.0:
                    values = values * torch.tensor(scale, dtype=torch.float32)
                target.copy_(values if first else target + values)

        return Ticket.of(1, after=after, work=work)

    def square_sums(
        self, spans: Sequence[tuple[int, int]], dtype: str, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Sum the squares of each span in fp64 by the fixed tree."""
        self._check_open()
        kind = memory.dtype_of(dtype)
        for index, (address, elements) in enumerate(spans):
            if elements:
                memory.check_address(f"span {index}", address=address, item=kind.itemsize)

        def work() -> list[float]:
            return [_square_sum(address, kind, elements) for address, elements in spans]

        return Ticket.of(1, after=after, work=work)

    def checksums(
        self,
        action: str,
        address: int,
        nbytes: int,
        block_bytes: int,
        sums: int,
        names: Sequence[str] = (),
        after: Sequence[Ticket] = (),
    ) -> Ticket:
        """Write or compare the CRC-32C of every block of some bytes."""
        self._check_open()
        blocks = BlockSums(action, address=address, nbytes=nbytes, block_bytes=block_bytes)
        return Ticket.of(1, after=after, work=partial(blocks.run, sums=sums, names=names))

    def close(self) -> None:
        """Refuse work from now on."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the update pool is closed")


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _check(
    part: PartState,
    hypers: Sequence[Hyper],
    hyper_of_segment: Sequence[int],
    piece_elements: int,
    grads: Sequence[int] | None,
) -> None:
    split = part.master_layout == "split"
    if part.elements:
        memory.check_address("master", address=part.master, item=2 if split else 4)
        memory.check_address("exp_avg", address=part.exp_avg, item=4)
        memory.check_address("exp_avg_sq", address=part.exp_avg_sq, item=4)
        if split:
            memory.check_address("low", address=part.low, item=2)
        if split and part.out:
            raise ValueError(
                f"a split master is itself the new weight: out must be 0, not {part.out}"
            )
        if part.out and part.out == part.grad and part.out_item > part.grad_item:
            raise ValueError(
                f"out overwrites gradients still to be read: its items have {part.out_item} "
                f"bytes, the gradient's {part.grad_item}"
            )
    if piece_elements < 1:
        raise ValueError(f"piece_elements must be at least 1, not {piece_elements}")
    _check_segments(part)
    if len(hyper_of_segment) != len(part.segments):
        raise ValueError(
            f"hyper_of_segment has {len(hyper_of_segment)} entries for {len(part.segments)} "
            "segments"
        )
    if grads and len(grads) != len(part.segments):
        raise ValueError(f"grads has {len(grads)} addresses for {len(part.segments)} segments")
    for index, hyper in enumerate(hyper_of_segment):
        if not -1 <= hyper < len(hypers):
            raise ValueError(f"segment {index} names hyper {hyper} of {len(hypers)}")
        if hyper >= 0 and part.segments[index][1]:
            address = grads[index] if grads else part.grad
            memory.check_address("grad", address=address, item=part.grad_item)


def _check_source(part: PartState, source: tuple[int, int, int, int], *, sums: int) -> None:
    if source == _IN_PLACE or not part.elements:
        return
    split = part.master_layout == "split"
    items = (2 if split else 4, 2, 4, 4)
    names = ("master", "low", "exp_avg", "exp_avg_sq")
    for name, address, item in zip(names, source, items, strict=True):
        if split or name != "low":
            memory.check_address(f"source {name}", address=address, item=item)
    if sums or (part.out and part.out == part.grad):
        raise ValueError(
            "an update from another state neither checks sums nor writes over the gradient"
        )


def _fill(part: PartState, run: _Run, source: tuple[int, int, int, int]) -> None:
    """Copy the state of a run to where it is updated."""
    if source == _IN_PLACE:
        return
    split = part.master_layout == "split"
    items = (2 if split else 4, 2 if split else 0, 4, 4)
    targets = (part.master, part.low, part.exp_avg, part.exp_avg_sq)
    for target, origin, item in zip(targets, source, items, strict=True):
        if item:
            nbytes = item * (run.end - run.begin)
            here = memory.view(target + item * run.begin, dtype=torch.uint8, elements=nbytes)
            there = memory.view(origin + item * run.begin, dtype=torch.uint8, elements=nbytes)
            here.copy_(there)


def _check_segments(part: PartState) -> None:
    end = 0
    for offset, elements in sorted(part.segments):
        if offset < end:
            raise ValueError(f"a segment begins at element {offset} inside one that ends at {end}")
        end = offset + elements
        if end > part.elements:
            raise ValueError(f"a segment ends at element {end} of a part that has {part.elements}")


def _runs(part: PartState, hyper_of_segment: Sequence[int], piece_elements: int) -> Iterator[_Run]:
    order = sorted(range(len(part.segments)), key=lambda index: part.segments[index][0])
    for index in order:
        if hyper_of_segment[index] < 0:
            continue
        begin, end = part.segments[index][0], sum(part.segments[index])
        while begin < end:
            start = begin - begin % piece_elements
            stop = min(end, start + piece_elements, begin + _RUN_ELEMENTS)
            yield _Run(segment=index, start=start, begin=begin, end=stop)
            begin = stop


def _update_run(part: PartState, run: _Run, hyper: Hyper, scale: float, grad: int) -> None:
    elements = run.end - run.begin
    m = memory.view(part.exp_avg + 4 * run.begin, dtype=torch.float32, elements=elements)
    v = memory.view(part.exp_avg_sq + 4 * run.begin, dtype=torch.float32, elements=elements)
    g = memory.load(grad, dtype=memory.dtype_of(part.grad_dtype), elements=elements)
    if part.master_layout == "split":
        high = memory.view(part.master + 2 * run.begin, dtype=torch.int16, elements=elements)
        low = memory.view(part.low + 2 * run.begin, dtype=torch.int16, elements=elements)
        p = _adam(hyper, g * scale, memory.join_values(high, low), m, v)
        new_high, new_low = memory.split_values(p)
        high.copy_(new_high)
        low.copy_(new_low)
        return
    master = memory.view(part.master + 4 * run.begin, dtype=torch.float32, elements=elements)
    p = _adam(hyper, g * scale, master, m, v)
    master.copy_(p)
    if part.out:
        address = part.out + run.begin * part.out_item
        if part.out == part.grad:
            address = part.out + run.start * part.grad_item
            address += (run.begin - run.start) * part.out_item
        memory.store(p, address=address, dtype=memory.dtype_of(part.out_dtype))


def _adam(
    hyper: Hyper, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The new weight; m and v are changed in place."""
    if hyper.decay_mode == "l2":
        g = g + p * hyper.decay
    elif hyper.decay_mode == "decoupled":
        p = p * hyper.decay
    m.copy_(m + (g - m) * hyper.one_minus_beta1)
    v.copy_(v * hyper.beta2 + (g * hyper.one_minus_beta2) * g)
    root = v.to(torch.float64).sqrt().to(torch.float32)
    # Divided by a tensor: torch may turn a division by a number into a multiplication.
    correction = torch.full_like(root, hyper.bias_correction2_sqrt)
    return p - (m * hyper.step_size) / (root / correction + hyper.eps)


def _halve(values: torch.Tensor) -> torch.Tensor:
    """One value per block of 4096; the list is padded with zeros."""
    padding = -values.numel() % _TREE_BLOCK
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, _TREE_BLOCK)
    half = _TREE_BLOCK // 2
    while half:
        blocks = blocks[:, :half] + blocks[:, half:]
        half //= 2
    return blocks[:, 0]


def _square_sum(address: int, dtype: torch.dtype, elements: int) -> float:
    if elements == 0:
        return 0.0
    sums = []
    for begin in range(0, elements, _RUN_ELEMENTS):
        count = min(_RUN_ELEMENTS, elements - begin)
        piece = memory.load(address + begin * dtype.itemsize, dtype=dtype, elements=count)
        wide = piece.to(torch.float64)
        sums.append(_halve(wide * wide))
    total = torch.cat(sums)
    while total.numel() > 1:
        total = _halve(total)
    return float(total[0])
