"""The ranks that train together: from torchrun's variables, or a group that the script has made."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from forebay.comm.torch_group import TorchGroup
from forebay.errors import ConfigError, ForebayError, RankError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

__all__ = ["count_ranks", "init_distributed", "init_in_time", "join_ranks", "local_device"]

_log = logging.getLogger("forebay")

_LOOK_SECONDS: Final = 0.1
_JOIN_HINT: Final = (
    "look at the other ranks' output; MASTER_ADDR and MASTER_PORT say where they meet"
)

# What torch.distributed needs to find the others; torchrun sets all of them.
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_HINT: Final = (
    "start with torchrun --nproc-per-node N script.py, or call torch.distributed."
    "init_process_group first"
)

_starts = itertools.count(1)


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
    """Make `torch.distributed`'s default group, of all ranks that torchrun has started.

    Nothing is done where there is a group already, or where `dist_init_required` is False. A
    group of one needs no port, no address and no environment variable.

    Args:
        dist_backend: "gloo" or "nccl"; None is NCCL where each rank here has a GPU of its own.
        auto_mpi_discovery: Unused: torchrun's variables are.
        distributed_port: Unused: MASTER_PORT is.
        verbose: Unused.
        timeout: Of the group's collectives; None is torch's.
        init_method: As in torch; None reads the environment.
        dist_init_required: False does nothing.
        config: Unused: no collective is logged.
        rank: This rank, or -1 for the environment's.
        world_size: Number of ranks, or -1 for the environment's.

    Raises:
        ConfigError: Variables that torchrun sets are missing, or contradict each other.
    """
    if dist_init_required is False or not distributed.is_available():
        return
    if distributed.is_initialized():
        return
    said = count_ranks(os.environ) if world_size < 0 else world_size
    if said == 1:
        distributed.init_process_group(
            dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"),
            store=distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
        return
    backend = dist_backend or _backend()
    if backend == "gloo" and torch.cuda.is_available() and os.environ.get("LOCAL_RANK") == "0":
        _log.warning(
            "%s ranks here and %d GPUs in sight: ranks exchange over gloo, through host memory; "
            "where each has a GPU of its own, call torch.distributed.init_process_group('nccl') "
            "first",
            os.environ.get("LOCAL_WORLD_SIZE", "?"),
            torch.cuda.device_count(),
        )
    store, own_rank, size = _meet(init_method, rank=rank, world_size=world_size, timeout=timeout)
    distributed.init_process_group(
        backend, store=store, rank=own_rank, world_size=size, timeout=timeout
    )


def _meet(
    init_method: str | None, *, rank: int, world_size: int, timeout: timedelta | None
) -> tuple[Any, int, int]:
    """A store that all ranks share and no earlier group has written to, this rank, and the size.

    The store of torchrun outlives groups, and torch counts its groups anew after
    `destroy_process_group`: it would read addresses of processes that listen no more.
    """
    limit = timeout or c10d.default_pg_timeout
    meeting = rendezvous(init_method or "env://", rank, world_size, timeout=limit)
    store, own_rank, size = next(meeting)
    store.set_timeout(limit)
    return c10d.PrefixStore(f"forebay/{next(_starts)}", store), own_rank, size


def init_in_time(seconds: float) -> None:
    """`init_distributed`, where Python hears signals while it waits, and for so long at most.

    Raises:
        ConfigError: See `init_distributed`.
        RankError: The ranks did not all come in time.
    """
    errors: list[BaseException] = []

    def _join() -> None:
        try:
            init_distributed()
        except BaseException as error:
            errors.append(error)

    # torch connects inside one long call; a daemon does not keep the process from ending.
    thread = threading.Thread(target=_join, name="forebay-join", daemon=True)
    until = time.monotonic() + seconds
    thread.start()
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_LOOK_SECONDS)
    if errors:
        error = errors[0]
        if isinstance(error, ForebayError) or not isinstance(error, RuntimeError):
            raise error
        raise RankError(f"the ranks did not come together: {error}", hint=_JOIN_HINT) from error
    if thread.is_alive():
        rank, size = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
        raise RankError(
            f"rank {rank} of {size} waited {seconds:g} s for the others", hint=_JOIN_HINT
        )


def count_ranks(environment: Mapping[str, str]) -> int:
    """How many ranks a launcher has started, by its variables.

    Raises:
        ConfigError: There are several, and variables are missing or wrong.
    """
    text = environment.get("WORLD_SIZE", "").strip()
    if not text:
        other = next((name for name in _OTHER_LAUNCHERS if _number(environment, name) > 1), None)
        if other is not None:
            raise ConfigError(
                f"{other} is {environment[other]}, but WORLD_SIZE is not set", hint=_HINT
            )
        if "RANK" in environment and _number(environment, "RANK") > 0:
            raise ConfigError("RANK is set and WORLD_SIZE is not", hint=_HINT)
        return 1
    size = _number(environment, "WORLD_SIZE")
    if size < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}, which is no number of ranks", hint=_HINT)
    if size == 1:
        return 1
    missing = [name for name in _NEEDED if not environment.get(name, "").strip()]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {' and '.join(missing)} {are} not set", hint=_HINT
        )
    rank = _number(environment, "RANK")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {environment['RANK']!r} and WORLD_SIZE {size}", hint=_HINT)
    return size


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "").strip()
    return int(text) if text.isdigit() else -1


def _backend() -> str:
    here = max(1, _number(os.environ, "LOCAL_WORLD_SIZE"))
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= here else "gloo"


def join_ranks() -> TorchGroup | None:
    """The group of ranks that this process is one of; None when it trains alone.

    Makes `torch.distributed`'s default group where a launcher has started several ranks.

    Raises:
        ConfigError: See `count_ranks`.
    """
    if not distributed.is_available():
        return None
    if not distributed.is_initialized():
        if count_ranks(os.environ) == 1:
            return None
        init_distributed()
    if distributed.get_world_size() == 1:
        return None
    return TorchGroup()


def local_device(group: TorchGroup | None) -> torch.device | None:
    """The device of this rank; None leaves the choice to torch.

    Ranks share a GPU where the machine has fewer than ranks.
    """
    if group is None or not torch.cuda.is_available():
        return None
    device = torch.device("cuda", group.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
