"""Writes down operations as they run: which storage has which value now."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from forebay.model.recipes import Operation, Place, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Note", "Notebook"]

_CONSTANT_BYTES: Final = 64 << 10
# Of one value: a table that is written row by row is kept instead.
_LONGEST: Final = 256
_FIRST_CLEANING: Final = 512

# They write every element of what they are called on, and read none.
_OVERWRITING: Final = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    }
)
# They change what memory a tensor has.
_MOVING: Final = frozenset({"resize_", "resize_as_", "set_", "swap"})


@dataclass(slots=True, eq=False)
class Note:
    """An operation that is about to run.

    Attributes:
        storages: Those of its arguments that recipes know.
        overwritten: Addresses of those that it writes wholly, without a look at them.
        written: Those that it writes.
        rng_state: The generator's state, where it draws.
        reads: What they hold, but for those overwritten; None where that is not known.
    """

    func: Any
    args: Any
    kwargs: Any
    storages: list[torch.UntypedStorage]
    written: dict[int, torch.UntypedStorage]
    overwritten: set[int]
    rng_state: torch.Tensor | None
    reads: tuple[Value, ...] | None


class Notebook:
    """What storages hold, as values that can be made again."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, int, Value | None]] = {}
        self._keys, self._orders = count(), count()
        self._clean_at = _FIRST_CLEANING

    def value_of(self, storage: torch.UntypedStorage) -> Value | None:
        """What a storage holds, or None where it cannot be made again."""
        known = self._values.get(storage._cdata)
        return None if known is None else known[2]

    def forget(self, storage: torch.UntypedStorage) -> None:
        """A storage's value cannot be made again after all."""
        self._set(storage, self._key(storage), None)

    def begin(self, func: Any, args: Any, kwargs: Any) -> Note:
        """Look at an operation before it runs."""
        tensors = [item for item in tree_leaves((args, kwargs)) if _is_plain(item)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        written = {
            t.untyped_storage()._cdata: t.untyped_storage() for t in _written(func, args, kwargs)
        }
        overwritten: set[int] = set()
        if func._schema.name.removeprefix("aten::") in _OVERWRITING and self._covers(args[0]):
            inside = [t for t in tensors[1:] if _same_storage(t, args[0])]
            if not inside:
                overwritten.add(args[0].untyped_storage()._cdata)
        values = [self._read(s) for key, s in storages.items() if key not in overwritten]
        reads = None if None in values else tuple(v for v in values if v is not None)
        generator = kwargs.get("generator")
        rng_state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            rng_state = torch.get_rng_state() if generator is None else generator.get_state()
        if not _is_repeatable(func):  # a collective, say, whose schema does not tell what it writes
            reads, written = None, storages
        return Note(
            func, args, kwargs, list(storages.values()), written, overwritten, rng_state, reads
        )

    def end(self, note: Note, results: Any) -> None:
        """The operation has run: what it wrote has new values."""
        known = {storage._cdata for storage in note.storages}
        leaves = tree_leaves(results)
        made: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for position, leaf in enumerate(leaves):
            if _is_plain(leaf) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                made.setdefault(storage._cdata, (position, storage))
        if not made and not note.written:
            return
        new = {key: next(self._keys) for key in made}
        reads = note.reads or ()
        operations = len(reads) + max((value.operations for value in reads), default=1)
        operation = None
        if note.reads is not None and operations <= _LONGEST:
            args, kwargs = tree_map(self._placed, (note.args, note.kwargs))
            operation = Operation(
                next(self._orders),
                note.func,
                args,
                kwargs,
                note.rng_state,
                note.reads,
                tuple((position, new[key]) for key, (position, _) in made.items()),
            )
        for storage in note.written.values():
            self._wrote(storage, self._key(storage), operation, operations)
        for key, (_, storage) in made.items():
            self._wrote(storage, new[key], operation, operations)

    def _wrote(
        self,
        storage: torch.UntypedStorage,
        key: int,
        operation: Operation | None,
        operations: int,
    ) -> None:
        value = None
        if operation is not None:
            value = Value(key, storage.nbytes(), operation, operations=operations)
        self._set(storage, key, value)

    def _read(self, storage: torch.UntypedStorage) -> Value | None:
        """What a storage holds; of one that is new here a copy, if it is small."""
        if storage._cdata not in self._values:
            value = None
            if storage.nbytes() <= _CONSTANT_BYTES:
                held = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
                value = Value(self._key(storage), storage.nbytes(), constant=held)
            self._set(storage, self._key(storage), value)
        return self._values[storage._cdata][2]

    def _key(self, storage: torch.UntypedStorage) -> int:
        known = self._values.get(storage._cdata)
        if known is None:
            self._set(storage, next(self._keys), None)
            known = self._values[storage._cdata]
        return known[1]

    def _set(self, storage: torch.UntypedStorage, key: int, value: Value | None) -> None:
        known = self._values.get(storage._cdata)
        ref = StorageWeakRef(storage) if known is None else known[0]
        self._values[storage._cdata] = ref, key, value
        if len(self._values) >= self._clean_at:
            for address in [a for a, (r, _, _) in self._values.items() if r.expired()]:
                del self._values[address]
            self._clean_at = 2 * len(self._values) + _FIRST_CLEANING

    def _covers(self, tensor: Any) -> bool:
        """Whether a tensor is all of its storage, each byte once."""
        if not _is_plain(tensor) or not tensor.is_contiguous():
            return False
        storage = tensor.untyped_storage()
        value = self.value_of(storage)  # one that has given its memory back has no size
        return bool(tensor.nbytes == (storage.nbytes() if value is None else value.nbytes))

    def _placed(self, item: Any) -> Any:
        return Place.of(item, self._key(item.untyped_storage())) if _is_plain(item) else item


def _is_plain(item: Any) -> bool:
    return (
        type(item) in (torch.Tensor, torch.nn.Parameter)
        and item.device.type == "cpu"
        and item.layout is torch.strided
        and not item.is_quantized
    )


def _is_repeatable(func: Any) -> bool:
    name = func._schema.name
    return name.startswith("aten::") and name.removeprefix("aten::") not in _MOVING


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (item for item in tree_leaves(given) if _is_plain(item))


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
