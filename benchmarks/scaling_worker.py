"""One rank of `benchmarks/scaling.py`: trains each combination in turn and writes its figures.

    torchrun --nproc-per-node N benchmarks/scaling_worker.py '{"folder": ..., "cases": [...], ...}'

A combination is `LIBRARY[STAGE]+PLACE`: `zero2+cpu` is forebay's stage 2 with state on the host,
`zero3+params` has the weights there too, `deepspeed3+params` the same by DeepSpeed, `fsdp2+cpu` by
PyTorch; `floor` is forward and backward alone.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import json
import os
import re
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torchrun
from torch import distributed

from forebay.bench.contestants import build_model
from forebay.bench.peers import DECAY, RATE, shard_fully
from forebay.bench.spec import SHAPES, StepSpec
from forebay.comm.fake import StillGroup
from forebay.observe.breakdown import break_down
from forebay.observe.perfetto import write_trace
from forebay.observe.picture import draw
from forebay.observe.recording import record

_NAME = re.compile(r"(floor|zero[0-3]|deepspeed[0-3]|fsdp2)(?:\+(none|cpu|params))?")
_COPY_BYTES = 256 << 20


def parse(name: str) -> tuple[str, int, str]:
    """(library, stage, what lives on the host)."""
    found = _NAME.fullmatch(name)
    if found is None:
        sys.exit(f"variant {name!r} is none of floor, zeroN+PLACE, deepspeedN+PLACE, fsdp2+PLACE")
    head, place = found[1], found[2] or "none"
    if head in ("floor", "fsdp2"):
        return head, 0, place
    return ("forebay" if head.startswith("zero") else "deepspeed"), int(head[-1]), place


class Passes:
    """Forward and backward alone; also what the others have in common."""

    core: Any = None

    def __init__(self, model: Any, work: dict[str, Any]) -> None:
        self.model, self.work = model, work

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def settle(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing is held."""


class Configured(Passes):
    """forebay or DeepSpeed, by the same configuration."""

    def __init__(self, model: Any, work: dict[str, Any], library: str, config: Any) -> None:
        super().__init__(model, work)
        made = importlib.import_module(library).initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
        self.engine = made[0]
        self.core = getattr(self.engine, "core", None)

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        return loss.detach()

    def step(self) -> None:
        self.engine.step()

    def settle(self) -> None:
        if self.core is not None:
            self.core.synchronize()
        super().settle()

    def close(self) -> None:
        if self.core is not None:
            self.engine.close()


class FullyShard(Passes):
    """FSDP2: fp32 parameters in shards, bf16 computation on a GPU."""

    def __init__(self, model: Any, work: dict[str, Any], place: str) -> None:
        model = model.float()
        on_gpu = work["device"] == "cuda"
        shard_fully(
            model,
            device=work["device"],
            offload=place == "cpu",
            computes=torch.bfloat16 if on_gpu else torch.float32,
        )
        super().__init__(model, work)
        self.params = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=RATE, weight_decay=DECAY, fused=True)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def config_of(library: str, stage: int, place: str, work: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if place != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if place == "params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    params: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work["rows"],
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        "bf16": {"enabled": work["device"] == "cuda"},
    }
    if library == "forebay":
        config["forebay"] = {"host_budget": work["host_budget"]}
        return config
    config["steps_per_print"] = 1 << 30
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if place == "none":
        params["torch_adam"] = True  # its own would be compiled first
    if stage == 3:
        # as its "auto" answers for a model of this width
        width = SHAPES[work["shape"]].hidden
        zero |= {
            "reduce_bucket_size": width**2,
            "stage3_prefetch_bucket_size": int(0.9 * width**2),
            "stage3_param_persistence_threshold": 10 * width,
        }
    return config


def contestant(name: str, work: dict[str, Any]) -> Passes:
    library, stage, place = parse(name)
    spec = StepSpec(variant="none", size=work["shape"], device=work["device"])
    model: Any = build_model(spec)
    if work["device"] == "cpu":
        model = model.float()
    if library == "floor":
        return Passes(model, work)
    if library == "fsdp2":
        return FullyShard(model, work, place)
    return Configured(model, work, library, config_of(library, stage, place, work))


def fingerprint(core: Any) -> str:
    """Of all weights' bits, made where they are; every rank calls it."""
    zero = importlib.import_module("forebay.zero")
    total = hashlib.sha256()
    for param in core.module.parameters():
        with zero.GatheredParameters(param), torch.no_grad():
            kind = torch.int16 if param.element_size() == 2 else torch.int32
            sums = []
            for words in param.detach().reshape(-1).view(kind).split(1 << 24):
                places = torch.arange(1, len(words) + 1, device=words.device)
                sums.append(torch.stack([words.sum(dtype=torch.int64), (words * places).sum()]))
            numbers = torch.stack(sums).tolist() if sums else []
        total.update(json.dumps(numbers).encode())
    return total.hexdigest()[:12]


def resident_bytes() -> int:
    """Of this process, shared libraries included."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


class Run:
    """A contestant's steps on tokens that depend on rank and step alone."""

    def __init__(self, runner: Passes, work: dict[str, Any], rank: int) -> None:
        self.runner, self.work = runner, work
        self.generator = torch.Generator().manual_seed(7 + rank)
        self.vocabulary = SHAPES[work["shape"]].vocabulary
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        shape = (self.work["rows"], self.work["length"])
        tokens = torch.randint(self.vocabulary, shape, generator=self.generator)
        self.losses.append(self.runner.backward(tokens.to(device(self.work))))
        self.runner.step()

    def seconds(self, count: int, *, warm: int = 2) -> float:
        """Of a step in a series; what is in flight at its beginning is so at its end, too."""
        for _ in range(warm):
            self.step()
        self._arrive()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self._arrive()
        return (time.perf_counter() - began) / count

    def _arrive(self) -> None:
        """Every rank has computed its steps; updates that overlap the next one go on."""
        if self.work["device"] == "cuda":
            torch.cuda.current_stream().synchronize()
        distributed.barrier()


