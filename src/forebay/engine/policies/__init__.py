"""One file for each update policy; `choose` makes the one that a placement names."""

from __future__ import annotations

from forebay.engine.policies.choose import make_policy, policy_for, sums_on_device
from forebay.engine.policies.places import places_for, with_policy_that_pays

__all__ = ["make_policy", "places_for", "policy_for", "sums_on_device", "with_policy_that_pays"]
