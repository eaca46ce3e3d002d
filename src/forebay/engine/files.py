"""Which units keep their state in files, in what buffers it comes to host memory, and who does it.

`engine.file_space` holds the files, `engine.spool` moves state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forebay.engine.file_space import FileSpace
from forebay.engine.spool import Spool
from forebay.errors import BudgetError
from forebay.plan.memory import forecast, part_bytes
from forebay.plan.placement import FileBuffers, UpdatePlace
from forebay.plan.records import SUM_ELEMENTS
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.engine.executor import Executor
    from forebay.engine.file_space import NvmeOptions
    from forebay.engine.state_memory import PartMemory
    from forebay.plan.placement import Placement, UnitPlacement
    from forebay.tiers.ledger import Ledger

__all__ = ["connect_files", "open_files", "refuse_more_files", "with_files"]

# 4 Mi elements: 48 MiB of state, long requests for a drive and short against a step.
_MOST_ELEMENTS = 4 << 20
# Of a host budget that buffers may take where nobody says their size.
_SHARE_OF_BUDGET = 8
# fp32 master, two moments, and the new weight behind them.
_BUFFER_ITEM_BYTES = 14


def with_files(
    placement: Placement,
    options: NvmeOptions,
    *,
    host_budget: int | None,
    device_page_bytes: int,
) -> Placement:
    """The placement with the state in files that the host budget has no room for.

    Units stay in memory in their order as far as the budget goes: a byte of memory saves most as
    one that never moves, and the next forward needs the first ones first. Without a budget all
    state that is not on the device is in files.
    """
    buffers = FileBuffers(
        count=options.buffer_count,
        piece_elements=_piece_elements(options, host_budget),
        reads_ahead=options.reads_ahead,
        writes_behind=options.writes_behind,
    )
    placement = replace(placement, buffers=buffers)
    off_device = [u for u in placement.units if u.update is not UpdatePlace.DEVICE]
    in_files = replace(
        placement,
        units=tuple(
            replace(unit, update=UpdatePlace.NVME) if unit in off_device else unit
            for unit in placement.units
        ),
    )
    if host_budget is None:
        return in_files
    if _host_bytes(placement, device_page_bytes) <= host_budget:
        return placement
    left = host_budget - _host_bytes(in_files, device_page_bytes)
    units: list[UnitPlacement] = []
    for here, there in zip(placement.units, in_files.units, strict=True):
        left -= _extra_bytes(here, there, placement)
        units.append(here if left >= 0 or here.update is UpdatePlace.DEVICE else there)
    return replace(in_files, units=tuple(units))


def _piece_elements(options: NvmeOptions, host_budget: int | None) -> int:
    wanted = options.buffer_elements
    if wanted is None:
        wanted = _MOST_ELEMENTS
        if host_budget is not None:
            share = host_budget // _SHARE_OF_BUDGET // options.buffer_count
            wanted = min(wanted, share // _BUFFER_ITEM_BYTES)
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
                part, placement=placement, update=unit.update
            ).items()
            if tier == "host"
        )

    return total(here) - total(there)


def refuse_more_files(sizes: Mapping[tuple[str, str], int], *, budget: int | None) -> None:
    """Raise BudgetError where state takes more of the drives than it may."""
    needed = sum(nbytes for (tier, _), nbytes in sizes.items() if tier == "nvme")
    if budget is not None and needed > budget:
        raise BudgetError(
            f"cannot place {format_bytes(needed)} of state in files: nvme_budget is "
            f"{format_bytes(budget)}",
            hint=f"raise forebay.nvme_budget to {budget_text(needed)}, or forebay.host_budget",
        )


def open_files(
    placement: Placement, options: NvmeOptions | None, *, ledger: Ledger, core: Any
) -> FileSpace | None:
    """The files of a placement; None where it has no state in any.

    Raises:
        StorageError: A folder cannot be used or has no room.
    """
    sizes = forecast(placement)
    needed = sum(nbytes for (tier, _), nbytes in sizes.items() if tier == "nvme")
    if options is None or not any(u.update is UpdatePlace.NVME for u in placement.units):
        return None
    return FileSpace(options, nbytes=needed, ledger=ledger, core=core)


def connect_files(executor: Executor, placement: Placement, *, memory: PartMemory) -> None:
    """Let an executor update state in files, if there is any."""
    if memory.files is None:
        return
    executor.lanes.files = memory.files
    executor.spool = Spool(
        executor.lanes,
        link=memory.files.link,
        placement=placement,
        memory=memory,
        publisher=executor.publisher,
    )
    executor.spool.adopt(executor.units)
