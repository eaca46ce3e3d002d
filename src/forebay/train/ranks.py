"""What one rank of a training run does of what one process would do alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.comm.together import Together
from forebay.compat.distributed import count_ranks, init_in_time
from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.data.batches import RankShare

__all__ = ["TrainRanks"]

# Ranks join before they do anything else: they differ by the time that it takes to start a process
# on each machine.
_JOIN_SECONDS: Final = 300.0
# Schedulers signal all processes of a job, and torchrun passes the signal on to the same ranks.
_SETTLE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRanks:
    """This rank and its peers, as torchrun says.

    Attributes:
        rank: This rank; 0 writes the run's folder and speaks.
        size: Number of ranks.
        local_rank: This rank, counted on its machine.
        local_size: Ranks of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def read(cls) -> TrainRanks:
        """From the environment.

        Raises:
            ConfigError: Variables that torchrun sets are missing or wrong.
        """
        size = count_ranks(os.environ)
        if size == 1:
            return cls()
        local, here = (os.environ.get(f"LOCAL_{name}") for name in ("RANK", "WORLD_SIZE"))
        return cls(
            rank=int(os.environ["RANK"]),
            size=size,
            local_rank=int(local or 0),
            local_size=int(here or 1),
        )

    @property
    def share(self) -> RankShare:
        """Which rows of a batch are this rank's."""
        from forebay.data.batches import RankShare

        return RankShare(rank=self.rank, size=self.size)

    @property
    def speaks(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The device option of this rank: ranks take the machine's GPUs in turn."""
        if self.size == 1 or asked not in {"auto", "cuda"}:
            return asked
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{self.local_rank % count}" if count else asked

    @property
    def settle_seconds(self) -> float:
        """How long after a signal another one is the same one."""
        return 0.0 if self.size == 1 else _SETTLE_SECONDS

    @contextlib.contextmanager
    def joined(self) -> Iterator[Together]:
        """The ranks of the run, all of which are there.

        Raises:
            RankError: They did not all come in time.
        """
        if self.size == 1:
            yield Together(None, otherwise=RankError)
            return
        from forebay.comm.torch_group import TorchGroup

        init_in_time(_JOIN_SECONDS)
        group = TorchGroup(name="forebay-train")
        try:
            yield Together.of(group, "run", otherwise=RankError)
        finally:
            group.close()

    @contextlib.contextmanager
    def folder(self, output: Path) -> Iterator[Path]:
        """Where this rank writes: the run's folder, or one that nobody reads."""
        if self.speaks:
            yield output
            return
        with tempfile.TemporaryDirectory(prefix="forebay-rank-") as scratch:
            yield Path(scratch) / "run"
