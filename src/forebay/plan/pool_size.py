"""How many bytes streamed weights may share on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.errors import BudgetError
from forebay.plan.memory import streamed_bytes
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.model.layout import UnitLayout

__all__ = ["pool_bytes"]

# DeepSpeed's default of stage3_max_live_parameters, 1e9, in 16 bits.
_DEFAULT_BYTES = 2_000_000_000
# One computes, one comes, one goes.
_DEFAULT_UNITS = 3


def pool_bytes(
    units: Sequence[UnitLayout],
    *,
    asked: int | None,
    device_budget: int | None,
    taken: int,
    page_bytes: int = 1,
) -> int:
    """The pool's capacity: what is asked for, else what the budget leaves, at most all weights.

    Args:
        units: The units whose weights are streamed.
        asked: An explicit size; None for what the budget leaves, or a default without a budget.
        device_budget: Bytes that may be placed on the device.
        taken: Of those, what everything else takes.
        page_bytes: What the size is rounded up to.

    Raises:
        BudgetError: The largest unit does not fit.
    """
    sizes = {unit.name: streamed_bytes(unit) for unit in units}
    if not sizes:
        return 0
    name, largest = max(sizes.items(), key=lambda item: item[1])
    everything = -(-sum(sizes.values()) // page_bytes) * page_bytes
    capacity = everything
    if asked is not None:
        capacity = min(capacity, asked)
    if device_budget is not None:
        capacity = min(capacity, device_budget - taken)
    elif asked is None:
        capacity = min(capacity, max(_DEFAULT_BYTES, _DEFAULT_UNITS * largest))
    if capacity < largest:
        budgeted = device_budget is not None and device_budget - taken < largest
        what = "device_budget leaves" if budgeted else "the pool of weights holds"
        key = "forebay.device_budget" if budgeted else "stage3_max_live_parameters (in elements)"
        needed = largest + taken if budgeted else largest
        raise BudgetError(
            f"cannot bring up {format_bytes(largest)} of weights of unit {name}: {what} "
            f"{format_bytes(max(capacity, 0))}",
            hint=f"raise {key} to {budget_text(needed)}, or make units smaller with "
            "zero_optimization.sub_group_size",
        )
    return capacity
