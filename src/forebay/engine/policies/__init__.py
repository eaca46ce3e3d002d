"""One file for each update policy; `choose` makes the one that a placement names."""

from __future__ import annotations

from forebay.engine.policies.choose import make_policy, policy_for

__all__ = ["make_policy", "policy_for"]
