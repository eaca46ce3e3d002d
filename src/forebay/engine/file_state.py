"""Master and moments of one part in a file: records, their checksums, single reads and writes.

Updates go through buffers (`engine.spool`); here is what else touches the state: the first
masters, checkpoints, state dicts, `safe_get_*`. They read and write ranges of one role in blocks
of a checksum; nobody holds a whole role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import TransferError
from forebay.plan.records import ROLES, SUM_ELEMENTS, records, sum_bytes
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role
from forebay.tiers.nvme import NvmeBytes, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.engine.file_space import FileSpace
    from forebay.plan.records import Record

__all__ = ["FileState"]

# 4 MiB at once, as much as the scratch holds.
_BLOCKS = 16


class FileState:
    """One shard's state in the files of a space.

    Args:
        elements: Elements of the shard.
        names: (name, offset, elements) of each parameter, for messages.
        piece_elements: Elements of a record.
        space: The files.

    Attributes:
        records: Its records, in order.
        written: The last write of each record; None before the first update.
        sums: Checksums by record, block and role, as int32.
        before_write: Called with a record's index before it is written here, so that no buffer
            keeps what it was.
    """

    def __init__(
        self,
        elements: int,
        *,
        names: Sequence[tuple[str, int, int]],
        piece_elements: int,
        space: FileSpace,
    ) -> None:
        self.records = records(elements, piece_elements=piece_elements)
        self.written: list[Any] = [None] * len(self.records)
        self.before_write: Callable[[FileState, int], None] | None = None
        self._names = tuple(names)
        self._space = space
        nbytes = sum(record.nbytes for record in self.records)
        what = f"state of {elements} parameters"
        self._bytes = NvmeBytes(
            space.ledger,
            {Role.HP_PARAMS: nbytes // 3, Role.OPTIM_STATES: nbytes // 3 * 2},
            what=what,
        )
        self._base = space.take(nbytes)
        self._sums = HostArena(
            sum_bytes(elements), ledger=space.ledger, role=Role.STAGING, what=f"sums of the {what}"
        )
        self.sums = self._sums.tensor(
            torch.int32, offset_bytes=0, elements=sum_bytes(elements) // 4
        )

    def offset(self, index: int) -> int:
        """Where a record begins in the files."""
        return self._base + self.records[index].offset

    def sums_address(self, index: int) -> int:
        """Address of a record's checksums."""
        return self._sums.address + 4 * self.records[index].first_sum

    def read(self, role: str, begin: int, end: int) -> torch.Tensor:
        """A copy of elements of a role, fp32.

        Raises:
            TransferError: They cannot be read, or are not what was written.
        """
        value = torch.empty(end - begin)
        with self._space.lock:
            for index, first, last in self._stretches(begin, end):
                held = self._load(index, ROLES.index(role), first, last)
                start = self.records[index].begin + first
                low, high = max(begin, start), min(end, start + held.numel())
                value[low - begin : high - begin] = held[low - start : high - start]
        return value

    def write(self, role: str, begin: int, values: torch.Tensor) -> None:
        """Write elements of a role; any dtype, any device.

        Raises:
            TransferError: They cannot be written.
        """
        number = ROLES.index(role)
        end = begin + values.numel()
        with self._space.lock:
            for index, first, last in self._stretches(begin, end):
                start = self.records[index].begin + first
                count = last - first
                low, high = max(begin, start), min(end, start + count)
                if self.before_write is not None:
                    self.before_write(self, index)
                whole = high - low == count
                held = self._scratch(count) if whole else self._load(index, number, first, last)
                held[low - start : high - start] = values[low - begin : high - begin]
                self._store(index, number, first, held)

    def begin(self, weights: torch.Tensor) -> None:
        """The state before the first update: masters are the weights, moments zero.

        Args:
            weights: The shard's weights, in the working dtype.
        """
        for start in range(0, weights.numel(), _BLOCKS * SUM_ELEMENTS):
            chunk = weights[start : start + _BLOCKS * SUM_ELEMENTS]
            self.write("master", start, chunk)
            zeros = torch.zeros(chunk.numel())
            self.write("exp_avg", start, zeros)
            self.write("exp_avg_sq", start, zeros)

    def close(self) -> None:
        """Give back what is counted; the space closes the files."""
        self._bytes.release()
        self._sums.close()
        self.sums = torch.empty(0, dtype=torch.int32)

    def _stretches(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(record, first, last) of whole blocks that cover a range; element numbers in records."""
        for index, record in enumerate(self.records):
            low, high = max(begin, record.begin), min(end, record.end)
            if low >= high:
                continue
            first = (low - record.begin) // SUM_ELEMENTS * SUM_ELEMENTS
            while record.begin + first < high:
                wanted = -(-(high - record.begin) // SUM_ELEMENTS) * SUM_ELEMENTS
                last = min(first + _BLOCKS * SUM_ELEMENTS, wanted, record.elements)
                yield index, first, last
                first = last

    def _scratch(self, elements: int) -> torch.Tensor:
        return self._space.scratch.tensor(torch.float32, offset_bytes=0, elements=elements)

    def _span(self, record: Record, index: int, role: int, first: int, elements: int) -> Any:
        offset = self.offset(index) + role * record.role_bytes + 4 * first
        return (offset, self._space.scratch.address, aligned(4 * elements))

    def _load(self, index: int, role: int, first: int, last: int) -> torch.Tensor:
        """Blocks of a record's role, in scratch, verified."""
        record = self.records[index]
        after = [] if self.written[index] is None else [self.written[index]]
        span = self._span(record, index, role, first, last - first)
        self._wait(self._space.link.read(span, after=after), record, role)
        held = self._scratch(last - first)
        for block in range(0, held.numel(), SUM_ELEMENTS):
            at = self._sum_index(record, role, first + block)
            now, then = self._sum(held[block : block + SUM_ELEMENTS]), int(self.sums[at])
            if now != then:
                raise TransferError(
                    f"{ROLES[role]} of {self._names_in(record.begin + first + block)} is not what "
                    f"was written: its CRC-32C is {now & 0xFFFFFFFF:08x}, and was "
                    f"{then & 0xFFFFFFFF:08x}",
                    hint="the drive returns wrong data; go back to the last checkpoint on another",
                )
        return held

    def _store(self, index: int, role: int, first: int, held: torch.Tensor) -> None:
        record = self.records[index]
        after = [] if self.written[index] is None else [self.written[index]]
        for block in range(0, held.numel(), SUM_ELEMENTS):
            at = self._sum_index(record, role, first + block)
            self.sums[at] = self._sum(held[block : block + SUM_ELEMENTS])
        span = self._span(record, index, role, first, held.numel())
        self._wait(self._space.link.write(span, after=after), record, role)

    def _sum(self, held: torch.Tensor) -> int:
        value = int(self._space.core.crc32c(held.data_ptr(), 4 * held.numel()))
        return value - (1 << 32) if value >> 31 else value

    @staticmethod
    def _sum_index(record: Record, role: int, element: int) -> int:
        return record.first_sum + element // SUM_ELEMENTS * len(ROLES) + role

    def _wait(self, ticket: Any, record: Record, role: int) -> None:
        try:
            ticket.wait()
        except RuntimeError as error:
            raise TransferError(
                f"{ROLES[role]} of {self._names_in(record.begin)} cannot be reached: {error}"
            ) from error

    def _names_in(self, begin: int) -> str:
        end = begin + SUM_ELEMENTS
        inside = [
            name for name, offset, count in self._names if offset < end and offset + count > begin
        ]
        return ", ".join(inside[:3]) or "padding"
