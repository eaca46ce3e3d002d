"""The one barrier that readers pass, and what is left when an update has failed.

[Note: after a failure] Some units may be new and some old, so no weight may be read: every
parameter becomes NaN, and whoever reads through a hook, `state_dict` or the optimizer gets an
EngineClosedError. `close()` then gives the model back as ordinary tensors full of NaN, into
which a checkpoint can be loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from forebay.engine.unit import Unit, WeightState
from forebay.errors import (
    EngineClosedError,
    GradientError,
    RankError,
    StateAwayError,
    TransferError,
)
from forebay.links.observer import Moment
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.readers import Readers
    from forebay.engine.streamer import Streamer
    from forebay.engine.unit import NanSource
    from forebay.links.lanes import Lanes

__all__ = ["FAILED_HINT", "Barrier"]

FAILED_HINT = "weights and optimizer state are not usable any more; go back to the last checkpoint"
_CLOSED = "it was closed"


class Barrier:
    """Waits for everything, and refuses once the engine is closed.

    Args:
        units: Every unit.
        lanes: What moves bytes.
        nans: What unreadable weights view.
        forget_visits: Drops state that is on the device for the coming update.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        lanes: Lanes,
        nans: NanSource,
        forget_visits: Callable[[], None],
    ) -> None:
        self._units = units
        self._lanes = lanes
        self.nans = nans
        self._forget_visits = forget_visits
        self._closed: str | None = None
        # A child that is forked has neither threads that would finish work nor the state's memory.
        self._process = os.getpid()
        # From the first early update of a window to its step: some weights are old, some new.
        self.held = False
        # Roles whose memory has left the device until `reload_states()`.
        self.away: set[Role] = set()
        # What a save beside training reads on several ranks, until they have met.
        self.readers: Readers | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed, for whatever reason."""
        return self._closed is not None

    @property
    def failure(self) -> str | None:
        """Why the engine closed itself, in one line; None while it is open or when it was shut."""
        return None if self._closed == _CLOSED else self._closed

    def refuse_closed(self, reason: str = "this call") -> None:
        """Raise EngineClosedError when the engine is closed, or this is a fork of its process."""
        if os.getpid() != self._process:
            raise EngineClosedError(
                f"{reason} was called in a forked process (id {os.getpid()}): the engine's threads "
                f"and memory are those of process {self._process}",
                hint="call it there, or start other processes with spawn instead of fork",
            )
        if self._closed is not None:
            hint = "make a new engine" if self._closed == _CLOSED else FAILED_HINT
            raise EngineClosedError(f"{reason} needs an open engine, but {self._closed}", hint=hint)

    def make_ready(self, unit: Unit) -> None:
        """Wait for one unit's weights; those on the host alone stay there.

        Raises:
            EngineClosedError: The engine failed earlier.
            TransferError: It fails now.
            PendingWeightError: Someone wrote into the weights before they had arrived.
        """
        if unit.state is not WeightState.PENDING:
            return
        self.refuse_closed(f"unit {unit.name}")
        self.refuse_away(f"weights of unit {unit.name}")
        if unit.updated:
            self._refuse_held(f"weights of unit {unit.name}")
        try:
            with self._lanes.waiting(f"weights of {unit.name}"):
                unit.make_ready(self._lanes.accelerator, self.nans)
        except (TransferError, RankError) as error:
            self.fail(str(error))
            raise

    def settle(self, visits: Streamer, *, everything: bool) -> None:
        """Wait until state that visited the device is home, all or as much as room is short.

        Raises:
            TransferError: It did not arrive.
        """
        try:
            visits.settle(everything=everything)
        except RuntimeError as error:
            self.fail(str(error))
            raise TransferError(
                f"updated state did not come home: {error}", hint=FAILED_HINT
            ) from error

    def quiesce(self, reason: str) -> None:
        """Every weight is ready and every lane is idle when this returns.

        Args:
            reason: Who reads, for the message when the engine is closed.

        Raises:
            EngineClosedError: The engine failed earlier.
            TransferError: It fails now.
        """
        self.refuse_away(reason)
        self.drain(reason)

    def drain(self, reason: str) -> None:
        """As `quiesce`, for who does not need what is away."""
        self.refuse_closed(reason)
        self._refuse_held(reason)
        for unit in self._units:
            if not self.away:
                self.make_ready(unit)
        self._forget_visits()
        try:
            self._lanes.drain()
        except TransferError as error:
            self.fail(str(error))
            raise
        self._lanes.accelerator.synchronize()
        self._lanes.mark(Moment.IDLE)
        self._lanes.reap()

    def meet_readers(self) -> None:
        """Over ranks: wait until no rank's checkpoint reads what may change from now on.

        Every rank calls it at the same point; see `engine.readers`, [Note: ranks meet].

        Raises:
            RankError: A rank is gone.
        """
        readers, self.readers = self.readers, None
        if readers is None:
            return
        try:
            readers.meet()
        except RankError as error:
            self.fail(str(error))
            raise

    def refuse_away(self, reason: str) -> None:
        """Raise StateAwayError while state has left the device; EngineClosedError if for good."""
        if self.away:
            self.refuse_closed(reason)
            gone = ", ".join(sorted(role.value for role in self.away))
            raise StateAwayError(
                f"{reason}: {gone} {'has' if len(self.away) == 1 else 'have'} left the device by "
                "offload_states()",
                hint="call reload_states() first",
            )

    def _refuse_held(self, reason: str) -> None:
        """Raise GradientError between the first early update and the step that confirms it."""
        if self.held:
            raise GradientError(
                f"{reason}: units were updated during backward, and step() was not called yet",
                hint="call step() first, or set bf16.check_grad_overflow to true",
            )

    def fail(self, reason: str) -> None:
        """Close after a failure; see [Note: after a failure]. The first reason stays."""
        if self._closed is not None:
            return
        self._closed = f"it failed during an update: {reason.splitlines()[0]}"
        self._lanes.close()
        for unit in self._units:
            unit.poison(self.nans)

    def shut(self) -> bool:
        """Close for good, giving the parameters back; False when that was done before.

        Raises:
            TransferError: What was on its way failed; closed all the same.
        """
        if self._closed == _CLOSED:
            return False
        if self.held:
            self.fail("it was closed after updates during backward, before step()")
        try:
            if self._closed is None:
                self.quiesce("close")
                self._read_weights_in_files()
        finally:
            for unit in self._units:
                for part in unit.parts:
                    part.await_readers()
            self._closed = _CLOSED
            self._lanes.close()
            self._give_back_weights()
        return True

    def _read_weights_in_files(self) -> None:
        """The newest weights as ordinary tensors in host memory; the files are about to go."""
        for unit in self._units:
            for record in unit.records:
                if record.part.weight_files is not None and not record.part.is_sharded:
                    record.param.data = record.part.stored(record.slot)
                    record.pending, record.away = False, None

    def _give_back_weights(self) -> None:
        for unit in self._units:
            if unit.streams_weights:
                self._give_back_stored(unit)
                continue
            if unit.state is WeightState.READY:
                continue
            for record in unit.records:
                part = record.part
                if Role.LP_PARAMS in self.away:  # their memory is the driver's
                    weight = torch.empty(record.slot.shape, dtype=part.dtype, device=part.device)
                else:
                    weight = part.weight(record.slot)
                record.param.data = weight.fill_(float("nan"))
                record.pending = False

    def _give_back_stored(self, unit: Unit) -> None:
        """The newest weights where they live: on the host."""
        if any(part.is_sharded for part in unit.parts):
            unit.leave(self.nans)  # also what was gathered last: some would be readable, some not
        for record in unit.records:
            if record.part.is_sharded or record.part.weight_files is not None:
                # No rank has the whole weight, and the others may be gone: it stays unreadable, as
                # one in a file does that could not be read.
                continue
            stored = record.part.stored(record.slot)
            if unit.state is WeightState.PENDING:
                stored.fill_(float("nan"))
            record.param.data = stored
            record.pending = False
            record.away = None
