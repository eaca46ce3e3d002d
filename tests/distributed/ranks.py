"""Real processes that talk over gloo: started from a server that has torch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "forebay.engine",
        "forebay.compat.api",
        "forebay.train.run",
        "transformers.models.llama.modeling_llama",
    ]
)


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(
    pipe: Connection, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(env)
    try:
        pipe.send(("ok", function(*args)))
    except BaseException as error:
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))
    pipe.close()
    os._exit(0)  # a rank whose peers are gone must not wait for them at exit


def start(
    size: int, function: Callable[..., Any], *args: Any, only: Iterable[int] | None = None
) -> list[tuple[Any, Connection]]:
    """Start `size` ranks, or some of them, that call `function(*args)`: (process, pipe) by rank."""
    port = free_port()
    started = []
    for rank in range(size) if only is None else only:
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        here, there = _SERVER.Pipe()
        process = _SERVER.Process(target=_enter, args=(there, env, function, args), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    return started


def collect(started: list[tuple[Any, Connection]], *, seconds: float = 90) -> list[tuple[str, Any]]:
    """(kind, result or message) of each rank: "ok", an exception's name, "dead" or "late"."""
    until = time.monotonic() + seconds
    results = []
    for process, pipe in started:
        try:
            late = not pipe.poll(max(0.0, until - time.monotonic()))
            results.append(("late", None) if late else pipe.recv())
        except EOFError:
            results.append(("dead", None))
        if results[-1][0] == "late":
            process.kill()
    for process, _ in started:
        process.join(5)
    return results


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = 90) -> list[Any]:
    """What `function(*args)` returns on each of `size` ranks; fails the test where one fails."""
    results = collect(start(size, function, *args), seconds=seconds)
    for rank, (kind, value) in enumerate(results):
        assert kind == "ok", f"rank {rank}: {kind}: {value}"
    return [value for _, value in results]
