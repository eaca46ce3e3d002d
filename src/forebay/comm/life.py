"""Signs of life in the store that the ranks share: who is there, and what each is doing.

Collectives say that something failed, not whose fault it is. So each rank leaves a count that
grows every second, and a sentence about what it is doing; whoever waits in vain reads them.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from forebay.errors import RankError
from forebay.hardware.thread_limit import starting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Life"]

_BEAT_SECONDS: Final = 1.0
# Without a sign for so long a rank is gone; a thread beside a busy main thread is never so late.
_SILENCE_SECONDS: Final = 12.0
# After a collective has failed the culprit is looked for at once.
_LOOK_SECONDS: Final = 4.0
_VERDICT: Final = "verdict"
# After one of these a rank looks no more.
_LAST_SIGNS: Final = ("found", "failed", "closed")
_EQUAL: Final = (
    "every rank makes the same number of passes of the same kind; give all of them equally many "
    "batches"
)


class Life:
    """One rank's signs, and its view of the others'.

    Args:
        store: `torch.distributed`'s store, under a prefix of this engine's own.
        rank: This rank.
        size: Number of ranks.
        clock: For tests.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._clock = clock
        self._doing = "start"
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._has_failed = False
        self._has_found = False
        self._stop = threading.Event()
        self._write("doing", self._doing)
        self._write("beat", "0")
        self._thread = threading.Thread(target=self._beat, name="forebay-life", daemon=True)
        with starting("the exchange between ranks"):
            self._thread.start()

    def _write(self, what: str, text: str) -> None:
        self._store.set(f"{what}/{self._rank}", text)

    def _read(self, what: str, rank: int) -> bytes:
        key = f"{what}/{rank}"
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(_BEAT_SECONDS):
            count += 1
            try:
                self._write("beat", str(count))
            except RuntimeError:  # the store is gone; whoever waits will see it
                return

    def doing(self, what: str) -> None:
        """Note what this rank does next."""
        self._doing = what
        try:
            self._write("doing", what)
        except RuntimeError as error:
            raise self._storeless() from error

    def fail(self, reason: str) -> None:
        """Let the others know that this rank has failed."""
        if self._has_failed:
            return
        self._has_failed = True
        try:
            self._write("failed", reason.splitlines()[0] if reason else "unknown")
        except RuntimeError:
            return
        self.found()

    def found(self) -> None:
        """This rank knows that it cannot go on: before it ends, the others must find out too.

        Rank 0 may keep the store in which they look. Those that live look at other moments, up to
        a silence later than this rank.
        """
        if self._has_found:
            return
        self._has_found = True
        try:
            self._write("found", "1")
            if self._rank == 0:
                self._linger()
        except RuntimeError:
            return

    def _linger(self) -> None:
        until = self._clock() + _LOOK_SECONDS + _SILENCE_SECONDS
        left = set(self._others())
        while left and self._clock() < until:
            left -= {r for r in left if any(self._read(sign, r) for sign in _LAST_SIGNS)}
            left -= {r for r in left if self._silent_seconds(r) > _SILENCE_SECONDS}
            time.sleep(0.05)

    def check(self) -> None:
        """`look`, and what it raises is the end of this rank's work."""
        try:
            self.look()
        except RankError:
            self.found()
            raise

    def look(self) -> None:
        """Raise RankError when another rank has failed or shows no sign of life."""
        try:
            self._raise_verdict()
            for rank in self._others():
                self._check_one(rank)
        except RankError:
            raise
        except RuntimeError as error:
            raise self._storeless() from error

    def _check_one(self, rank: int) -> None:
        failed = self._read("failed", rank)
        if failed:
            raise RankError(
                f"rank {rank} of {self._size} failed: {failed.decode()}",
                hint="its own message says more; all ranks start again from the last checkpoint",
            )
        silent = self._silent_seconds(rank)
        if silent > _SILENCE_SECONDS:
            raise self._gone(rank, silent)

    def _silent_seconds(self, rank: int) -> float:
        beat, now = self._read("beat", rank), self._clock()
        heard, at = self._heard.get(rank, (b"", now))
        if beat != heard or rank not in self._heard:
            self._heard[rank] = (beat, now)
            return 0.0
        return now - at

    def _gone(self, rank: int, silent: float) -> RankError:
        last = self.doings(rank)
        closed = self._read("closed", rank).decode()
        what = "has ended" if closed else f"is gone (no sign of life for {silent:.0f} s)"
        return RankError(
            f"rank {rank} of {self._size} {what}, its last pass was {last}; this rank "
            f"({self._rank}) is in {self._doing}",
            hint="look at that rank's own output; all ranks start again from the last checkpoint",
        )

    def doings(self, rank: int) -> str:
        """What a rank said last that it does."""
        return self._read("doing", rank).decode() or "start"

    def explain(self, error: BaseException, *, what: str) -> RankError:
        """Who is to blame for a collective that failed in `what`; takes some seconds."""
        try:
            culprit = self._find_culprit(error, what)
        except RankError as found:
            culprit = found
        except RuntimeError:
            return self._storeless()
        self.found()
        return culprit

    def _find_culprit(self, error: BaseException, what: str) -> RankError:
        before = {rank: self._read("beat", rank) for rank in self._others()}
        began = self._clock()
        while self._clock() - began < _LOOK_SECONDS:
            self._raise_verdict()
            for rank in self._others():
                if self._read("failed", rank) or self._read("closed", rank):
                    self._check_one(rank)
                    raise self._gone(rank, self._clock() - began)
            time.sleep(0.2)
        silent = [rank for rank, beat in before.items() if self._read("beat", rank) == beat]
        if silent:
            raise self._gone(silent[0], _LOOK_SECONDS)
        late = [rank for rank in self._others() if self.doings(rank) != what]
        if late:
            self._give_verdict(late, what=what, hint=_EQUAL)
        return RankError(f"the exchange in {what} failed on rank {self._rank}: {error}")

    def late(self, ranks: Sequence[int], *, what: str, hint: str) -> RankError:
        """These live and have not come to `what` in time: from now on all ranks raise that.

        Args:
            ranks: Who has not come.
            what: Where to.
            hint: What every rank should do.
        """
        try:
            self._give_verdict(ranks, what=what, hint=hint)
        except RankError as found:
            self.found()
            return found

    def _give_verdict(self, late: Sequence[int], *, what: str, hint: str) -> NoReturn:
        """Raises the first one that a rank has given, which may be another."""
        doings = {rank: self.doings(rank) for rank in late}
        verdict = json.dumps({"what": what, "late": doings, "hint": hint})
        self._store.compare_set(_VERDICT, "", verdict)
        self._raise_verdict()
        raise AssertionError(verdict)

    def _raise_verdict(self) -> None:
        """Raise what the first rank that waited in vain has found, on all ranks alike.

        Without it the late rank would find that the others have failed, and blame them.
        """
        if not self._store.check([_VERDICT]):
            return
        verdict = json.loads(bytes(self._store.get(_VERDICT)))
        what, late = verdict["what"], {int(rank): at for rank, at in verdict["late"].items()}
        if self._rank in late:
            raise RankError(
                f"rank {self._rank} (this one) has come too late to {what}: the others waited for "
                f"it while it was in {late[self._rank]}, and gave up",
                hint=verdict["hint"] + "; or raise forebay.rank_timeout",
            )
        listed = ", ".join(f"rank {rank} was in {doing}" for rank, doing in late.items())
        raise RankError(
            f"not every rank has come to {what}, where rank {self._rank} waited: {listed}",
            hint=verdict["hint"],
        )

    def _storeless(self) -> RankError:
        return RankError(
            f"the ranks' common store does not answer rank {self._rank} in {self._doing}: rank 0, "
            "or the torchrun that keeps it, is gone",
            hint="look at rank 0's own output; all ranks start again from the last checkpoint",
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def close(self) -> None:
        """Leave; the others are told. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        try:
            self._write("closed", self._doing)
        except RuntimeError:
            return
