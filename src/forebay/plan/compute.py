"""Seconds of forward and backward by unit: a roofline over a device's measured rates.

[Note: roofline] Matrix products run at the rate that their size reaches (the geometric mean of
their three widths against the profile's table), every other operation at the rate of its kind. A
product costs backward two, for its input's gradient and its weight's; behind a frozen weight one.
The processor issues operations ahead of a device of its own: a unit has ended when its work is
done, and not before it is issued. On `cpu` both add up.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.hardware.rates import PassRate, PassSeconds
from forebay.plan.simulate import ComputeSeconds
from forebay.plan.unit_work import Kind, block_work, embedding_work, head_work
from forebay.plan.workload import Precision, Recompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape
    from forebay.plan.unit_work import UnitWork
    from forebay.plan.workload import Workload

__all__ = ["BlockMatrices", "compute_seconds", "issue_share", "matrix_rate", "model_flops"]

# Wider than any row of a profile.
_WIDE = 1e9
# What issuing takes beside a unit itself, measured on processors of two kinds. The hooks of an
# engine, a call for each module and one for each gradient, in forwards of the unit.
_HOOKED_FORWARD, _HOOKED_BACKWARD = 0.25, 1.0
# With torch's checkpointing a forward is issued with hooks around all that it saves, and issued
# again in backward, which compares what is saved; in forwards with the engine's hooks.
_CHECKPOINTED, _RECOMPUTATION = 1.35, 1.45


class BlockMatrices(Enum):
    """Whether the matrices of blocks are trained."""

    TRAINED = "trained"
    FROZEN = "frozen"
    """Gradients pass through them, and none is computed of them."""

    @property
    def backward_products(self) -> float:
        """Products of a backward for each of the forward's."""
        return 2.0 if self is BlockMatrices.TRAINED else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Seconds of a unit's passes: the device's, and what issuing them takes the processor."""

    forward: float
    backward: float
    issue_forward: float
    issue_backward: float

    def recomputed(self) -> _Passes:
        """With another forward before backward."""
        return replace(
            self,
            backward=self.forward + self.backward,
            issue_forward=_CHECKPOINTED * self.issue_forward,
            issue_backward=self.issue_backward + _RECOMPUTATION * self.issue_forward,
        )

    def joined(self, other: _Passes) -> _Passes:
        """Both, as one unit."""
        return _Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            issue_forward=self.issue_forward + other.issue_forward,
            issue_backward=self.issue_backward + other.issue_backward,
        )


def matrix_rate(profile: Profile, *, dtype: str, size: float) -> float:
    """Operations per second of products of a size.

    Raises:
        ConfigError: The device has no rate for the dtype.
    """
    rows = [rate for rate in profile.matrix if rate.dtype == dtype]
    if not rows:
        known = {rate.dtype for rate in profile.matrix}
        others = " or ".join(one.value for one in Precision if one.dtype in known)
        raise ConfigError(
            f"{profile.machine.device} has no rate for {dtype} (known: "
            f"{', '.join(sorted(known)) or 'none'})",
            hint=f"choose another precision: --precision {others}"
            if others
            else "measure this machine with: forebay probe --output FILE",
        )
    place = bisect.bisect_left([row.size for row in rows], size)
    if place == len(rows):
        return rows[-1].flops
    if place == 0:
        return rows[0].flops * min(1.0, size / rows[0].size)
    low, high = rows[place - 1], rows[place]
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return low.flops * math.exp(share * math.log(high.flops / low.flops))


def _rate(kind: Kind, *, profile: Profile, dtype: str) -> PassRate:
    """What operations of a kind reach; without a measurement, what the roofline says."""
    layer = profile.layer
    if kind is Kind.SCORES or (kind is Kind.ATTENTION and layer is None):
        half = matrix_rate(profile, dtype=dtype, size=_WIDE) / 2
        return PassRate(forward=half, backward=half)
    if kind is Kind.COPY or layer is None:
        memory = profile.device_memory or max(rate.copy for rate in profile.threads)
        return PassRate(forward=memory, backward=memory)
    rate: PassRate = getattr(layer, kind.value)
    if kind is not Kind.ATTENTION or layer.dtype == dtype:
        return rate
    here, there = (matrix_rate(profile, dtype=one, size=_WIDE) for one in (dtype, layer.dtype))
    scale = here / there
    return PassRate(forward=scale * rate.forward, backward=scale * rate.backward)


def _seconds(
    work: UnitWork,
    *,
    profile: Profile,
    dtype: str,
    matrices: BlockMatrices = BlockMatrices.TRAINED,
) -> _Passes:
    """Of a unit without recomputation."""
    flops = sum(f / matrix_rate(profile, dtype=dtype, size=size) for f, size in work.products)
    forward, backward = flops, matrices.backward_products * flops
    for one in work.operations:
        rate = _rate(one.kind, profile=profile, dtype=dtype)
        forward += one.forward / rate.forward
        backward += one.backward / rate.backward
    issue = profile.layer.issue if profile.layer else PassSeconds(forward=0.0, backward=0.0)
    return _Passes(
        forward=forward,
        backward=backward,
        issue_forward=work.issued * (1 + _HOOKED_FORWARD) * issue.forward,
        issue_backward=work.issued * (issue.backward + _HOOKED_BACKWARD * issue.forward),
    )


def _issued(units: Sequence[_Passes], *, ahead: bool) -> ComputeSeconds:
    """What each unit takes in both passes, issued one after the other; see [Note: roofline]."""
    if not ahead:
        return ComputeSeconds(
            forward=tuple(one.forward + one.issue_forward for one in units),
            backward=tuple(one.backward + one.issue_backward for one in units),
        )
    issued = ended = 0.0
    taken: list[float] = []
    passes = [(one.forward, one.issue_forward) for one in units]
    passes += [(one.backward, one.issue_backward) for one in reversed(units)]
    for work, issue in passes:
        issued += issue
        end = max(ended + work, issued)
        taken.append(end - ended)
        ended = end
    return ComputeSeconds(
        forward=tuple(taken[: len(units)]), backward=tuple(reversed(taken[len(units) :]))
    )


def compute_seconds(
    shape: ModelShape,
    *,
    workload: Workload,
    profile: Profile,
    matrices: BlockMatrices = BlockMatrices.TRAINED,
) -> ComputeSeconds:
    """Seconds of one micro-batch by unit, in the order of `shape.spec`.

    See [Note: roofline].

    Args:
        shape: The model.
        workload: Its micro-batch.
        profile: The machine.
        matrices: Whether those of the blocks are trained.

    Raises:
        ConfigError: The device has no rate for the precision.
    """
    dtype = workload.precision.dtype
    embedding = _seconds(embedding_work(shape, workload), profile=profile, dtype=dtype)
    block = _seconds(block_work(shape, workload), profile=profile, dtype=dtype, matrices=matrices)
    head = _seconds(head_work(shape, workload), profile=profile, dtype=dtype)
    if workload.recompute is Recompute.BLOCKS:
        block = block.recomputed()
    units = [embedding, *[block] * shape.layers]
    units = [*units, head] if shape.head_shapes() else [*units[:-1], units[-1].joined(head)]
    found = _issued(units, ahead=profile.machine.device != "cpu")
    factor = profile.corrections.compute
    return replace(
        found,
        forward=tuple(factor * one for one in found.forward),
        backward=tuple(factor * one for one in found.backward),
    )


def issue_share(shape: ModelShape, *, workload: Workload, profile: Profile) -> float:
    """The share of the passes in which a device of its own waits for operations to be issued.

    Args:
        shape: The model.
        workload: Its micro-batch.
        profile: The machine.

    Raises:
        ConfigError: The device has no rate for the precision.
    """
    if profile.layer is None or profile.machine.device == "cpu":
        return 0.0
    at_once = replace(profile.layer, issue=PassSeconds(forward=0.0, backward=0.0))
    passes, works = (
        compute_seconds(shape, workload=workload, profile=one)
        for one in (profile, replace(profile, layer=at_once))
    )
    return 1 - sum(works.forward + works.backward) / sum(passes.forward + passes.backward)


def model_flops(shape: ModelShape, workload: Workload) -> float:
    """Operations of one update on one device, recomputation counted where it happens.

    Matrix products of the parameters alone: 8 N T with recomputation, 6 N T without.
    """
    times = 8.0 if workload.recompute is Recompute.BLOCKS else 6.0
    blocks = shape.layers * shape.active_block_parameters
    head = shape.vocab * shape.hidden
    tokens = workload.tokens_per_update
    return tokens * (times * blocks + 6.0 * head) / workload.tensor_parallel
