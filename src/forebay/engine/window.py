"""The window: the backwards between two updates, and whether they all ended well.

It counts and judges; gradients themselves are the collector's business.

[Note: the end of a backward] A backward is open from the first graph task that touches it (a
hook on the root module's outputs, or the first gradient) until the end-of-task callbacks of all
such tasks have run. Reentrant checkpointing runs inner tasks with callbacks of their own, so
tasks are kept in a set; a task whose callback never runs has raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from forebay.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Window"]


class Window:
    """Counts backwards and knows when one failed.

    Args:
        expected: Backwards per update as far as known.
        on_begin: Called when a backward begins.
        on_end: Called when a backward has ended without an error.
    """

    def __init__(
        self, *, expected: int, on_begin: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.expected = expected
        self.backwards = 0
        # The most backwards that any window had whose boundary the caller did not own.
        self.learned = 0
        # True or False when the caller owns the boundary; None: count against `expected`.
        self.boundary: bool | None = None
        self._on_begin = on_begin
        self._on_end = on_end
        self._open: set[int] = set()
        self._spoiled = ""

    @property
    def is_last(self) -> bool:
        """Whether the present backward is the window's last, as far as known."""
        if self.boundary is not None:
            return self.boundary
        return self.backwards >= self.expected

    def touch(self) -> None:
        """Note that the running graph task contributes; call from inside backward."""
        task = torch._C._current_graph_task_id()
        if task in self._open or task < 0:
            return
        self.refuse_if_spoiled()
        if not self._open:
            self.backwards += 1
            self._on_begin()
        self._open.add(task)

        def _done() -> None:
            self._close(task)

        Variable._execution_engine.queue_callback(_done)

    def _close(self, task: int) -> None:
        if task not in self._open:
            return  # the window was reset in between
        self._open.remove(task)
        if not self._open:
            self._on_end()

    def spoil(self, reason: str) -> None:
        """Mark the window as unusable until `reset`."""
        self._spoiled = self._spoiled or reason

    def refuse_if_spoiled(self) -> None:
        """Raise GradientError when a backward of this window raised."""
        if self._spoiled:
            raise GradientError(
                f"this window's gradients are incomplete: {self._spoiled}",
                hint="call zero_grad() and repeat the window's backwards",
            )

    def seal(self) -> None:
        """End the window for a step.

        Raises:
            GradientError: A backward raised, or is still running.
        """
        if self._open:
            self.spoil("a backward raised before it ended")
        self.refuse_if_spoiled()

    def abandon_open(self, reason: str) -> None:
        """A backward is known to have raised; spoil the window if it had begun."""
        if self._open:
            self._open.clear()
            self.spoil(reason)

    def reset(self) -> None:
        """Begin a new window."""
        if self.boundary is None:
            self.learned = max(self.learned, self.backwards)
        self.backwards = 0
        self.boundary = None
        self._open.clear()
        self._spoiled = ""
