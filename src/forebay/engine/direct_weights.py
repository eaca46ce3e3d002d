"""Weights in files that go to the device by GPUDirect Storage, past host memory.

One thread reads a unit's parameters one after the other, each into its home. Nothing compares what
comes with the checksums in host memory; whoever chose this path says so.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Any

from forebay.plan.program import Lane, OpKind

if TYPE_CHECKING:
    from forebay.accelerators.base import Event
    from forebay.engine.part import PartStorage
    from forebay.links.direct_storage import DirectFile
    from forebay.links.lanes import Lanes

__all__ = ["DirectRead", "DirectWeights"]


class DirectRead:
    """A read under way: to those who wait it is a ticket like those of the native lanes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def settle(self) -> None:
        """Block until it is over, well or not; what went wrong is told to who needs the bytes."""
        wait([self._future])

    def wait(self, timeout_s: float = -1) -> bool:
        """Block until the bytes are on the device; False on time-out.

        Raises:
            RuntimeError: They did not come.
        """
        try:
            self._future.result(None if timeout_s < 0 else timeout_s)
        except LateError:
            return False
        except OSError as error:
            raise RuntimeError(str(error)) from error
        return True

    def wait_issued(self, timeout_s: float = -1) -> bool:
        """As `wait`: no stream carries it."""
        return self.wait(timeout_s)

    def stream_wait(self, stream: int) -> None:
        """Nothing: what was waited for is there."""
        del stream


class DirectWeights:
    """Reads parts.

    Args:
        lanes: Counts bytes, and tells the observer.
        file: Where weights are.
    """

    def __init__(self, lanes: Lanes, *, file: DirectFile) -> None:
        self._lanes = lanes
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-direct")

    def bring(self, part: PartStorage, *, name: str, event: Event) -> list[Any]:
        """Enqueue what fills a part's homes; returns the ticket of it."""
        self._lanes.observer.doing(OpKind.READ_WEIGHTS, name)
        self._lanes.traffic[Lane.READ] += part.dtype.itemsize * part.layout.parameter_elements
        ticket = DirectRead(self._thread.submit(self._read, part, event))
        part.direct_reads.append(ticket)
        return [ticket]

    def _read(self, part: PartStorage, event: Event) -> None:
        """In the thread."""
        state, home = part.weight_files, part.home
        assert state is not None
        assert home is not None
        # The allocator may have handed out memory that enqueued kernels still use.
        event.synchronize()
        for written in state.written:
            if written is not None:
                written.wait()
        for slot in part.layout.slots:
            if slot.elements:
                # Records of weights follow each other without a gap.
                offset = state.offset(0) + part.dtype.itemsize * slot.offset
                self._file.read(home.tensor(slot), offset=offset)

    def close(self) -> None:
        """Stop; what is still queued fails, since the space has closed the file. Idempotent."""
        self._thread.shutdown(cancel_futures=True)
