"""Which units keep state and weights in files, and through what buffers these come.

The engine asks, and the planner: what is planned is what runs. No files here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from forebay.plan.file_pieces import piece_count, pieces
from forebay.plan.memory import forecast, part_bytes, piece_bytes
from forebay.plan.placement import FileBuffers, UpdatePlace, WeightPlace
from forebay.plan.records import SUM_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["FileWants", "least_file_bytes", "with_files", "with_least_buffers"]

# 4 Mi elements: 48 MiB of state, long requests for a drive and short against a step.
_MOST_ELEMENTS = 4 << 20
# Of a host budget, or without one of the machine, for buffers whose size nobody says.
_SHARE_OF_BUDGET = 8
# Of the buffers that are asked for, so many let pieces come and go before others hold some; half of
# them at least, so that the drive has as much to do.
_LEAST_COMING = 4
# fp32 master and two moments.
_STATE_ITEM_BYTES = 12
# The same, and the new weight behind them.
_BUFFER_ITEM_BYTES = 14
# At most: weights in fp32.
_WEIGHT_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWants:
    """What is asked of files.

    Attributes:
        buffer_count: Pieces of state that are in host memory at once.
        buffer_elements: Elements of a piece, rounded down to a multiple of 64 Ki; None for what
            the host budget (without one, the machine) allows, at most 4 Mi.
        reads_ahead: Whether pieces are read while others are updated.
        writes_behind: Whether pieces are read before the one before them is written.
        weight_buffer_count: Pieces of weights that are in host memory at once.
        weight_elements: Elements of those, as `buffer_elements`.
        weights_in_memory_elements: Elements of weights that stay in host memory, the forward's
            first ones, as far as the host budget has room for them.
        machine_bytes: This rank's part of the host memory that there is, which bounds buffers where
            no host budget does; None where it is not known.
    """

    buffer_count: int = 4
    buffer_elements: int | None = None
    reads_ahead: bool = True
    writes_behind: bool = True
    weight_buffer_count: int = 5
    weight_elements: int | None = None
    weights_in_memory_elements: int = 0
    machine_bytes: int | None = None


def with_files(
    placement: Placement,
    wants: FileWants,
    *,
    weights: WeightPlace,
    host_budget: int | None,
    device_page_bytes: int,
) -> Placement:
    """The placement with what the host budget has no room for in files.

    State of the first units that there is room for stays in memory: a byte of memory saves most as
    one that never moves, and the next forward needs the first ones first. What is left then holds
    copies of pieces, which are written but not read. Without a budget all state that is not on the
    device is in files. Weights that are asked to be in files come before state: a byte of them is
    read twice and written once in a step.

    Args:
        placement: Everything in host memory that is not on the device.
        wants: What is asked of buffers.
        weights: Where weights are asked to live.
        host_budget: Bytes that may be placed on the host; None without a bound.
        device_page_bytes: What each device allocation is rounded up to.
    """
    share_of = wants.machine_bytes if host_budget is None else host_budget
    placement = _with_buffers(placement, wants, share_of=share_of)
    to_files = weights is WeightPlace.NVME
    in_files = tuple(
        unit
        if unit.update is UpdatePlace.DEVICE
        else replace(
            unit,
            update=UpdatePlace.NVME,
            weights=WeightPlace.NVME if to_files else unit.weights,
        )
        for unit in placement.units
    )
    left = None
    if host_budget is not None:
        if _host_bytes(placement, device_page_bytes) <= host_budget:
            return placement
        most = _with_needed_buffers(replace(placement, units=in_files))
        left = host_budget - _host_bytes(most, device_page_bytes)
        if left < 0:
            placement = _with_small_buffers(placement, wants)
            least = _with_needed_buffers(replace(placement, units=in_files))
            left = host_budget - _host_bytes(least, device_page_bytes)
            if left < 0:  # It will be refused; what takes less says how much is needed.
                return min(least, placement, key=lambda p: _host_bytes(p, device_page_bytes))
    units, left = _with_weights_in_memory(
        in_files, placement, elements=wants.weights_in_memory_elements, left=left
    )
    if left is not None:
        units = _with_state_in_memory(units, placement, left=left)
    placement = _with_needed_buffers(replace(placement, units=units))
    if host_budget is None:
        return placement
    return _with_pieces_in_memory(
        placement, left=host_budget - _host_bytes(placement, device_page_bytes)
    )


def least_file_bytes(
    wants: FileWants, *, elements: int, weight_bytes: int, host_budget: int | None
) -> int:
    """What state takes in files at least, before more is known of a model than its size.

    Args:
        wants: What is asked of files.
        elements: Trained elements of this rank, none of which have their state on the device.
        weight_bytes: Of a weight that is in files too; 0 where weights live elsewhere.
        host_budget: This rank's; None without a bound, which keeps no state in memory but what
            buffers hold.
    """
    held = wants.buffer_count - _coming(wants)
    piece = _piece_elements(wants.buffer_elements, share_of=None, each_bytes=1)
    in_files = weight_bytes * max(0, elements - wants.weights_in_memory_elements)
    in_files += _STATE_ITEM_BYTES * (elements - held * piece)
    return max(0, in_files - (host_budget or 0))


def _coming(wants: FileWants) -> int:
    """Of the buffers, those through which pieces come and go."""
    return max(min(wants.buffer_count, _LEAST_COMING), wants.buffer_count // 2)


def _with_buffers(placement: Placement, wants: FileWants, *, share_of: int | None) -> Placement:
    """The placement with the buffers that are asked for, or a share of host memory for them."""
    coming = _coming(wants)
    return replace(
        placement,
        buffers=FileBuffers(
            count=coming,
            held=wants.buffer_count - coming,
            piece_elements=_piece_elements(
                wants.buffer_elements,
                share_of=share_of,
                each_bytes=_BUFFER_ITEM_BYTES * wants.buffer_count,
            ),
            reads_ahead=wants.reads_ahead,
            writes_behind=wants.writes_behind,
        ),
        weight_buffers=FileBuffers(
            count=wants.weight_buffer_count,
            piece_elements=_piece_elements(
                wants.weight_elements,
                share_of=share_of,
                each_bytes=_WEIGHT_ITEM_BYTES * wants.weight_buffer_count,
            ),
        ),
    )


def _with_small_buffers(placement: Placement, wants: FileWants) -> Placement:
    """The least memory that files need: the smallest buffers, but for sizes that are asked for."""
    state, weights = placement.buffers, placement.weight_buffers
    if wants.buffer_elements is None:
        state = replace(state, piece_elements=SUM_ELEMENTS)
    if wants.weight_elements is None:
        weights = replace(weights, piece_elements=SUM_ELEMENTS)
    return replace(placement, buffers=state, weight_buffers=weights)


def with_least_buffers(placement: Placement) -> Placement:
    """The placement with one smallest buffer for state in files, and one for weights there."""
    if all(unit.update is not UpdatePlace.NVME for unit in placement.units):
        return placement
    least = FileBuffers(count=1, piece_elements=SUM_ELEMENTS)
    return replace(placement, buffers=least, weight_buffers=least)


def _with_weights_in_memory(
    units: Sequence[UnitPlacement], placement: Placement, *, elements: int, left: int | None
) -> tuple[tuple[UnitPlacement, ...], int | None]:
    """The first units that there is room for keep weights in memory; what is left then."""
    found: list[UnitPlacement] = []
    for unit in units:
        if unit.weights is WeightPlace.NVME:
            here = replace(unit, weights=WeightPlace.HOST)
            size = sum(placement.sharding.state(part).elements for part in unit.layout.parts)
            extra = _extra_bytes(here, unit, placement)
            if size <= elements and (left is None or extra <= left):
                elements -= size
                left = None if left is None else left - extra
                found.append(here)
                continue
        found.append(unit)
    return tuple(found), left


def _with_state_in_memory(
    units: Sequence[UnitPlacement], placement: Placement, *, left: int
) -> tuple[UnitPlacement, ...]:
    """The first units that there is room for keep their state in memory, and with it weights."""
    found: list[UnitPlacement] = []
    for here, there in zip(placement.units, units, strict=True):
        extra = _extra_bytes(here, there, placement)
        stays = here.update is UpdatePlace.DEVICE or extra <= left
        left -= extra if stays else 0
        found.append(here if stays else there)
    return tuple(found)


def _with_needed_buffers(placement: Placement) -> Placement:
    """No more buffers than there are pieces in files."""
    pieces = sum(piece_count(unit, placement) for unit in placement.units)
    count = max(1, min(placement.buffers.count, pieces))
    held = min(placement.buffers.held, max(0, pieces - count))
    return replace(placement, buffers=replace(placement.buffers, count=count, held=held))


def _with_pieces_in_memory(placement: Placement, *, left: int) -> Placement:
    """What is left has no room for a unit: it holds pieces of one, which then stay there."""
    held = placement.buffers.held
    for part, elements in islice(pieces(placement), held, None):
        left -= piece_bytes(elements, part.dtype)
        if left < 0:
            break
        held += 1
    return _with_needed_buffers(replace(placement, buffers=replace(placement.buffers, held=held)))


def _piece_elements(wanted: int | None, *, share_of: int | None, each_bytes: int) -> int:
    """Elements of a piece; `each_bytes` is what one element more takes in all buffers."""
    if wanted is None:
        wanted = _MOST_ELEMENTS
        if share_of is not None:
            wanted = min(wanted, share_of // _SHARE_OF_BUDGET // each_bytes)
    return max(1, wanted // SUM_ELEMENTS) * SUM_ELEMENTS


def _host_bytes(placement: Placement, device_page_bytes: int) -> int:
    sizes = forecast(placement, device_page_bytes=device_page_bytes)
    return sum(nbytes for (tier, _), nbytes in sizes.items() if tier == "host")


def _extra_bytes(here: UnitPlacement, there: UnitPlacement, placement: Placement) -> int:
    """What a unit takes more of host memory where its state stays there."""

    def total(unit: UnitPlacement) -> int:
        return sum(
            nbytes
            for part in unit.layout.parts
            for (tier, _), nbytes in part_bytes(
                part, placement=placement, update=unit.update, weights=unit.weights
            ).items()
            if tier == "host"
        )

    return total(here) - total(there)
