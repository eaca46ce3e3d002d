"""Master and moments of one part, or its weights, in a file: records, checksums, single accesses.

Updates and loads go through buffers (`engine.spool`, `engine.weight_spool`); here is what else
touches the files: first values, checkpoints, state dicts, `safe_get_*`. They read and write ranges
of one role in blocks of a checksum; nobody holds a whole role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import TransferError
from forebay.links.host_nvme import Urgency
from forebay.plan.records import STATE, SUM_ELEMENTS, RecordForm, records, sum_bytes
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role
from forebay.tiers.nvme import NvmeBytes, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.engine.file_space import FileSpace
    from forebay.engine.held_records import HeldRecords
    from forebay.plan.records import Record

__all__ = ["FileState"]

# 4 MiB at once, as much as the scratch holds.
_BLOCKS = 16
_LOST_ON_DRIVE = "the drive returns wrong data; go back to the last checkpoint on another"
_LOST_IN_MEMORY = "host memory changed by itself; go back to the last checkpoint elsewhere"
# What the ledger calls each role.
_TIER_ROLES = {
    "master": Role.HP_PARAMS,
    "exp_avg": Role.OPTIM_STATES,
    "exp_avg_sq": Role.OPTIM_STATES,
    "weight": Role.LP_PARAMS,
}


class FileState:
    """One shard's state, or its weights, in the files of a space.

    Args:
        elements: Elements of the shard.
        names: (name, offset, elements) of each parameter, for messages.
        piece_elements: Elements of a record.
        space: The files.
        form: What a record holds.
        held: The first records, where they stay in memory; closed with the rest.

    Attributes:
        dtype: Of every role.
        records: Its records, in order.
        held: How many of them stay in memory.
        written: The last write of each record, or the last update of one that stays in memory; None
            before the first update.
        sums: Checksums by record, block and role, as int32.
        before_write: Called with a record's index before it is written here, so that no buffer
            keeps what it was and nobody uses it meanwhile.
    """

    def __init__(
        self,
        elements: int,
        *,
        names: Sequence[tuple[str, int, int]],
        piece_elements: int,
        space: FileSpace,
        form: RecordForm = STATE,
        held: HeldRecords | None = None,
    ) -> None:
        self._roles, self._item = form.roles, form.item_bytes
        self.dtype: torch.dtype = getattr(torch, form.dtype)
        self.records = records(elements, piece_elements=piece_elements, form=form)
        self.written: list[Any] = [None] * len(self.records)
        self.before_write: Callable[[FileState, int], None] | None = None
        self._names = tuple(names)
        self._names_of: dict[int, list[str]] = {}
        self._space = space
        self._held = held
        self.held = 0 if held is None else len(held)
        nbytes = sum(record.nbytes for record in self.records[self.held :])
        what = f"{' and '.join(form.roles)} of {elements} parameters"
        share: dict[Role, int] = {}
        for role in form.roles:
            counted = share.get(_TIER_ROLES[role], 0)
            share[_TIER_ROLES[role]] = counted + nbytes // len(form.roles)
        self._bytes = NvmeBytes(space.ledger, share, what=what)
        self._base = space.take(nbytes) - (0 if held is None else held.file_bytes)
        room = sum_bytes(elements, form)
        self._sums = HostArena(room, ledger=space.ledger, role=Role.STAGING, what=f"sums of {what}")
        self.sums = self._sums.tensor(torch.int32, offset_bytes=0, elements=room // 4)
        # Blocks that were never written read as zeros.
        self._blank = set(range(room // 4))

    def offset(self, index: int) -> int:
        """Where a record begins in the files, unless it stays in memory."""
        return self._base + self.records[index].offset

    def held_address(self, index: int) -> int:
        """Where a record begins that stays in memory."""
        assert self._held is not None
        return self._held.address(index)

    def sums_address(self, index: int) -> int:
        """Address of a record's checksums."""
        return self._sums.address + 4 * self.records[index].first_sum

    def read(self, role: str, begin: int, end: int) -> torch.Tensor:
        """A copy of elements of a role.

        Raises:
            TransferError: They cannot be read, or are not what was written.
        """
        value = torch.empty(end - begin, dtype=self.dtype)
        with self._space.lock:
            for index, first, last in self._stretches(begin, end):
                held = self._load(index, self._roles.index(role), first, last)
                start = self.records[index].begin + first
                low, high = max(begin, start), min(end, start + held.numel())
                value[low - begin : high - begin] = held[low - start : high - start]
        return value

    def write(self, role: str, begin: int, values: torch.Tensor) -> None:
        """Write elements of a role; any dtype, any device.

        Raises:
            TransferError: They cannot be written.
        """
        number = self._roles.index(role)
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

    def begin(self, weights: Callable[[int, int], torch.Tensor], *, elements: int) -> None:
        """The state before the first update: masters are the weights, moments zero.

        Args:
            weights: Reads a range of the shard's weights.
            elements: How many there are.
        """
        for start in range(0, elements, _BLOCKS * SUM_ELEMENTS):
            chunk = weights(start, min(start + _BLOCKS * SUM_ELEMENTS, elements))
            self.write("master", start, chunk)
            zeros = torch.zeros(chunk.numel())
            self.write("exp_avg", start, zeros)
            self.write("exp_avg_sq", start, zeros)

    def fill_blanks(self) -> None:
        """Write what was never written, so that every record can be read whole: padding."""
        with self._space.lock:
            for index, record in enumerate(self.records):
                for first in range(0, record.elements, SUM_ELEMENTS):
                    last = min(first + SUM_ELEMENTS, record.elements)
                    for number in range(len(self._roles)):
                        if self._sum_index(record, number, first) in self._blank:
                            self._store(index, number, first, self._scratch(last - first).zero_())

    def names_of(self, index: int) -> list[str]:
        """What each block of a record holds, for messages."""
        known = self._names_of.get(index)
        if known is None:
            record = self.records[index]
            known = self._names_of[index] = [
                f"{self._roles[0]} of {self._names_in(begin)}"
                for begin in range(record.begin, record.end, SUM_ELEMENTS)
            ]
        return known

    def close(self) -> None:
        """Give back what is counted; the space closes the files."""
        self._bytes.release()
        self._sums.close()
        if self._held is not None:
            self._held.close()
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
        return self._space.scratch.tensor(self.dtype, offset_bytes=0, elements=elements)

    def _span(self, record: Record, index: int, role: int, first: int, elements: int) -> Any:
        offset = self.offset(index) + role * record.role_bytes + self._item * first
        return (offset, self._space.scratch.address, aligned(self._item * elements))

    def _load(self, index: int, role: int, first: int, last: int) -> torch.Tensor:
        """Blocks of a record's role, in scratch or where they stay in memory, verified."""
        record, written = self.records[index], self.written[index]
        if self._held is not None and index < self.held:
            if written is not None:
                self._wait(written, record, role)
            held = self._held.role(index, role, first=first, last=last)
        else:
            span = self._span(record, index, role, first, last - first)
            after = [] if written is None else [written]
            ticket = self._space.link.read(span, after=after, urgency=Urgency.WAITED_FOR)
            self._wait(ticket, record, role)
            held = self._scratch(last - first)
        for block in range(0, held.numel(), SUM_ELEMENTS):
            at = self._sum_index(record, role, first + block)
            if at in self._blank:
                held[block : block + SUM_ELEMENTS].zero_()
                continue
            now, then = self._sum(held[block : block + SUM_ELEMENTS]), int(self.sums[at])
            if now != then:
                names = self._names_in(record.begin + first + block)
                raise TransferError(
                    f"{self._roles[role]} of {names} is not what "
                    f"was written: its CRC-32C is {now & 0xFFFFFFFF:08x}, and was "
                    f"{then & 0xFFFFFFFF:08x}",
                    hint=_LOST_IN_MEMORY if index < self.held else _LOST_ON_DRIVE,
                )
        return held

    def _store(self, index: int, role: int, first: int, held: torch.Tensor) -> None:
        record, written = self.records[index], self.written[index]
        after = [] if written is None else [written]
        for block in range(0, held.numel(), SUM_ELEMENTS):
            at = self._sum_index(record, role, first + block)
            self.sums[at] = self._sum(held[block : block + SUM_ELEMENTS])
            self._blank.discard(at)
        if self._held is not None and index < self.held:
            if written is not None:
                self._wait(written, record, role)
            self._held.role(index, role, first=first, last=first + held.numel()).copy_(held)
            return
        span = self._span(record, index, role, first, held.numel())
        self._wait(self._space.link.write(span, after=after), record, role)

    def _sum(self, held: torch.Tensor) -> int:
        value = int(self._space.core.crc32c(held.data_ptr(), self._item * held.numel()))
        return value - (1 << 32) if value >> 31 else value

    def _sum_index(self, record: Record, role: int, element: int) -> int:
        return record.first_sum + element // SUM_ELEMENTS * len(self._roles) + role

    def _wait(self, ticket: Any, record: Record, role: int) -> None:
        try:
            ticket.wait()
        except RuntimeError as error:
            raise TransferError(
                f"{self._roles[role]} of {self._names_in(record.begin)} cannot be reached: {error}"
            ) from error

    def _names_in(self, begin: int) -> str:
        end = begin + SUM_ELEMENTS
        inside = [
            name for name, offset, count in self._names if offset < end and offset + count > begin
        ]
        return ", ".join(inside[:3]) or "padding"