def measure(name: str, work: dict[str, Any], rank: int) -> dict[str, Any]:
    on_gpu = work["device"] == "cuda"
    began = time.perf_counter()
    runner = contestant(name, work)
    run = Run(runner, work, rank)
    core = runner.core
    if core is not None:
        core.page_locking.wait()
    result: dict[str, Any] = {"variant": name, "rank": rank, "ranks": work["ranks"]}
    result["setup_seconds"] = time.perf_counter() - began
    result["seconds"] = run.seconds(work["steps"])
    result["tokens"] = work["rows"] * work["length"]
    result["losses"] = [float(loss) for loss in run.losses]
    result["host_resident"] = resident_bytes()
    if on_gpu:
        result["device_peak"] = torch.cuda.max_memory_allocated()
    if core is not None:
        timeline = work["timeline"] if rank == 0 and name == work["timeline_of"] else None
        result |= watch(run, core, timeline=timeline)
    runner.close()
    return result


def watch(run: Run, core: Any, *, timeline: str | None) -> dict[str, Any]:
    """What only forebay tells of itself.

    `timeline` is a path's stem: for a trace of three steps, and a picture of the one in the middle.
    """
    queue = core.ranks.queue
    collectives = None if queue is None else queue.collectives
    found: dict[str, Any] = {}
    if run.work["deterministic"]:
        found["weights"] = fingerprint(core)
    found["ledger"] = {f"{r.tier.value} {r.role.value}": r.nbytes for r in core.ledger.table()}
    run.runner.backward(torch.zeros(1, 8, dtype=torch.int64, device=device(run.work)))
    core.synchronize()
    began = time.perf_counter()
    run.runner.step()
    run.runner.settle()
    found["update_seconds"] = time.perf_counter() - began
    before = {} if collectives is None else dict(collectives.nbytes)
    with record(core) as recording:
        for _ in range(3):
            run.step()
    part = break_down(recording.records[1], before=recording.records[0])
    found |= {
        "down_bytes": part.down_bytes,
        "up_bytes": part.up_bytes,
        "down_busy": part.down_busy,
        "up_busy": part.up_busy,
        "waits": part.exposed_wait,
        "host_update_busy": part.host_busy,
        "update_threads": core.cores.threads,
        "in_time": part.weights_in_time,
        "late": part.weights_late,
    }
    if collectives is not None:
        found["rank_bytes"] = {
            key.value: (count - before.get(key, 0)) / 3 for key, count in collectives.nbytes.items()
        }
        # The same steps with nothing sent; what they take less was exposed. Last, since the
        # weights are no good after them. What was asked for before is still sent: by every rank.
        still = functools.partial(setattr, collectives, "group", StillGroup(collectives.group))
        queue.submit(still, what="the end of what is sent").wait()
        found["silent_seconds"] = run.seconds(run.work["steps"])
    if timeline is not None:
        write_trace(Path(f"{timeline}.json"), [recording.timeline])
        draw(Path(f"{timeline}.png"), [recording.records[1].timeline.from_zero()])
    return found


def device(work: dict[str, Any]) -> torch.device:
    if work["device"] == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def link_rates(work: dict[str, Any]) -> dict[str, float]:
    """Bytes a second of this rank's link while every rank's copies, by direction."""
    if work["device"] == "cpu":
        return {}
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device(work))
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def copy(ways: tuple[str, ...]) -> None:
        for way, stream in zip(ways, streams, strict=False):
            with torch.cuda.stream(stream):
                if way == "up":
                    here.copy_(there, non_blocking=True)
                else:
                    back.copy_(here, non_blocking=True)

    rates = {}
    for ways in (("up",), ("down",), ("up", "down")):
        copy(ways)
        torch.cuda.synchronize()
        distributed.barrier()
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            copy(ways)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rates["+".join(ways)] = len(ways) * _COPY_BYTES / statistics.median(seconds)
    return rates


def main() -> None:
    work = json.loads(sys.argv[1])
    rank, folder = int(os.environ["RANK"]), Path(work["folder"])
    if work["device"] == "cuda":
        torch.cuda.set_device(device(work))
        # FSDP2 reduces the norms of what it keeps on the host over gloo.
        needs_both = any(name.startswith("fsdp2") for _, name in work["cases"])
        distributed.init_process_group("cpu:gloo,cuda:nccl" if needs_both else "nccl")
    else:
        distributed.init_process_group("gloo")
    torch.use_deterministic_algorithms(work["deterministic"])
    work["ranks"] = distributed.get_world_size()
    if work["links"]:
        said = {"variant": "links", "rank": rank, "ranks": work["ranks"], **link_rates(work)}
        torchrun.leave(folder, f"links-{rank}", said)
    for number, name in work["cases"]:
        try:
            result = measure(name, work, rank)
        except BaseException as error:
            traceback.print_exc()
            last = f"{type(error).__name__}: {error}".splitlines()[0]
            result = {"variant": name, "rank": rank, "ranks": work["ranks"], "failure": last}
        torchrun.leave(folder, f"{number}-{rank}", result)
        if "failure" in result:
            os._exit(1)  # the others may hang in a collective; torchrun ends them
        gc.collect()
        if work["device"] == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        distributed.barrier()
    os._exit(0)  # a peer may hang at exit


if __name__ == "__main__":
    main()
