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
        return _zenflow(options, places)
    if isinstance(options.policy, Delayed):
        return _delayed(options, places)
    if isinstance(options.policy, Speculative) and _uses_files(options, places):
        raise UnsupportedError(
            "speculative updates do not keep state in files: what is discarded would have been "
            "written to the drive in vain",
            hint=f"keep state in host memory (offload_optimizer.device: cpu), {_OR_EXACT}",
        )
    return places


def _zenflow(options: EngineOptions, places: Sequence[UpdatePlace]) -> Sequence[UpdatePlace]:
    if _uses_files(options, places):
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
    if _was_chosen(options) and UpdatePlace.STREAMED in places:
        raise UnsupportedError(
            "zenflow does not let state visit the device: the rest is updated on the host, once in "
            "several steps",
            hint=f"delete forebay.streamed_units, {_OR_EXACT}",
        )
    kept = (UpdatePlace.DEVICE, UpdatePlace.HOST)
    return [place if place in kept else UpdatePlace.HOST for place in places]


def _delayed(options: EngineOptions, places: Sequence[UpdatePlace]) -> Sequence[UpdatePlace]:
    if options.weights.is_off_device:
        raise UnsupportedError(
            "delayed updates do not keep weights on the host: those that passes load would have "
            "to be kept beside those that an update makes",
            hint=f"keep weights on the device (offload_param.device: none), {_OR_EXACT}",
        )
    was_chosen = _was_chosen(options)
    if was_chosen and UpdatePlace.STREAMED in places:
        raise UnsupportedError(
            "delayed updates do not let state visit the device: a visit makes the host's update "
            "shorter, and that has the whole next step already",
            hint=f"delete forebay.streamed_units, {_OR_EXACT}",
        )
    if options.timing is Timing.SYNCHRONOUS:
        raise UnsupportedError(
            "delayed updates outlast their step, and synchronous finishes every update within it",
            hint=f"delete forebay.synchronous, {_OR_EXACT}",
        )
    return places if was_chosen else [UpdatePlace.HOST] * len(places)


def _uses_files(options: EngineOptions, places: Sequence[UpdatePlace]) -> bool:
    """Whether some state is in files, or may be where host memory is short."""
    return options.nvme is not None or UpdatePlace.NVME in places


def _was_chosen(options: EngineOptions) -> bool:
    """Whether somebody said where units update; else the planner did."""
    return options.update is not None or options.places is not None


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
