"""What one engine keeps in files: the store, the link to it, and the scratch for single reads.

It is made before the parts, which take their ranges from it. What a range holds is theirs.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.hardware.storage import storage_of
from forebay.links.host_nvme import FileAccess, FileLink
from forebay.plan.file_places import FileWants
from forebay.plan.memory import SCRATCH_BYTES
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role
from forebay.tiers.nvme import NvmeStore

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.links.direct_storage import DirectFile, DirectStorage
    from forebay.tiers.ledger import Ledger

_log = logging.getLogger("forebay")

_DIRECT = "weights in files go to the device by GPUDirect Storage, their checksums not compared"
_BOUNCED = "weights in files go to the device through host memory, their checksums compared"

__all__ = ["FileSpace", "NvmeOptions", "WeightBuffers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBuffers:
    """Weights in files, as an engine is asked for them.

    Attributes:
        count: Pieces that are in host memory at once.
        elements: Elements of a piece, rounded down to a multiple of 64 Ki; None for what the host
            budget allows, at most 4 Mi.
        in_memory_elements: Elements of weights that stay in host memory, the forward's first ones,
            as far as the host budget has room for them.
    """

    count: int = 5
    elements: int | None = None
    in_memory_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """State in files, as an engine is asked for it.

    Attributes:
        paths: Folders; several are one striped space.
        access: How the files are read and written.
        buffer_count: Pieces that are in host memory at once.
        buffer_elements: Elements of a piece, rounded down to a multiple of 64 Ki; None for what
            the host budget (without one, the machine) allows, at most 4 Mi.
        reads_ahead: Whether pieces are read while others are updated.
        writes_behind: Whether pieces are read before the one before them is written.
        budget: Bytes that may be placed in files; None for what the disk has.
        weights: What weights in files pass through, where they are asked for.
        direct: How they go to the device past host memory; None asks the machine.
    """

    paths: tuple[Path, ...]
    access: FileAccess = field(default_factory=FileAccess)
    buffer_count: int = 4
    buffer_elements: int | None = None
    reads_ahead: bool = True
    writes_behind: bool = True
    budget: int | None = None
    weights: WeightBuffers = WeightBuffers()
    direct: DirectStorage | None = None

    @property
    def wants(self) -> FileWants:
        """What bears on which units are in files."""
        return FileWants(
            buffer_count=self.buffer_count,
            buffer_elements=self.buffer_elements,
            reads_ahead=self.reads_ahead,
            writes_behind=self.writes_behind,
            weight_buffer_count=self.weights.count,
            weight_elements=self.weights.elements,
            weights_in_memory_elements=self.weights.in_memory_elements,
        )


class FileSpace:
    """Files, link and scratch of one engine.

    Args:
        options: Where and how.
        nbytes: Bytes that parts will take.
        ledger: Where scratch is counted.
        core: The native core or its fallback.
        direct: How weights in them go to the device; None where there are none.

    Attributes:
        core: The native core.
        link: What moves bytes.
        scratch: Host memory for reads and writes outside of updates; hold `lock` to use it.
        direct: The file to read weights from past host memory; None where they pass through it.

    Raises:
        StorageError: A folder cannot be used or has no room.
    """

    def __init__(
        self,
        options: NvmeOptions,
        *,
        nbytes: int,
        ledger: Ledger,
        core: Any,
        direct: DirectStorage | None = None,
    ) -> None:
        self.core = core
        self.ledger = ledger
        opens = direct is not None and direct.library is not None and len(options.paths) == 1
        self._store = NvmeStore(
            options.paths,
            nbytes=nbytes,
            stripe_bytes=options.access.block_bytes,
            core=core,
            also_open=direct.open if direct is not None and opens else None,
        )
        for path in options.paths:
            for fault in storage_of(path).faults():
                _log.warning("state goes to %s: %s", path, fault)
        self.direct: DirectFile | None = next(iter(self._store.also_opened), None)
        if direct is not None:
            reason = direct.reason if len(options.paths) == 1 else "several folders are one set"
            _log.info("%s: %s", _DIRECT if opens else _BOUNCED, reason)
        self.link = FileLink(core, self._store.files, access=options.access)
        self.scratch = HostArena(
            SCRATCH_BYTES, ledger=ledger, role=Role.STAGING, what="single reads of state in files"
        )
        self.lock = threading.RLock()

    def take(self, nbytes: int) -> int:
        """The offset of the next range."""
        return self._store.take(nbytes)

    def close(self) -> None:
        """Stop the link and let go of the files. Idempotent."""
        if self.direct is not None:
            self.direct.close()
        self.link.close()
        self._store.close()
        self.scratch.close()
