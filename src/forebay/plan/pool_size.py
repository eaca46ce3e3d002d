"""How many bytes streamed weights may share on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.errors import BudgetError
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import WeightPlace
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.plan.placement import Placement

__all__ = ["PoolNeeds", "pool_bytes", "with_default_pool"]

# DeepSpeed's default of stage3_max_live_parameters, 1e9, in 16 bits.
_DEFAULT_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeeds:
    """What streamed weights need.

    Attributes:
        sizes: Bytes of each unit by its name.
        at_once: Bytes that a forward holds at the same time at the most.
        names: The units of `at_once`.
    """

    sizes: Mapping[str, int]
    at_once: int
    names: tuple[str, ...]


def pool_bytes(
    needs: PoolNeeds, *, asked: int | None, device_budget: int | None, taken: int
) -> int:
    """The pool's capacity: what is asked for, else what the budget leaves, at most all weights.

    Never less than what is held at once; beside that there is room for one more unit to come,
    as far as the budget allows, whatever is asked for.

    Args:
        needs: The streamed weights.
        asked: A size that is asked for; None for what the budget leaves.
        device_budget: Bytes that may be placed on the device; None without a bound.
        taken: Of those, what everything else takes.

    Raises:
        BudgetError: The budget does not hold what is needed at once.
    """
    if not needs.sizes:
        return 0
    everything = sum(needs.sizes.values())
    floor = min(everything, needs.at_once + max(needs.sizes.values()))
    wanted = asked
    if wanted is None:
        wanted = everything if device_budget is not None else _DEFAULT_BYTES
    capacity = min(everything, max(floor, wanted))
    if device_budget is None:
        return capacity
    capacity = min(capacity, device_budget - taken)
    if capacity < needs.at_once:
        which = f"unit {needs.names[0]}" if len(needs.names) == 1 else _several(needs.names)
        raise BudgetError(
            f"cannot bring up {format_bytes(needs.at_once)} of weights of {which}: device_budget "
            f"is {format_bytes(device_budget)}, of which {format_bytes(taken)} are taken",
            hint=f"raise forebay.device_budget to {budget_text(needs.at_once + taken)}, or make "
            "units smaller with zero_optimization.sub_group_size",
        )
    return capacity


def with_default_pool(placement: Placement) -> Placement:
    """The placement with a pool for all units that come and go, one at a time at work, unasked.

    As it is where no weights come and go.
    """
    comes = [unit.layout for unit in placement.units if unit.weights is not WeightPlace.DEVICE]
    if not comes:
        return placement
    sizes = {layout.name: streamed_bytes(layout) for layout in comes}
    largest = max(sizes, key=lambda name: sizes[name])
    needs = PoolNeeds(sizes=sizes, at_once=sizes[largest], names=(largest,))
    return replace(placement, pool_bytes=pool_bytes(needs, asked=None, device_budget=None, taken=0))


def _several(names: tuple[str, ...]) -> str:
    return f"{len(names)} units that are used at the same time ({names[0]}, ..., {names[-1]})"
