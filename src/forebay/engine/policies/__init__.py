"""One file for each update policy; `choose` makes the one that a placement names."""

from __future__ import annotations

from forebay.engine.policies.choose import (
    make_policy,
    places_for,
    policy_for,
    sums_on_device,
)

__all__ = ["make_policy", "places_for", "policy_for", "sums_on_device"]
