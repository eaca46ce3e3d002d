"""One process today: what asks for more is refused, and a group of one is made on request."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["init_distributed", "refuse_ranks"]

# Set by torchrun and DeepSpeed's launcher, and by Open MPI.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make a `torch.distributed` group of one process, for scripts that ask for their rank.

    Nothing is done where there is a group already, or where `dist_init_required` is False. It
    needs no port, no address and no environment variable.

    Args:
        dist_backend: "gloo" or "nccl"; None chooses by whether there is a CUDA device.
        auto_mpi_discovery: Unused: one process discovers nothing.
        distributed_port: Unused.
        verbose: Unused.
        timeout: Of the group's collectives; None is torch's.
        init_method: Unused.
        dist_init_required: False does nothing.
        config: Unused: no collective is logged.
        rank: 0, or -1 for the environment's.
        world_size: 1, or -1 for the environment's.

    Raises:
        UnsupportedError: More than one process.
    """
    refuse_ranks()
    if rank not in (-1, 0) or world_size not in (-1, 1):
        raise UnsupportedError(
            f"init_distributed(rank={rank}, world_size={world_size}): several processes are not "
            "supported yet",
            hint="start one process",
        )
    if dist_init_required is False or not distributed.is_available():
        return
    if distributed.is_initialized():
        return
    distributed.init_process_group(
        dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        store=distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=timeout,
    )


def refuse_ranks() -> None:
    """Refuse to be one of several processes.

    Raises:
        UnsupportedError: The environment or `torch.distributed` says so.
    """
    counts = {name: os.environ.get(name, "") for name in _WORLD_SIZES}
    said = {name: int(count) for name, count in counts.items() if count.strip().isdigit()}
    if distributed.is_available() and distributed.is_initialized():
        said["torch.distributed's world size"] = distributed.get_world_size()
    for name, count in said.items():
        if count > 1:
            raise UnsupportedError(
                f"{name} is {count}, but several processes are not supported yet",
                hint="start one process",
            )
