"""From a resolved configuration to the engine's update policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.policies import EXACT, Delayed, Speculative
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig
    from forebay.plan.policies import Policy

__all__ = ["policy_of"]


def policy_of(config: ResolvedConfig) -> Policy:
    """The policy that the configuration asks for."""
    zenflow = config.zero.zenflow
    if zenflow is None:
        return _without_settings(config)
    return ZenFlow(
        topk_ratio=zenflow.topk_ratio,
        select_every=zenflow.select_steps,
        update_every=zenflow.update_steps,
        auto_ratio=zenflow.auto_ratio,
        warm_up_steps=zenflow.warm_up_steps,
        overlaps=zenflow.overlaps,
        keeps_state_on_host=zenflow.keeps_state_on_host,
    )


def _without_settings(config: ResolvedConfig) -> Policy:
    if config.update.kind == "speculative":
        return Speculative()
    if config.update.kind == "delayed":
        return Delayed(warm_up_steps=config.update.warm_up_steps)
    return EXACT
