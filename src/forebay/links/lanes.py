"""The native lanes of one engine: gradients down, weights up, updates on the host.

Every call enqueues and returns a ticket; errors surface when somebody waits. Tensors that a
lane reads or writes are held here until their ticket is done.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from forebay.errors import TransferError
from forebay.hardware.thread_limit import starting
from forebay.links.observer import NO_OBSERVER
from forebay.model.layout import ITEM_BYTES
from forebay.plan.memory import RING_SLOTS
from forebay.plan.program import Lane, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forebay.accelerators.base import Accelerator
    from forebay.comm.queue import Queue
    from forebay.hardware.affinity import CoreShare
    from forebay.links.fake import FaultScript
    from forebay.links.observer import Moment, Observer
    from forebay.tiers.host import HostArena

__all__ = ["PIECE_BYTES", "RING_SLOTS", "Lanes", "wait"]

# From 8 MiB on a link runs within a few percent of its bandwidth; smaller pieces let a waited-for
# transfer pass a bulk one sooner.
PIECE_BYTES = 8 << 20

# After every waited-for weight.
_BULK_PRIORITY = 1 << 30


_GO_BACK = "weights and optimizer state are not usable any more; go back to the last checkpoint"


def wait(ticket: Any, what: str, *, hint: str | None = None) -> None:
    """Wait for a ticket on the host.

    Raises:
        TransferError: The transfer or update failed, with the lane's reason.
    """
    try:
        ticket.wait()
    except RuntimeError as error:
        raise TransferError(f"{what} failed: {error}", hint=hint) from error


class Closable(Protocol):
    """What the lanes close first when they end."""

    def close(self) -> None:
        """Stop; what is still queued fails. Idempotent."""


class Lanes:
    """Worker pool and both directions of the device-host link.

    Args:
        core: The native core or its fallback.
        accelerator: The device on the other end.
        cores: The processor cores for the update's worker threads.
        make_ring: Allocates the staging ring's memory, `RING_SLOTS` equal slots.
        backlog_bytes: Gradients that may wait on the device for the link.
        fault: Scripted delays and faults; None in real life.

    Attributes:
        traffic: Bytes moved so far over each lane; whoever enqueues counts them.
        observer: Hears of everything that is put on a lane; may be replaced at any time.
        files: Files that take part, closed with the lanes; None where no state is in any.
    """

    def __init__(
        self,
        core: Any,
        *,
        accelerator: Accelerator,
        cores: CoreShare,
        make_ring: Callable[[], HostArena],
        backlog_bytes: int,
        fault: FaultScript | None = None,
    ) -> None:
        self.core = core
        self.accelerator = accelerator
        with starting("the update on the host"):
            self.pool = core.Pool(cores.threads, list(cores.cpus))
        shuffle = -1 if fault is None else fault.seed
        engines = []
        for direction in range(3):
            engine = accelerator.copy_engine(core)
            if fault is not None:
                engine = core.ScriptedEngine(
                    engine,
                    fault.seed + direction,
                    fault.max_delay_us,
                    (fault.fail_at, fault.fail_up_at, fault.fail_load_at)[direction],
                    fault.fail_text,
                )
            engines.append(engine)
        up, load, *down = (accelerator.new_stream() for _ in range(4))
        # A user's read of one number waits neither for what waits for computation nor for a stream
        # that never runs empty: two take turns.
        with starting("the link between device and host"):
            self.down = core.Link(engines[0], down, 2, shuffle, "down", awaits_events=True)
            self.up = core.Link(engines[1], [up], 2, shuffle, "up")
            # Weights that a pass fetches wait for computation before them; state must not wait.
            self.loading = core.Link(engines[2], [load], 2, shuffle, "load")
        self.traffic = dict.fromkeys(Lane, 0)
        self._held: list[tuple[Any, tuple[object, ...]]] = []
        self._backlog: deque[tuple[Any, int]] = deque()
        self._backlog_bytes = backlog_bytes
        self._ring: tuple[Any, HostArena] | None = None
        self._make_ring = make_ring
        self._closed = False
        self.observer: Observer = NO_OBSERVER
        self.files: Closable | None = None
        # Collectives, where there are several ranks.
        self.ranks: Queue | None = None
        # Weights go up in the order in which the next forward needs them.
        self._publish_order = 0

    @property
    def ring(self) -> Any:
        """Staging that gradients pass through on their way to fp32 sums; made at first need."""
        if self._ring is None:
            arena = self._make_ring()
            slot_bytes = arena.nbytes // RING_SLOTS
            self._ring = (self.core.StagingRing(arena.address, slot_bytes, RING_SLOTS), arena)
        return self._ring[0]

    def mark(self, moment: Moment, unit: str = "") -> None:
        """Tell the observer of a moment."""
        self.observer.mark(moment, unit)

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Tell the observer of a wait, around it."""
        return self.observer.waiting(what)

    def hold(self, ticket: Any, *objects: object) -> Any:
        """Keep `objects` alive until `ticket` is done; returns the ticket."""
        self._held.append((ticket, objects))
        return ticket

    def hold_gradients(self, ticket: Any, values: Sequence[torch.Tensor], event: object) -> Any:
        """`hold` for gradients that leave; backward waits here while too many do.

        Without a bound a link slower than backward would leave a whole gradient on the device.
        """
        self.hold(ticket, values, event)
        self._backlog.append((ticket, sum(value.nbytes for value in values)))
        while len(self._backlog) > 1:
            oldest, _ = self._backlog[0]
            if not oldest.done:
                if sum(nbytes for _, nbytes in self._backlog) <= self._backlog_bytes:
                    break
                self._await_gradient(oldest)
            self._backlog.popleft()
        self.reap()
        return ticket

    def await_gradients(self) -> None:
        """Wait until no gradient is on the device for the link alone."""
        for ticket, _ in self._backlog:
            if not ticket.done:
                self._await_gradient(ticket)
        self._backlog.clear()

    def _await_gradient(self, ticket: Any) -> None:
        # a failure surfaces in step()
        with contextlib.suppress(RuntimeError), self.waiting("gradients to leave"):
            ticket.wait()

    def reap(self) -> None:
        """Let go of what finished transfers held, so that its memory is free again."""
        self._held = [entry for entry in self._held if not entry[0].done]

    def land(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        event: int,
        after: Sequence[Any],
        urgent: bool = False,
    ) -> tuple[Any, int]:
        """Copy (destination, source, bytes) spans to the host; returns ticket and bytes.

        What is urgent goes before all that is not, whichever came first.
        """
        plan = self._plan(spans)
        priority = 0 if urgent else _BULK_PRIORITY
        ticket = self.down.copy(plan, priority, list(after), None, event)
        self.observer.submitted(Lane.DOWN, ticket, plan.nbytes)
        return ticket, plan.nbytes

    def fetch(
        self, spans: Sequence[tuple[int, int, int]], *, event: int, after: Sequence[Any]
    ) -> Any:
        """Copy (destination, source, bytes) spans to the device, after waited-for weights."""
        plan = self._plan(spans)
        ticket = self.up.copy(plan, _BULK_PRIORITY, list(after), None, event)
        self.observer.submitted(Lane.UP, ticket, plan.nbytes)
        return ticket

    def fold_down(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        dtype: str,
        first: bool,
        after: Sequence[Any],
        event: int,
    ) -> Any:
        """Bring (sum, source, elements) spans down and add them to fp32 sums on the host."""
        ticket = self.down.copy_fold(
            self.pool, list(spans), dtype, first, self.ring, _BULK_PRIORITY, list(after), event
        )
        nbytes = ITEM_BYTES[dtype] * sum(span[2] for span in spans)
        self.observer.submitted(Lane.DOWN, ticket, nbytes)
        return ticket

    def publish(self, plan: Any, *, after: Any, event: int) -> Any:
        """Copy new weights up, each piece as soon as the same piece of `after` is done."""
        self._publish_order = (self._publish_order + 1) % _BULK_PRIORITY
        ticket = self.up.copy(plan, self._publish_order, [], after, event)
        self.observer.submitted(Lane.UP, ticket, plan.nbytes)
        return ticket

    def publish_behind(self, after: Sequence[Any], plan: Any, *, event: int) -> Any:
        """As `publish`, once all of `after` is done."""
        self._publish_order = (self._publish_order + 1) % _BULK_PRIORITY
        ticket = self.up.copy(plan, self._publish_order, list(after), None, event)
        self.observer.submitted(Lane.UP, ticket, plan.nbytes)
        return ticket

    def join(self, tickets: Sequence[Any]) -> Any:
        """One ticket for the end of several."""
        return self.up.copy(self.core.CopyPlan(1), _BULK_PRIORITY, list(tickets), None, 0)

    def stow(
        self, spans: Sequence[tuple[int, int, int]], *, event: int, after: Sequence[Any]
    ) -> Any:
        """Copy (destination, source, bytes) spans of activations to the host, before bulk."""
        return self._copy(self.down, Lane.DOWN, spans, after=after, event=event)

    def bring_back(
        self, spans: Sequence[tuple[int, int, int]], *, event: int, after: Sequence[Any]
    ) -> Any:
        """Copy (destination, source, bytes) spans of activations to the device, before bulk."""
        return self._copy(self.up, Lane.UP, spans, after=after, event=event)

    def _copy(
        self,
        link: Any,
        lane: Lane,
        spans: Sequence[tuple[int, int, int]],
        *,
        after: Sequence[Any],
        event: int,
    ) -> Any:
        plan = self._plan(spans)
        ticket = link.copy(plan, 0, list(after), None, event)
        self.observer.doing(OpKind.ACTIVATION, "")
        self.observer.submitted(lane, ticket, plan.nbytes)
        return ticket

    def _plan(self, spans: Sequence[tuple[int, int, int]]) -> Any:
        """(destination, source, bytes) spans in pieces of a bulk copy."""
        plan = self.core.CopyPlan(PIECE_BYTES)
        for destination, source, nbytes in spans:
            plan.append(destination, source, nbytes)
        return plan

    def load(self, plan: Any, *, after: Sequence[Any], piecewise: Any, event: int) -> Any:
        """Copy weights up for a pass, each piece as soon as the same piece of `piecewise` is done.

        In the order of the calls, which is that of their uses.
        """
        ticket = self.loading.copy(plan, 0, list(after), piecewise, event)
        self.observer.submitted(Lane.UP, ticket, plan.nbytes)
        return ticket

    def update(self, *arguments: Any) -> Any:
        """`Pool.update` with its arguments."""
        return self._on_host(self.pool.update(*arguments))

    def fold(self, *arguments: Any) -> Any:
        """`Pool.fold` with its arguments."""
        return self._on_host(self.pool.fold(*arguments))

    def square_sums(self, *arguments: Any) -> Any:
        """`Pool.square_sums` with its arguments."""
        return self._on_host(self.pool.square_sums(*arguments))

    def checksums(self, *arguments: Any) -> Any:
        """`Pool.checksums` with its arguments."""
        return self._on_host(self.pool.checksums(*arguments))

    def _on_host(self, ticket: Any) -> Any:
        self.observer.submitted(Lane.HOST, ticket, 0)
        return ticket

    def raise_failures(self) -> None:
        """Raise TransferError when something that nobody waits for has failed; never waits."""
        for ticket, _ in self._held:
            if ticket.failed:
                wait(ticket, "a transfer", hint=_GO_BACK)

    def drain(self) -> None:
        """Wait for everything that was held.

        Raises:
            TransferError: The first failure, once.
        """
        held, self._held = self._held, []
        for ticket, _ in held:
            wait(ticket, "a transfer", hint=_GO_BACK)

    def close(self) -> None:
        """Stop the lanes; what is still queued fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for lane in (self.files, self.down, self.up, self.loading, self.pool):
            if lane is not None:
                lane.close()
        with contextlib.suppress(TransferError):
            self.drain()
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None
