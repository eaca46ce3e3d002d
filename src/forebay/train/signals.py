"""Ctrl-C and SIGTERM: the first ends the run after the step that is going on, the second at once.

Before the first step there is nothing to save, so there the first one ends the run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = ["Interrupted", "StopSignals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run before its first step.

    Attributes:
        signum: Which one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Catches both signals while the context is open; in threads other than the main one, none.

    Args:
        on_request: Called once, in the handler, with the signal's name.
        settle_seconds: How long after the first signal another one means the same request.

    Attributes:
        requested: The signal that asked for an end, or None.
    """

    def __init__(self, on_request: Callable[[str], None], *, settle_seconds: float = 0.0) -> None:
        self.requested: signal.Signals | None = None
        self._settle_seconds = settle_seconds
        self._requested_at = 0.0
        self._on_request = on_request
        self._deferring = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def defer(self) -> None:
        """From now on the first signal only sets `requested`: a step must not be torn apart."""
        self._deferring = True

    def is_requested(self) -> bool:
        """Whether a signal asked for an end."""
        return self.requested is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.requested is not None:
            if time.monotonic() - self._requested_at < self._settle_seconds:
                return
            # Dies of the signal itself, so that shells and schedulers see what happened.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if not self._deferring:
            raise Interrupted(signum)
        self.requested, self._requested_at = signal.Signals(signum), time.monotonic()
        self._on_request(self.requested.name)
