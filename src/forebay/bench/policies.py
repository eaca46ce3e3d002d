"""Update policies as endings of a benchmark's variants: `r0+speculative`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.policies import EXACT, Delayed, Speculative
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from forebay.plan.policies import Policy

__all__ = ["policy_of", "without_policy"]


def _policies() -> dict[str, Policy]:
    return {
        "+speculative": Speculative(),
        # measured when what it holds back is held back
        "+delayed": Delayed(warm_up_steps=0),
        # as its authors' example: a twentieth of the columns, the rest every fourth step
        "+zenflow": ZenFlow(topk_ratio=0.05, select_every=16, update_every=4, overlaps=True),
    }


def policy_of(variant: str) -> Policy:
    """The policy that a variant ends with; exact where it names none."""
    found = [policy for ending, policy in _policies().items() if variant.endswith(ending)]
    return found[0] if found else EXACT


def without_policy(variant: str) -> str:
    """The variant without that ending."""
    for ending in _policies():
        variant = variant.removesuffix(ending)
    return variant
