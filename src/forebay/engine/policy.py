"""Update policies: what an engine's step and backward tell of, and who acts on it.

A policy decides when units update and when their new weights come into force. Whether a window is
used at all, by which factor and hyperparameters, is decided by the step in every policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forebay.checkpoint.header import TensorSpec
    from forebay.checkpoint.sources import Source
    from forebay.engine.barrier import Barrier
    from forebay.engine.executor import Executor
    from forebay.engine.options import EngineOptions
    from forebay.engine.record import ParamRecord
    from forebay.engine.state_memory import PartMemory
    from forebay.engine.terms import UpdateOrder, UpdateTerms
    from forebay.engine.unit import Unit
    from forebay.plan.placement import Placement
    from forebay.plan.program import Program
    from forebay.tiers.device import DeviceArena

__all__ = ["PolicyParts", "UpdatePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What policies are made from.

    Attributes:
        units: Every unit by index.
        placement: Where they live, and which policy is asked for.
        executor: Carries out operations; its lanes move bytes.
        terms: What updates are made with.
        barrier: What readers pass.
        memory: Where memory comes from.
        options: What the engine was asked for.
    """

    units: Sequence[Unit]
    placement: Placement
    executor: Executor
    terms: UpdateTerms
    barrier: Barrier
    memory: PartMemory
    options: EngineOptions


class UpdatePolicy:
    """Hears of a window's moments; an interface without state, whose every moment does nothing.

    Calls in a backward: `begin_backward`, then `complete` for each unit, and `disturb` for what
    comes for a unit after that. In `step()`: `check`, `lost` while the window is sealed, then
    `apply` or `skip`, then `end_window`. Where a window is dropped instead: `refuse_discard`, then
    `forget_window`. At any time: `spoiled`, `master_changed`, `settle`, `finish`, `close`.
    """

    def begin_backward(self, program: Program, *, last: bool) -> None:
        """A backward brings its first gradient.

        Raises:
            GradientError: It cannot follow what has begun.
        """

    def complete(self, program: Program, unit: Unit) -> None:
        """A unit's gradient of the window's last backward has left, complete as far as known."""

    def disturb(self, unit: Unit) -> None:
        """Something came for a unit after its gradient had left.

        Raises:
            GradientError: It came too late.
        """

    def master_changed(self, record: ParamRecord) -> None:
        """Master and weight were set from outside of updates: by the user, or from a checkpoint."""

    def lost(self, record: ParamRecord) -> None:
        """A gradient that an update has used was cleared or replaced before the step.

        Raises:
            GradientError: Always.
        """

    def spoiled(self, reason: str) -> None:
        """The window cannot be completed."""

    def check(self, *, divisor: float) -> None:
        """`step()` begins; nothing of it is final.

        Args:
            divisor: What the gradients are too large by, beside the loss scale.

        Raises:
            GradientError: It asks for another update than the one that has begun.
        """

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """The step is decided: update by `order`, which names every present parameter."""

    def skip(self, program: Program) -> None:
        """The step is decided: this window changes no bit."""

    def end_window(self) -> None:
        """The step has used (or skipped) the window's gradients."""

    def refuse_discard(self) -> None:
        """The window's gradients are to be discarded.

        Raises:
            GradientError: Some were used.
        """

    def forget_window(self) -> None:
        """The window's gradients are discarded; another window begins."""

    def finish(self, program: Program) -> None:
        """Bring into force whatever was decided: `synchronize()` was called, or the engine ends."""

    def plain_state(self) -> dict[str, Any] | None:
        """Plain values for a checkpoint, the same on every rank; None where there are none."""
        return None

    def gathered(self, record: ParamRecord) -> Callable[[TensorSpec], Source] | None:
        """Makes the source of what no update has used yet, of this rank's slice; None without."""
        del record
        return None

    def restore(
        self,
        values: dict[str, Any] | None,
        gathered: Callable[[ParamRecord], torch.Tensor | None],
    ) -> None:
        """All state came from a checkpoint; `master_changed` was called for each parameter.

        Args:
            values: What `plain_state` was where it was saved, in whichever mode.
            gathered: This rank's slice of what `gathered` was, flat; None without.
        """

    def continues(self, values: dict[str, Any] | None) -> bool:
        """Whether weights in force of the checkpoint that was restored are in force here, too.

        Args:
            values: What `plain_state` was where it was saved; None of all modes but one.
        """
        del values
        return False

    def holds_back(self, record: ParamRecord) -> bool:
        """Whether training computes with a weight that is older than the parameter's master."""
        del record
        return False

    def hold_back(self, record: ParamRecord, older: Callable[[], None]) -> None:
        """A checkpoint that `continues` has an older weight: it is in force until the next step.

        Args:
            record: A parameter that has the weight of its master now.
            older: Writes the older one over it.
        """

    def settle(self) -> None:
        """A reader passes the barrier: state is that of the last decided update after this."""

    def idle_arenas(self) -> Sequence[DeviceArena]:
        """Its memory on the device in which there is nothing after `settle`."""
        return ()

    def rebind(self) -> None:
        """That memory was given back, or is there again."""

    def close(self) -> None:
        """The lanes are closed: give memory back. Idempotent."""
