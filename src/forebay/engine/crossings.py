"""Tensors that one segment of a forward makes and later ones use: each passes through a door.

Between blocks every function of torch is looked at: what it is given from an earlier segment goes
through its door first, so that encoder states, router logits and residuals that are added outside
of blocks may wait for their gradient until all later segments have gone back. Inside a block only
what the block was called with does.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_map

from forebay.engine.doors import Door, door_behind
from forebay.engine.reads import next_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Crossings"]

# They belong to the very tensor that they are called on.
_OF_THE_OBJECT = (torch.Tensor.register_hook, torch.Tensor.retain_grad)


class Crossings:
    """Those of one micro-batch; used in the thread of its forward alone.

    Attributes:
        doors: By segment, the doors through which its tensors leave.
        begins: Where each segment begins, in autograd's numbers.
    """

    def __init__(self) -> None:
        self.doors: list[list[Door]] = [[]]
        self.begins = [0]
        self._anchor = torch.empty(0, requires_grad=True)
        # As long as a tensor lives: the same values, as later segments use them.
        self._entered: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._mode = _Mode(self)

    @property
    def segment(self) -> int:
        """The one that runs."""
        return len(self.begins) - 1

    def begin_segment(self) -> None:
        """The next block is called."""
        self.begins.append(next_number())
        self.doors.append([])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward."""
        with self._mode:
            yield
        self._entered.clear()

    @contextlib.contextmanager
    def inside_block(self) -> Iterator[None]:
        """Around a block's call: nothing is looked at, and what compiles it sees no such mode."""
        with contextlib.ExitStack() as stack:
            if _get_current_function_mode() is self._mode:
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(self._mode.closed())
            yield

    def through(self, values: Any) -> Any:
        """A tree of values, with those of earlier segments as they are used in this one."""
        with self._mode.closed():
            return tree_map(self._through, values)

    def _through(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        while True:
            door = door_behind(value.grad_fn)
            if door is not None:
                door.use(self.segment)
                return value
            # What was written into since it entered belongs to the segment that wrote.
            known = self._entered.get(id(value))
            if known is None or known[0]() is not value:
                break
            value = known[1]
        made = bisect_right(self.begins, value.grad_fn._sequence_nr()) - 1
        return value if made >= self.segment else self._enter(value, made)

    def _enter(self, value: torch.Tensor, made: int) -> torch.Tensor:
        door = Door(value)
        door.use(self.segment)
        self.doors[made].append(door)
        entered = door.enter(value, anchor=self._anchor)
        key, known = id(value), self._entered

        def _forget(_dead: object) -> None:
            known.pop(key, None)

        known[key] = (weakref.ref(value, _forget), entered)
        return entered


class _Mode(TorchFunctionMode):
    """Hands what torch's functions are given to `Crossings`."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        # A proxy: else each would keep the other, and activations, for the garbage collector.
        self._crossings = weakref.proxy(crossings)
        self._is_open = True

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside it, nothing is handed on."""
        before, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `torch.overrides`."""
        del types
        kwargs = kwargs or {}
        # what is recomputed in backward is no part of the forward
        running = torch._C._current_graph_task_id() < 0
        if self._is_open and running and torch.is_grad_enabled() and func not in _OF_THE_OBJECT:
            args, kwargs = self._crossings.through((args, kwargs))
        return func(*args, **kwargs)
