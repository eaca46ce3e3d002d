"""Which places a policy has units in, and what it falls back to where it would not pay."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.engine.options import Timing
from forebay.errors import BudgetError, UnsupportedError
from forebay.plan.memory import forecast
from forebay.plan.placement import UpdatePlace, WeightPlace
from forebay.plan.policies import EXACT, Delayed, Speculative
from forebay.plan.policy_bytes import speculates
from forebay.plan.zenflow import ZenFlow
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.options import EngineOptions
    from forebay.plan.placement import Placement

__all__ = ["places_for", "with_policy_that_pays"]

_log = logging.getLogger("forebay")
_OR_EXACT = "or update: exact"


def places_for(options: EngineOptions, places: Sequence[UpdatePlace]) -> Sequence[UpdatePlace]:
    """The places that the policy has of those that were chosen.

    Raises:
        UnsupportedError: It has none for one of them.
    """
    if isinstance(options.policy, ZenFlow):
        return _zenflow(options, places, every=options.policy.update_every)
    if isinstance(options.policy, Delayed):
        return _delayed(options, places)
    if isinstance(options.policy, Speculative) and UpdatePlace.NVME in places:
        raise UnsupportedError(
            "speculative updates do not keep state in files: what is discarded would have been "
            "written to the drive in vain",
            hint=f"keep state in host memory (offload_optimizer.device: cpu), {_OR_EXACT}",
        )
    return places


def _zenflow(
    options: EngineOptions, places: Sequence[UpdatePlace], *, every: int | None
) -> Sequence[UpdatePlace]:
    if UpdatePlace.NVME in places:
        raise UnsupportedError(
            "zenflow does not keep state in files: columns that become important need theirs at "
            "once, and in a file they lie all over",
            hint=f"keep state in host memory (offload_optimizer.device: cpu), {_OR_EXACT}",
        )
    if options.weights is WeightPlace.HOST:
        raise UnsupportedError(
            "zenflow does not keep weights on the host: important columns are updated in the "
            "weights on the device in every step",
            hint=f"keep weights on the device (offload_param.device: none), {_OR_EXACT}",
        )
    if every is None and options.sharding.size > 1:
        raise UnsupportedError(
            "zenflow over several ranks needs a number of steps between updates of the rest: each "
            "rank sees its own slices alone",
            hint="write zenflow.update_interval: 4, for example",
        )
    kept = (UpdatePlace.DEVICE, UpdatePlace.HOST)
    return [place if place in kept else UpdatePlace.HOST for place in places]


def _delayed(options: EngineOptions, places: Sequence[UpdatePlace]) -> Sequence[UpdatePlace]:
    if UpdatePlace.NVME in places:
        raise UnsupportedError(
            "delayed updates do not keep state in files: new weights would wait a whole step in "
            "host memory that files are to save",
            hint=f"keep state in host memory (offload_optimizer.device: cpu), {_OR_EXACT}",
        )
    if options.weights is WeightPlace.HOST:
        raise UnsupportedError(
            "delayed updates do not keep weights on the host: those that passes load would have "
            "to be kept beside those that an update makes",
            hint=f"keep weights on the device (offload_param.device: none), {_OR_EXACT}",
        )
    was_chosen = options.update is not None or options.places is not None
    if was_chosen and UpdatePlace.DEVICE in places:
        raise UnsupportedError(
            "delayed updates run on the host, and some state is to stay on the device: all updates "
            "come into force together",
            hint=f"offload all of it (offload_optimizer.device: cpu, no ratio), {_OR_EXACT}",
        )
    if options.timing is Timing.SYNCHRONOUS:
        raise UnsupportedError(
            "delayed updates outlast their step, and synchronous finishes every update within it",
            hint=f"delete forebay.synchronous, {_OR_EXACT}",
        )
    return [UpdatePlace.HOST] * len(places)


def with_policy_that_pays(placement: Placement, *, check: Callable[[Placement], None]) -> Placement:
    """The placement with its policy, or with exact updates where that gains nothing or not fits.

    Args:
        placement: With the policy that is asked for.
        check: Raises BudgetError where a placement does not fit.

    Raises:
        BudgetError: It does not fit with exact updates either.
    """
    if not isinstance(placement.policy, Speculative):
        check(placement)
        return placement
    exact = replace(placement, policy=EXACT)
    if not any(
        speculates(placement.policy, update=unit.update, weights=unit.weights)
        for unit in placement.units
    ):
        check(exact)
        _log.warning(
            "updates are exact, not speculative: no unit updates on the host with its weights on "
            "the device, so there is no update to hide under backward"
        )
        return exact
    try:
        check(placement)
    except BudgetError as error:
        check(exact)
        more = sum(forecast(placement).values()) - sum(forecast(exact).values())
        _log.warning(
            "updates are exact, not speculative: a second state of %s does not fit (%s)",
            *(format_bytes(more), error.message.partition(": ")[2] or error.message),
        )
        return exact
    return placement
