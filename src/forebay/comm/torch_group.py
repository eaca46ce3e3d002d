"""The ranks of `torch.distributed`'s default group, which stays the script's own.

Data goes over a group with the default's backend (NCCL between GPUs, gloo between hosts). What the
ranks tell each other goes over a gloo group, which has a time limit and waits for no device.

[Note: own groups] Exchanges run in a thread of ours while the script goes on. Two threads that use
one group need not come in the same order on all ranks: each rank would wait for the other, or take
the other's bytes. So do two threads that make groups: torch tells groups apart by their count. All
of ours are made in the script's thread, once all ranks are there.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from forebay.comm.life import Life
from forebay.comm.talk import Talk
from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LIMIT_SECONDS", "TorchGroup"]

# How long a rank waits for the others to come to the same pass. With four more in which the culprit
# is looked for, and one until that is heard, a rank ends within 30 s.
LIMIT_SECONDS: Final = 24.0


class TorchGroup:
    """All ranks of the default group; every rank makes one at the same point.

    Args:
        limit_seconds: How long the others may take to come to a pass.
        name: Tells this group's keys in the store from another engine's.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        shard: This rank among the sharers of one copy; see `Group`.
        sharers: Those ranks.
        copy: Which copy they hold.
        local_rank: As torchrun counts it.
        local_size: Likewise.
    """

    def __init__(self, *, limit_seconds: float = LIMIT_SECONDS, name: str = "forebay") -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._limit = limit_seconds
        self._data: Any = None
        self._copies: Any = None
        self.divide([range(self.size)])
        # gloo knows hosts alone
        self._on_host = "nccl" not in distributed.get_backend_config()
        self._control: Any = None
        store = c10d._get_default_store()
        serial = self._serial(store, name)
        self._store = c10d.PrefixStore(f"{name}/{serial}", store)
        self._life = Life(self._store, rank=self.rank, size=self.size)
        self._doing = "start"
        self._talks: dict[str, Talk] = {}
        self._closed = False

    def limit(self, seconds: float) -> None:
        """Set how long the others may take to come to a pass, before `connect`."""
        self._limit = seconds

    def divide(self, copies: Sequence[Sequence[int]]) -> None:
        """Let groups of ranks hold one copy of the state each; before `connect`, alike everywhere.

        Args:
            copies: The ranks of each copy: every rank once, in `in_order`.
        """
        self._copies_of = tuple(tuple(ranks) for ranks in copies)
        self.copy = next(n for n, ranks in enumerate(self._copies_of) if self.rank in ranks)
        self.sharers = self._copies_of[self.copy]
        self.shard = self.sharers.index(self.rank)

    def connect(self) -> None:
        """See `Group`."""
        if self._control is not None:
            return
        self.compare("", what="the first exchange")  # see [Note: own groups]
        limit = timedelta(seconds=self._limit)
        with self._explained():
            self._control = distributed.new_group(backend="gloo", timeout=limit)
            self._data = _own_of(self._copies_of)
            if len(self._copies_of) > 1:
                self._copies = _own_of(tuple(zip(*self._copies_of, strict=True)))

    def _serial(self, store: Any, name: str) -> int:
        """How manieth group of this name it is; the same on every rank, since all make each."""
        return int(store.add(f"{name}/groups/{self.rank}", 1))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise self._life.explain(error, what=self._doing) from error

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        with self._explained(), self._near(received) as into:
            distributed.all_to_all_single(_raw(into), _raw(self._bring(sent)), group=self._data)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        with self._explained(), self._near(received) as into:
            _gather(_raw(into), _raw(self._bring(sent)), self._data)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        with self._explained(), self._near(received) as into:
            distributed.reduce_scatter_tensor(into, self._bring(sent), group=self._data)

    def gather_copies(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        with self._explained(), self._near(received) as into:
            _gather(_raw(into), _raw(self._bring(sent)), self._copies)

    def spread_copy(self, values: torch.Tensor, *, copy: int) -> None:
        """See `Group`."""
        source = self._copies_of[copy][self.shard]
        with self._explained():
            near = self._bring(values)
            distributed.broadcast(_raw(near), src=source, group=self._copies)
            if near is not values:
                values.copy_(near)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the backend can read it: gloo knows hosts alone."""
        return tensor.cpu() if self._on_host else tensor

    @contextlib.contextmanager
    def _near(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if not self._on_host or tensor.device.type == "cpu":
            yield tensor
            return
        near = torch.empty_like(tensor, device="cpu")
        yield near
        tensor.copy_(near)

    def tell(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """See `Group`."""
        self._doing = what
        self._life.doing(what)
        received = torch.empty(self.size * values.numel(), dtype=torch.float64)
        with self._explained():
            _gather(received, values, self._control)
        return received.view(self.size, -1)

    def compare(self, text: str, *, what: str) -> list[str]:
        """See `Group`."""
        self._doing = what
        self._life.doing(what)
        return self.talk("compare").exchange(text, what=what)

    def talk(self, name: str) -> Talk:
        """See `Group`."""
        if name not in self._talks:
            store = c10d.PrefixStore(f"talk/{name}", self._store)
            self._talks[name] = Talk(
                store,
                life=self._life,
                rank=self.rank,
                size=self.size,
                limit_seconds=self._limit,
            )
        return self._talks[name]

    def check(self) -> None:
        """See `Group`."""
        self._life.check()

    def fail(self, reason: str) -> None:
        """See `Group`."""
        self._life.fail(reason)

    def part(self) -> None:
        """See `Group`."""
        for group in (self._data, self._copies, self._control):
            if group is not None:
                distributed.destroy_process_group(group)
        self._data = self._copies = self._control = None

    def close(self) -> None:
        """See `Group`."""
        if self._closed:
            return
        self._closed = True
        self._life.close()


def _own_of(groups: Sequence[Sequence[int]]) -> Any:
    """Make all of these groups of ranks, as every rank must; returns this rank's."""
    own, _ = distributed.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return own


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes: every backend knows them, and none adds them up."""
    return tensor.view(torch.uint8)


def _gather(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    # torch 2.13 has a new name for it and warns of the old one
    gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    gather(received, sent, group=group)
