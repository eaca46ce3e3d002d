"""What the endings of a variant's name ask for: `streamed+4+layer+speculative+offload`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.bench.policies import policy_of, without_policy
from forebay.plan.placement import AccumulationOrder

if TYPE_CHECKING:
    from forebay.plan.policies import Policy

__all__ = ["Variant"]

# Boundary activations wait on the host.
_OFFLOAD = "+offload"
# All micro-batches of an update pass a block before the next one.
_LAYER = "+layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A contestant's name, taken apart.

    Attributes:
        base: Where state and weights are: the name without endings.
        order: In which order micro-batches pass the model.
        policy: When units update.
        offloads: Whether boundary activations wait on the host.
    """

    base: str
    order: AccumulationOrder
    policy: Policy
    offloads: bool

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Endings come in this order: `+layer`, a policy, `+offload`."""
        rest = name.removesuffix(_OFFLOAD)
        ordered = without_policy(rest)
        base = ordered.removesuffix(_LAYER)
        order = AccumulationOrder.MICROBATCH if base == ordered else AccumulationOrder.LAYER
        return cls(base=base, order=order, policy=policy_of(rest), offloads=rest != name)
