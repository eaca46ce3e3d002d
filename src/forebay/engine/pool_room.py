"""How much of the device streamed weights get, from a model and its placement."""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.model.holding import held_by_modules, most_held
from forebay.plan.exchange_memory import exchange_bytes
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.memory import forecast
from forebay.plan.placement import WeightPlace
from forebay.plan.pool_size import PoolNeeds, pool_bytes
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from forebay.engine.options import EngineOptions
    from forebay.model.inspect import InspectedModel
    from forebay.plan.placement import Placement

__all__ = ["with_pool"]

_log = logging.getLogger("forebay")

# What nobody needs to hear of.
_LITTLE_BYTES = 64 << 20


def with_pool(
    placement: Placement,
    *,
    root: nn.Module,
    model: InspectedModel,
    options: EngineOptions,
) -> Placement:
    """The placement with the bytes that streamed weights share.

    Args:
        placement: Where everything lives; without a pool.
        root: The model.
        model: The same, inspected.
        options: What is asked for.

    Raises:
        BudgetError: What is used at the same time does not fit.
    """
    every = (*placement.units, *placement.frozen)
    streamed = [unit.layout for unit in every if unit.weights is not WeightPlace.DEVICE]
    if not streamed:
        return placement
    _say_what_stays(root, model)
    owners = {
        unit.index: [model.owners[slot.index] for part in unit.parts for slot in part.slots]
        for unit in streamed
    }
    sizes = {unit.index: streamed_bytes(unit) for unit in streamed}
    names = {unit.index: unit.name for unit in streamed}
    most = most_held(root, held=held_by_modules(root, owners=owners), sizes=sizes)
    # a page for each allocation at the most, as where the device tier lies in host memory
    taken = forecast(placement, device_page_bytes=mmap.PAGESIZE)
    needs = PoolNeeds(
        sizes={names[index]: nbytes for index, nbytes in sizes.items()},
        at_once=most.nbytes,
        names=tuple(names[index] for index in most.units),
    )

    def sized(taken_bytes: int) -> Placement:
        size = pool_bytes(
            needs,
            asked=options.pool_bytes,
            device_budget=options.device_budget,
            taken=taken_bytes,
        )
        return replace(placement, pool_bytes=size)

    taken_bytes = sum(nbytes for (tier, _), nbytes in taken.items() if tier == "device")
    found = sized(taken_bytes)
    # what is read ahead for the units that the pool has room for
    ahead = exchange_bytes(found) - exchange_bytes(placement)
    return sized(taken_bytes + ahead) if ahead else found


def _say_what_stays(root: nn.Module, model: InspectedModel) -> None:
    """What is neither trained nor comes and goes; a user with much of it should know."""
    known = {id(param) for param in model.params}
    frozen = sum(param.nbytes for param in root.parameters() if id(param) not in known)
    if frozen > _LITTLE_BYTES:
        _log.warning(
            "%s of parameters that are not trained stay on the device", format_bytes(frozen)
        )
