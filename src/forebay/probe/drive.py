"""One path, read and written by the file queue that training uses, for a while.

The file has no name and its space is reserved first, so nothing is left and a write never waits
for the file system to find room.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.links.host_nvme import FileLink
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role
from forebay.tiers.nvme import NvmeStore

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.links.host_nvme import FileAccess

__all__ = ["Drive", "Moved"]

_BUFFER: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a transfer took.

    Attributes:
        nbytes: How much.
        seconds: Until the last completion.
        cpu_seconds: Processor time of this process, all threads.
        backend: What carried it.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    backend: str

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    @property
    def cores_per_gigabyte_second(self) -> float:
        """Processor time per GB: the share of a core that a GB/s takes."""
        return self.cpu_seconds / (self.nbytes / 1e9)


class Drive:
    """A file of some size on a path, and memory to move it through.

    Args:
        path: A folder.
        nbytes: Size of the file, a multiple of 1 MiB.
        core: The native core.

    Raises:
        StorageError: The folder cannot be used or has no room.
    """

    def __init__(self, path: Path, *, nbytes: int, core: Any) -> None:
        self.nbytes = nbytes
        self._core = core
        self._store = NvmeStore([path], nbytes=nbytes, stripe_bytes=1 << 20, core=core)
        self.is_direct = self._store.is_direct
        self._arena = HostArena(
            min(_BUFFER, nbytes), ledger=Ledger(), role=Role.STAGING, what="a drive's measurement"
        )
        noise = bytearray(os.urandom(1 << 20))  # a drive must not make it smaller
        view = self._arena.tensor(torch.uint8, offset_bytes=0, elements=self._arena.nbytes)
        for start in range(0, view.numel(), len(noise)):
            piece = view[start : start + len(noise)]
            piece.copy_(torch.frombuffer(noise, dtype=torch.uint8)[: piece.numel()])

    def move(self, action: str, access: FileAccess, *, nbytes: int) -> Moved:
        """Read or write the first `nbytes` of the file, in order, as one transfer.

        Args:
            action: "read" or "write".
            access: How.
            nbytes: At most the file's size.
        """
        link = FileLink(self._core, self._store.files, access=access)
        try:
            chunk = self._arena.nbytes
            spans = [
                (at, self._arena.address, min(chunk, nbytes - at)) for at in range(0, nbytes, chunk)
            ]
            transfer = link.read if action == "read" else link.write
            began, cpu = time.perf_counter(), time.process_time()
            tickets = [transfer(span) for span in spans]
            for ticket in tickets:
                ticket.wait()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        finally:
            link.close()
        return Moved(nbytes=nbytes, seconds=seconds, cpu_seconds=cpu, backend=link.backend)

    def exchange(self, access: FileAccess) -> float:
        """Read half of the file while the other half is written: bytes per second each way."""
        link = FileLink(self._core, self._store.files, access=access)
        half = self.nbytes // 2 // (1 << 20) << 20
        size = min(self._arena.nbytes // 2, half)
        try:
            began = time.perf_counter()
            tickets = []
            for at in range(0, half, size):
                count = min(size, half - at)
                tickets.append(link.read((at, self._arena.address, count)))
                tickets.append(link.write((half + at, self._arena.address + size, count)))
            for ticket in tickets:
                ticket.wait()
            return half / (time.perf_counter() - began)
        finally:
            link.close()

    def close(self) -> None:
        """Give file and memory back."""
        self._store.close()
        self._arena.close()
