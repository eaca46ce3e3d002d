"""Whether what is to be placed fits the budgets and the machine; refused before anything moves.

The ranks of one machine share its host memory, and the host budget, in equal parts.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.engine.files import refuse_more_files
from forebay.errors import BudgetError
from forebay.hardware.limits import HostCeiling, HostLimit, host_ceiling
from forebay.plan.file_places import with_least_buffers
from forebay.plan.memory import forecast
from forebay.plan.placement import Accumulation, UpdatePlace
from forebay.plan.policies import EXACT
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.engine.options import EngineOptions
    from forebay.plan.placement import Placement

__all__ = ["refuse_what_does_not_fit"]

# Stands for a host budget where only the machine's own limits are asked for.
_UNBOUNDED = 1 << 62


def refuse_what_does_not_fit(placement: Placement, *, options: EngineOptions, cpu: bool) -> None:
    """Compare the forecast with the budgets and the machine.

    Args:
        placement: What is to be placed.
        options: The budgets.
        cpu: Whether the device tier lies in host memory too; the machine's limits then bind both.

    Raises:
        BudgetError: A tier is short; names both numbers and the bytes by role.
    """
    sizes = _sizes(placement, options=options, cpu=cpu)
    device = _total(sizes, "device")
    table = ", ".join(
        f"{tier} {role} {format_bytes(value)}" for (tier, role), value in sorted(sizes.items())
    )
    what = f"training state ({table})"
    sharers = 1 if options.group is None else options.group.local_size
    ceilings = [host_ceiling(options.host_budget, sharers=sharers)]
    if cpu and options.host_budget is not None:
        ceilings.append(host_ceiling(_UNBOUNDED, sharers=sharers))
    for ceiling in ceilings:
        needed = _needed(sizes, cpu=cpu, limit=ceiling.limit)
        hint = None
        if ceiling.nbytes is not None and needed > ceiling.nbytes:
            hint = _way_out(placement, options=options, needed=needed, ceiling=ceiling, cpu=cpu)
        ceiling.require(needed, what=what, hint=hint)
    refuse_more_files(sizes, budget=None if options.nvme is None else options.nvme.budget)
    if options.device_budget is not None and device > options.device_budget:
        raise BudgetError(
            f"cannot place {format_bytes(device)} of {what} on the device: device_budget is "
            f"{format_bytes(options.device_budget)}",
            hint=f"raise forebay.device_budget to {budget_text(device)}"
            + ("" if cpu else _off_device(placement)),
        )
    if options.group is not None and options.group.size > 1:
        # None of them takes memory before all have seen what the machine has.
        options.group.compare("", what="the plan of its memory")


def _total(sizes: Mapping[tuple[str, str], int], tier: str) -> int:
    return sum(value for (at, _), value in sizes.items() if at == tier)


def _needed(sizes: Mapping[tuple[str, str], int], *, cpu: bool, limit: HostLimit) -> int:
    """Bytes that a limit binds: on `cpu` the machine's own limits bind the device tier too."""
    host = _total(sizes, "host")
    if not cpu or limit is HostLimit.HOST_BUDGET:
        return host
    everything = host + _total(sizes, "device")
    # what is available now does not count the weights, which the model holds already
    return everything - (
        sizes.get(("device", "lp_params"), 0) if limit is HostLimit.AVAILABLE else 0
    )


def _way_out(
    placement: Placement,
    *,
    options: EngineOptions,
    needed: int,
    ceiling: HostCeiling,
    cpu: bool,
) -> str:
    """The nearest settings that fit."""
    key = "forebay.host_budget" if ceiling.limit is HostLimit.HOST_BUDGET else "it"
    ways = [f"raise {key} to {budget_text(needed * ceiling.sharers)}"]
    others = {
        "set gradient_accumulation_steps to 1": replace(
            placement, accumulation=Accumulation.SINGLE
        ),
        "set buffer_count to 1 and leave buffer_size out": with_least_buffers(placement),
    }
    for way, other in others.items():
        sizes = _sizes(other, options=options, cpu=cpu)
        fewer = _needed(sizes, cpu=cpu, limit=ceiling.limit)
        if other != placement and ceiling.nbytes is not None and fewer <= ceiling.nbytes:
            ways.append(f"{way} (needs {format_bytes(fewer)})")
    if not cpu and placement.policy == EXACT and _keeps_weights(placement):
        ways.append("keep state on the device (offload_optimizer.device: none)")
    if ceiling.limit is HostLimit.AVAILABLE:
        ways.append("set forebay.host_budget if the machine's memory grows as it is touched")
    return ", or ".join(ways)


def _keeps_weights(placement: Placement) -> bool:
    return not any(unit.weights.is_off_device for unit in placement.units)


def _off_device(placement: Placement) -> str:
    """What else could leave the device, as the next words of a hint."""
    if any(unit.update is UpdatePlace.DEVICE for unit in placement.units):
        return ", or offload the optimizer state with offload_optimizer"
    if placement.policy == EXACT and _keeps_weights(placement):
        return ", or keep weights on the host with stage 3 and offload_param"
    return ""


def _sizes(
    placement: Placement, *, options: EngineOptions, cpu: bool
) -> dict[tuple[str, str], int]:
    """The forecast, and under a host budget what checkpoints pass through."""
    sizes = forecast(placement, device_page_bytes=mmap.PAGESIZE if cpu else 1)
    if options.host_budget is not None and options.save_bytes:
        sizes["host", "checkpoints"] = options.save_bytes
    return sizes
