"""Opens what keeps state and weights in files, and lets an executor use it.

`plan.file_places` says which units' that is, `engine.file_space` holds the files, `engine.spool`
moves state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.file_space import FileSpace
from forebay.engine.spool import Spool
from forebay.errors import BudgetError
from forebay.links.direct_storage import DirectStorage, find_direct_storage
from forebay.plan.memory import forecast
from forebay.plan.placement import UpdatePlace, WeightPlace
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from forebay.engine.executor import Executor
    from forebay.engine.file_space import NvmeOptions
    from forebay.engine.state_memory import PartMemory
    from forebay.plan.placement import Placement
    from forebay.tiers.ledger import Ledger

__all__ = ["connect_files", "open_files", "refuse_more_files"]


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
    placement: Placement,
    options: NvmeOptions | None,
    *,
    ledger: Ledger,
    core: Any,
    device: torch.device,
) -> FileSpace | None:
    """The files of a placement; None where it has no state in any.

    Raises:
        StorageError: A folder cannot be used or has no room.
    """
    sizes = forecast(placement)
    needed = sum(nbytes for (tier, _), nbytes in sizes.items() if tier == "nvme")
    if options is None or not any(u.update is UpdatePlace.NVME for u in placement.units):
        return None
    direct = None
    if any(u.weights is WeightPlace.NVME for u in placement.units):
        direct = options.direct or find_direct_storage(device)
        if placement.sharding.size > 1:
            direct = DirectStorage(library=None, reason="each rank gathers them from all")
    return FileSpace(options, nbytes=needed, ledger=ledger, core=core, direct=direct)


def connect_files(executor: Executor, placement: Placement, *, memory: PartMemory) -> None:
    """Let an executor update state in files, if there is any."""
    if memory.files is None:
        return
    executor.lanes.files = memory.files
    executor.spool = Spool(
        executor.lanes,
        placement=placement,
        memory=memory,
        publisher=executor.publisher,
    )
    executor.spool.adopt(executor.units)
