"""The window: the backwards between two updates, and whether they all ended well.

It counts and judges; gradients themselves are the collector's business.

[Note: the end of a backward] A backward is open from the first graph task that touches it (a
hook on the root module's outputs, or the first gradient) until the end-of-task callbacks of all
such tasks have run. Reentrant checkpointing runs inner tasks with callbacks of their own, so
tasks are kept in a dict. A task that raised never runs its callback; autograd then drops it, which
a weak reference shows. A task without a gradient (`autograd.grad` on the outputs) is no backward.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from forebay.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Window"]

# Stands for all tasks of a backward in several pieces; autograd's own numbers are not negative.
_WHOLE = -1


class _Task:
    """Ends with the graph task whose callback it is, run or not."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


class Window:
    """Counts backwards and knows when one failed.

    Args:
        expected: Backwards per update as far as known.
        on_open: Called when a graph task opens a backward, before its first gradient if a hook
            on the root's outputs heard of it.
        on_begin: Called at a backward's first gradient.
        on_end: Called when a backward with gradients has ended without an error.
        on_spoil: Called with the reason when the window cannot be used any more.
    """

    def __init__(
        self,
        *,
        expected: int,
        on_open: Callable[[], None],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        on_spoil: Callable[[str], None],
    ) -> None:
        self.expected = expected
        self.backwards = 0
        # The most backwards that any window had whose boundary the caller did not own.
        self.learned = 0
        # True or False when the caller owns the boundary; None: count against `expected`.
        self.boundary: bool | None = None
        self._on_open = on_open
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_spoil = on_spoil
        self._open: dict[int, weakref.ref[_Task]] = {}
        self._counted = False
        self._spoiled = ""

    @property
    def is_last(self) -> bool:
        """Whether the present backward is the window's last, as far as known."""
        if self.boundary is not None:
            return self.boundary
        return self.backwards >= self.expected

    @property
    def will_be_last(self) -> bool:
        """`is_last` of the present backward, or of the next one while none has a gradient."""
        if self.boundary is not None:
            return self.boundary
        return self.backwards + (not self._counted) >= self.expected

    def touch(self) -> None:
        """Note that the running graph task may contribute; call from inside backward."""
        task = torch._C._current_graph_task_id()
        if task in self._open or task < 0:
            return
        self.bury_dead()
        if not self._open:
            self._on_open()
        self.refuse_if_spoiled()

        def _done() -> None:
            self._close(task)

        callback = _Task(_done)
        self._open[task] = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    def count(self) -> None:
        """The running graph task brings a gradient; call from inside backward."""
        self.touch()
        if not self._counted:
            self._counted = True
            self.backwards += 1
            self._on_begin()

    @contextlib.contextmanager
    def spanning(self) -> Iterator[None]:
        """Inside it, all graph tasks are parts of one backward."""
        self.bury_dead()
        self._on_open()
        self.refuse_if_spoiled()
        whole = _Task(lambda: self._close(_WHOLE))
        self._open[_WHOLE] = weakref.ref(whole)
        yield
        whole()

    def _close(self, task: int) -> None:
        if self._open.pop(task, None) is None:
            return  # the window was reset in between
        if not self._open and self._counted:
            self._counted = False
            self._on_end()

    def bury_dead(self) -> None:
        """Spoil the window if a backward of it raised."""
        dead = [task for task, callback in self._open.items() if callback() is None]
        if dead:
            self.abandon_open("a backward raised before it ended")

    def spoil(self, reason: str) -> None:
        """Mark the window as unusable until `reset`."""
        self._spoiled = self._spoiled or reason
        self._on_spoil(reason)

    @property
    def spoiled(self) -> bool:
        """Whether the window cannot be used."""
        return bool(self._spoiled)

    def refuse_if_spoiled(self) -> None:
        """Raise GradientError when a backward of this window raised."""
        self.bury_dead()
        if self._spoiled:
            raise GradientError(
                f"this window's gradients are incomplete: {self._spoiled}",
                hint="call optimizer.zero_grad() and repeat the window's backwards",
            )

    def seal(self) -> None:
        """End the window for a step.

        Raises:
            GradientError: A backward raised, or is still running.
        """
        self.refuse_if_spoiled()
        if self._open:
            raise GradientError(
                "step() was called while a backward is running",
                hint="call step() after backward() has returned",
            )

    def abandon_open(self, reason: str) -> None:
        """A backward is known to have raised; spoil the window if it had begun."""
        if self._open:
            self._open.clear()
            self._counted = False
            self.spoil(reason)

    def reset(self) -> None:
        """Begin a new window."""
        if self.boundary is None and not self._spoiled:
            self.learned = max(self.learned, self.backwards)
        self.backwards = 0
        self.boundary = None
        self._open.clear()
        self._counted = False
        self._spoiled = ""
