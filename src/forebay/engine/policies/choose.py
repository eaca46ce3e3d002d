"""Which policy an engine has: what its options ask for, as far as it is legal, and who acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.options import OverflowCheck, Timing
from forebay.engine.policies.delayed import DelayedUpdates
from forebay.engine.policies.early import EarlyUpdates
from forebay.engine.policies.exact import ExactUpdates
from forebay.engine.policies.speculative import SpeculativeUpdates
from forebay.engine.policies.zenflow import ZenFlowUpdates
from forebay.optim.loss_scale import StaticLossScale
from forebay.plan.policies import Delayed, DuringBackward, Exact, Speculative
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from forebay.engine.options import EngineOptions
    from forebay.engine.policy import PolicyParts, UpdatePolicy
    from forebay.plan.policies import Policy

__all__ = ["make_policy", "policy_for", "sums_on_device"]


def policy_for(options: EngineOptions) -> Policy:
    """The policy of the placement: exact updates run during backward where that is legal."""
    # speculation where nothing is to be decided needs no second state
    if not isinstance(options.policy, Exact | Speculative) or options.sharding.size > 1:
        return options.policy  # with ranks only the step knows who has a gradient
    scale = options.loss_scale
    unscaled = isinstance(scale, StaticLossScale) and scale.value == 1.0
    unchecked = options.overflow is OverflowCheck.OFF and options.clip_norm is None
    if unscaled and unchecked and options.timing is Timing.DEFERRED:
        return DuringBackward()
    return options.policy


def sums_on_device(policy: Policy) -> bool:
    """Whether a policy must see a window's whole gradient on the device."""
    return isinstance(policy, ZenFlow)


def make_policy(parts: PolicyParts) -> UpdatePolicy:
    """The object that acts on the placement's policy."""
    if isinstance(parts.placement.policy, DuringBackward):
        return EarlyUpdates(
            parts.units, terms=parts.terms, executor=parts.executor, barrier=parts.barrier
        )
    if isinstance(parts.placement.policy, ZenFlow):
        return ZenFlowUpdates(parts)
    if isinstance(parts.placement.policy, Delayed):
        return DelayedUpdates(parts, policy=parts.placement.policy)
    if isinstance(parts.placement.policy, Speculative):
        return SpeculativeUpdates(parts, policy=parts.placement.policy)
    return ExactUpdates(parts.executor)
