"""What one rank of a training run does of what one process would do alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.compat.distributed import count_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.data.batches import RankShare

__all__ = ["TrainRanks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRanks:
    """This rank and its peers, as torchrun says.

    Attributes:
        rank: This rank; 0 writes the run's folder and speaks.
        size: Number of ranks.
        local_rank: This rank, counted on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def read(cls) -> TrainRanks:
        """From the environment.

        Raises:
            ConfigError: Variables that torchrun sets are missing or wrong.
        """
        size = count_ranks(os.environ)
        if size == 1:
            return cls()
        local = os.environ.get("LOCAL_RANK", "0")
        return cls(rank=int(os.environ["RANK"]), size=size, local_rank=int(local))

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

    @contextlib.contextmanager
    def folder(self, output: Path) -> Iterator[Path]:
        """Where this rank writes: the run's folder, or one that nobody reads."""
        if self.speaks:
            yield output
            return
        with tempfile.TemporaryDirectory(prefix="forebay-rank-") as scratch:
            yield Path(scratch) / "run"
