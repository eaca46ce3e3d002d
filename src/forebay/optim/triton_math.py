"""Few launches for many tensors: the tables and launches of the Triton kernels.

`TritonMath` is a `forebay.optim.device_math.DeviceMath` for an NVIDIA device, in the order of the
current stream. Nothing here waits for the device but `read`.

[Note: table transfer] A table goes to the device from page-locked memory of torch's caching
allocator, which reuses a block only after the copies from it are done; so a table may be built
for every call without an event of ours. The device's copy is freed in the order of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from forebay.optim.readback import read_numbers
from forebay.optim.rule import DecayMode
from forebay.optim.triton_kernels import (
    BLOCK,
    LAUNCH_OPTIONS,
    MAX_ROWS,
    TILE,
    UPDATE_BLOCK,
    block_sums_kernel,
    update_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.optim.flat_state import FlatState
    from forebay.optim.rule import Hyper

__all__ = ["TritonMath", "block_sums", "square_sums", "update_"]

# bf16 travels as its bits: the kernels widen and round it by integer operations.
_KINDS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
_MODES = {DecayMode.NONE: 0.0, DecayMode.DECOUPLED: 1.0, DecayMode.L2: 2.0}


class TritonMath:
    """Squares and updates on an NVIDIA device.

    Calls, in order: `square_sums` as gradients become final; `read` once per step; then `update`.
    Each works in the stream that is current when it is called, on tensors that were produced
    there or waited for.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[tuple[tuple[int, ...], _Begun]] = []
        # What the last update was called with, and that on the device: a step updates many parts
        # with the same numbers, and each small transfer costs as much as a launch.
        self._terms: tuple[object, float, int, torch.Tensor, torch.Tensor] | None = None

    def square_sums(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Begin summing squares; a later call for an index replaces it.

        One launch reads the tensors: a backward of few tokens waits for what is issued. What is
        left of their trees is a few numbers, which `read` sums for all of them at once.
        """
        if tensors:
            self._begun.append((tuple(indices), _begin(tensors)))

    def read(self) -> dict[int, float]:
        """Wait for the sums begun since the last `read`, in one transfer: an fp64 per index."""
        if not self._begun:
            return {}
        indices = [index for group, _ in self._begun for index in group]
        spans = [span for _, begun in self._begun for span in begun.spans]
        out = torch.zeros(len(indices), dtype=torch.float64, device=self._device)
        _finish(spans, out)
        values = read_numbers(out)
        self._begun.clear()
        return dict(zip(indices, values, strict=True))

    def update(
        self,
        state: FlatState,
        *,
        grads: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float | torch.Tensor,
    ) -> None:
        """Update the segments whose gradient is given, in the order of the current stream."""
        numbers: Sequence[Hyper] | torch.Tensor = hypers
        if not isinstance(scale, torch.Tensor):
            numbers, scale = self._on_device(hypers, scale)
        update_(state, grads=grads, hypers=numbers, hyper_of_segment=hyper_of_segment, scale=scale)

    def _on_device(
        self, hypers: Sequence[Hyper], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of an update, written in the current stream."""
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0
        known = self._terms
        if known is not None and known[0] is hypers and known[1:3] == (scale, stream):
            return known[3], known[4]
        numbers = _numbers(hypers, self._device)
        factor = _to_device(torch.tensor([scale], dtype=torch.float32), self._device)
        self._terms = (hypers, scale, stream, numbers, factor)
        return numbers, factor


def square_sums(
    tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of squares of each tensor, by the tree of `forebay.optim.squares`.

    Two launches for tensors of up to 16.8 million elements of one dtype, three beyond.

    Args:
        tensors: float32, bfloat16 or float16, on one device, at least one.
        out: Where the sums go; a new tensor when None.

    Returns:
        float64, one element for each tensor.
    """
    if out is None:
        out = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0].device)
    else:
        out.zero_()
    begun = _begin(tensors)
    _finish(begun.spans, out)
    return out


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of the squares of blocks, the lowest ones of that tree: one launch.

    Args:
        values: float32, bfloat16 or float16, on a device.

    Returns:
        float64, one element for each `BLOCK` values or a rest of them.
    """
    flat = values.detach().contiguous()
    sums = torch.empty(_blocks(flat.numel()), dtype=torch.float64, device=flat.device)
    if flat.numel():
        span = _Span(kind=flat.dtype, address=flat.data_ptr(), elements=flat.numel())
        _launch_sums([(span, sums.data_ptr())], flat.dtype, flat.device)
    return sums


def update_(
    state: FlatState,
    *,
    grads: Sequence[torch.Tensor | None],
    hypers: Sequence[Hyper] | torch.Tensor,
    hyper_of_segment: Sequence[int],
    scale: float | torch.Tensor,
) -> None:
    """Update a part in place: one launch for all segments whose gradients have one dtype.

    Args:
        state: The part, on one device; its tensors are contiguous.
        grads: Each segment's gradient, None for absent.
        hypers: Distinct captured hyperparameters, or their table on the device.
        hyper_of_segment: Each segment's place in `hypers`, -1 for absent.
        scale: What gradients are multiplied by: a float32 number, or a 0-dim float32 tensor on
            the device, which is read there. `Hyper.sign` is in it already.
    """
    device = state.exp_avg.device
    segments: dict[torch.dtype, list[tuple[torch.Tensor, int, int]]] = {}
    for (start, elements), grad, hyper in zip(state.segments, grads, hyper_of_segment, strict=True):
        if grad is not None and hyper >= 0 and elements:
            if grad.numel() != elements:
                raise ValueError(f"a gradient has {grad.numel()} elements, its segment {elements}")
            segments.setdefault(grad.dtype, []).append((grad.detach().contiguous(), start, hyper))
    if not segments:
        return
    numbers = hypers if isinstance(hypers, torch.Tensor) else _numbers(hypers, device)
    factor = (
        scale
        if isinstance(scale, torch.Tensor)
        else _to_device(torch.tensor([scale], dtype=torch.float32), device)
    )
    for kind, members in segments.items():
        for begin in range(0, len(members), MAX_ROWS):
            _launch_update(state, members[begin : begin + MAX_ROWS], numbers, factor, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A list of values that one level of the tree sums."""

    kind: torch.dtype
    address: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """Sums of the blocks of some tensors: a span for each."""

    spans: list[_Span]
    sums: torch.Tensor


def _begin(tensors: Sequence[torch.Tensor]) -> _Begun:
    """The lowest level of the trees of some tensors: a launch for each dtype."""
    # Contiguous copies must live until the launches are enqueued, hence a list of them.
    flat = [tensor.detach().contiguous() for tensor in tensors]
    levels = [
        _Span(kind=tensor.dtype, address=tensor.data_ptr(), elements=tensor.numel())
        for tensor in flat
    ]
    space, above = _space(levels, device=tensors[0].device)
    _launch_level(levels, [span.address for span in above], space.device)
    return _Begun(spans=above, sums=space)


def _finish(begun: Sequence[_Span], out: torch.Tensor) -> None:
    """All other levels: a launch for each, of all tensors together; `out` is zero before."""
    levels = [
        (span, result) for span, result in zip(begun, _addresses(out), strict=True) if span.elements
    ]
    scratch = []
    while levels:
        spans = [span for span, _ in levels]
        space, above = _space(spans, device=out.device)
        scratch.append(space)
        targets = [
            result if span.elements == 1 else span.address
            for span, (_, result) in zip(above, levels, strict=True)
        ]
        _launch_level(spans, targets, out.device)
        levels = [
            (span, result)
            for span, (_, result) in zip(above, levels, strict=True)
            if span.elements > 1
        ]


def _space(levels: Sequence[_Span], *, device: torch.device) -> tuple[torch.Tensor, list[_Span]]:
    """Memory for the sums of the blocks of some spans, and these as spans of the next level."""
    sizes = [_blocks(span.elements) for span in levels]
    # 2 doubles keep each list 16-byte aligned.
    space = torch.empty(sum(size + size % 2 for size in sizes), dtype=torch.float64, device=device)
    free, above = space.data_ptr(), []
    for size in sizes:
        above.append(_Span(kind=torch.float64, address=free, elements=size))
        free += 8 * (size + size % 2)
    return space, above


def _launch_level(spans: Sequence[_Span], targets: Sequence[int], device: torch.device) -> None:
    rows = [row for row in zip(spans, targets, strict=True) if row[0].elements]
    for kind in dict.fromkeys(span.kind for span, _ in rows):
        _launch_sums([row for row in rows if row[0].kind is kind], kind, device)


def _launch_sums(
    rows: Sequence[tuple[_Span, int]], kind: torch.dtype, device: torch.device
) -> None:
    for begin in range(0, len(rows), MAX_ROWS):
        chosen = rows[begin : begin + MAX_ROWS]
        firsts, programs = _firsts(-(-_blocks(span.elements) // TILE) for span, _ in chosen)
        table = _table(
            [span.address for span, _ in chosen],
            [span.elements for span, _ in chosen],
            [target for _, target in chosen],
            firsts,
            device=device,
        )
        _launch(
            block_sums_kernel,
            programs,
            device,
            table=table,
            rows=len(chosen),
            capacity=_capacity(len(chosen)),
            kind=_KINDS[kind],
            aligned=all(span.address % 16 == 0 for span, _ in chosen),
        )


def _launch_update(
    state: FlatState,
    members: Sequence[tuple[torch.Tensor, int, int]],
    numbers: torch.Tensor,
    factor: torch.Tensor,
    kind: torch.dtype,
) -> None:
    device = state.exp_avg.device
    firsts, programs = _firsts(-(-grad.numel() // UPDATE_BLOCK) for grad, _, _ in members)
    table = _table(
        [grad.data_ptr() for grad, _, _ in members],
        [start for _, start, _ in members],
        [grad.numel() for grad, _, _ in members],
        [hyper for _, _, hyper in members],
        firsts,
        device=device,
    )
    _launch(
        update_kernel,
        programs,
        device,
        table=table,
        rows=len(members),
        numbers=numbers,
        scale=factor,
        high=_words(state.high),
        low=None if state.low is None else state.low.view(torch.int16),
        exp_avg=state.exp_avg,
        exp_avg_sq=state.exp_avg_sq,
        out=None if state.out is None else _words(state.out),
        capacity=_capacity(len(members)),
        kind=_KINDS[kind],
        compiled=device.type == "cuda",
        aligned=all(grad.data_ptr() % 16 == 0 and start % 16 == 0 for grad, start, _ in members),
    )


def _launch(kernel: Any, programs: int, device: torch.device, **arguments: object) -> None:
    if device.type == "cuda":
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device(device):
            kernel[(programs,)](**arguments, **LAUNCH_OPTIONS)
    else:
        # Triton's interpreter, which runs the same kernels on CPU tensors for tests.
        kernel[(programs,)](**arguments)


def _words(weights: torch.Tensor) -> torch.Tensor:
    """bf16 as the int16 bits that the kernel rounds by itself; other dtypes as they are."""
    return weights.view(torch.int16) if weights.dtype is torch.bfloat16 else weights


def _numbers(hypers: Sequence[Hyper], device: torch.device) -> torch.Tensor:
    rows = [[*hyper.native()[1:], _MODES[hyper.decay_mode]] for hyper in hypers]
    return _to_device(torch.tensor(rows, dtype=torch.float32), device)


def _table(*columns: Sequence[int], device: torch.device) -> torch.Tensor:
    return _to_device(torch.tensor(columns, dtype=torch.int64), device)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """See [Note: table transfer]."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _firsts(programs: Iterable[int]) -> tuple[list[int], int]:
    """First program of each row, and the number of programs."""
    firsts, total = [], 0
    for number in programs:
        firsts.append(total)
        total += number
    return firsts, total


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _capacity(rows: int) -> int:
    """A power of two of at least 16, so that few variants are compiled."""
    return max(16, int(triton.next_power_of_2(rows)))


def _addresses(doubles: torch.Tensor) -> range:
    start = doubles.data_ptr()
    return range(start, start + 8 * doubles.numel(), 8)
