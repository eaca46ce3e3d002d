"""How a tensor's value came about, kept so that it can be made again to the bit.

A recipe is a graph of the operations that led to a value, with the state that the random generator
had before each of them that draws numbers. It holds no memory of the value itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["EMPTY", "Operation", "Place", "Recipe", "Value"]

_aten = torch.ops.aten

# They allocate and write nothing: to run them again is to have memory.
EMPTY: Final = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a storage.

    Attributes:
        key: Which storage.
        dtype: Of its elements, as `size`, `stride` and `offset` count them.
    """

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, key: int) -> Place:
        """A tensor's place, in a storage known as `key`."""
        return cls(
            key, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor at this place of a storage."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call that wrote into storages.

    Attributes:
        order: Its number among all that were recorded.
        func: What was called.
        args: Its arguments; tensors are places.
        kwargs: The same.
        rng_state: The generator's state before it, where it draws.
        reads: What the storages that it reads, or writes in part, held before it.
        made: (position among the results, storage) of storages that it made.
    """

    order: int
    func: Any
    args: Any
    kwargs: Any
    rng_state: torch.Tensor | None
    reads: tuple[Value, ...]
    made: tuple[tuple[int, int], ...]

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Do it again over these storages; new ones are added to them."""

        def _tensor(item: Any) -> Any:
            return item.over(storages[item.key]) if isinstance(item, Place) else item

        args, kwargs = tree_map(_tensor, self.args), tree_map(_tensor, self.kwargs)
        if self.rng_state is None:
            results = self.func(*args, **kwargs)
        elif kwargs.get("generator") is not None:
            generator = torch.Generator()
            generator.set_state(self.rng_state)
            results = self.func(*args, **{**kwargs, "generator": generator})
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.rng_state)
                results = self.func(*args, **kwargs)
        leaves = tree_leaves(results)
        for position, key in self.made:
            storages[key] = leaves[position].untyped_storage()


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What a storage held at one moment.

    Attributes:
        key: Which storage.
        nbytes: Its size.
        operation: The last that wrote it; None where it is a constant.
        constant: Its bytes, where no operation made them.
        operations: How many operations lead to it at most.
    """

    key: int
    nbytes: int
    operation: Operation | None = None
    constant: torch.Tensor | None = None
    operations: int = 0

    def _history(self) -> tuple[list[Operation], dict[int, Value]]:
        """The operations that lead here, in order, and the storages that they work on."""
        operations: dict[int, Operation] = {}
        values: dict[int, Value] = {}
        waiting = [self]
        while waiting:
            value = waiting.pop()
            if value.constant is not None or value.key not in values:
                values[value.key] = value
            found = value.operation
            if found is not None and found.order not in operations:
                operations[found.order] = found
                waiting += found.reads
        return [operations[order] for order in sorted(operations)], values

    @property
    def is_one_draw(self) -> bool:
        """Whether nothing but its memory and one operation over all of it is behind it."""
        operations, values = self._history()
        if any(value.constant is not None for value in values.values()):
            return False
        return sum(operation.func not in EMPTY for operation in operations) <= 1

    def make(self, into: torch.UntypedStorage) -> None:
        """Write the value into a storage of its size; the random generator stays as it is."""
        operations, values = self._history()
        storages = {
            key: torch.UntypedStorage(value.nbytes)
            for key, value in values.items()
            if key != self.key
        }
        storages[self.key] = into
        for key, value in values.items():
            if value.constant is not None:
                storages[key].copy_(value.constant.untyped_storage())
        with torch.no_grad():
            for operation in operations:
                if operation.func not in EMPTY:
                    operation.run(storages)
        made = storages[self.key]
        if made is not into:
            into.copy_(made)

    def fingerprint(self) -> str:
        """Equal on two ranks that made the value alike."""
        operations, values = self._history()
        names: dict[int, int] = {}
        total = hashlib.sha256()

        def _plain(item: Any) -> Any:
            if isinstance(item, Place):
                number = names.setdefault(item.key, len(names))
                return (number, str(item.dtype), item.size, item.stride, item.offset)
            return "a generator" if isinstance(item, torch.Generator) else item

        for operation in operations:
            told = tree_map(_plain, (operation.args, operation.kwargs))
            total.update(f"{operation.func} {told}".encode())
            if operation.rng_state is not None:
                total.update(operation.rng_state.numpy().tobytes())
        for value in values.values():
            if value.constant is not None:
                total.update(value.constant.numpy().tobytes())
        return total.hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A tensor's value: a storage's, and where in it the tensor lies."""

    value: Value
    place: Place

    @property
    def size(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.place.size

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides, in elements."""
        return self.place.stride

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.place.dtype

    def make(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        storage = torch.UntypedStorage(self.value.nbytes)
        self.value.make(storage)
        return self.place.over(storage)

    def fingerprint(self) -> str:
        """As `Value.fingerprint`."""
        return self.value.fingerprint()
