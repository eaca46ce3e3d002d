"""The workloads of `predicted.py`: how each is trained, and what the planner says of it."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.engine import EngineOptions, offload_with
from forebay.plan.model_config import shape_of
from forebay.plan.placement import UpdatePlace
from forebay.plan.ready import ready_config
from forebay.plan.setup import Home, Setup
from forebay.plan.step import step_forecast
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Precision, Recompute, Workload
from forebay.units_of_measure import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from forebay.engine.engine import Engine
    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape

WARM_UP = 3


def _llama(hidden: int, layers: int, heads: int, *, kv: int, ffn: int, vocab: int) -> dict:
    return {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": vocab > 100_000,
    }


_3B = _llama(3072, 28, 24, kv=8, ffn=8192, vocab=128256)
_7B = _llama(4096, 32, 32, kv=32, ffn=11008, vocab=32000)
_FILES = _llama(1024, 12, 8, kv=8, ffn=2816, vocab=32000)
_SMALL = _llama(256, 4, 4, kv=4, ffn=1024, vocab=2048)
_WIDE = _llama(640, 4, 10, kv=10, ffn=1792, vocab=2048)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload."""

    config: dict[str, Any]
    micro_batch: int
    sequence: int = 2048
    accumulation: int = 1
    precision: Precision = Precision.BF16
    optimizer: Home = Home.HOST
    weights: Home = Home.DEVICE
    recompute: Recompute = Recompute.BLOCKS

    @property
    def setup(self) -> Setup:
        stage = 0 if self.optimizer is Home.DEVICE else 2
        in_stage_3 = self.optimizer is Home.NVME or self.weights is not Home.DEVICE
        return Setup(
            stage=3 if in_stage_3 else stage,
            optimizer=self.optimizer,
            weights=self.weights,
            workload=Workload(
                micro_batch=self.micro_batch,
                accumulation=self.accumulation,
                sequence=self.sequence,
                precision=self.precision,
                recompute=self.recompute,
            ),
        )

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.config, source="case")


_CPU = {"sequence": 128, "precision": Precision.FP32, "recompute": Recompute.NONE}
_CPU_AGAIN = {**_CPU, "recompute": Recompute.BLOCKS}
# In this order: a model that the last case trained is trained on, so neighbours share it.
CASES = {
    "w1-none": Case(config=_3B, micro_batch=8, optimizer=Home.DEVICE),
    "w4-4k": Case(config=_3B, micro_batch=2),
    "w4-8k": Case(config=_3B, micro_batch=4),
    "w1": Case(config=_3B, micro_batch=8),
    "w4-32k": Case(config=_3B, micro_batch=16),
    "w1-streamed": Case(config=_3B, micro_batch=8, weights=Home.HOST),
    "w2": Case(config=_3B, micro_batch=8, accumulation=4),
    "w3": Case(config=_7B, micro_batch=8),
    "w3-streamed": Case(config=_7B, micro_batch=8, weights=Home.HOST),
    "nvme": Case(config=_FILES, micro_batch=8, optimizer=Home.NVME),
    "cpu-small": Case(config=_SMALL, micro_batch=4, **_CPU),
    "cpu-small-x4": Case(config=_SMALL, micro_batch=4, accumulation=4, **_CPU),
    "cpu-small-again": Case(config=_SMALL, micro_batch=4, **_CPU_AGAIN),
    "cpu-wide": Case(config=_WIDE, micro_batch=2, **_CPU),
    "cpu-none": Case(config=_SMALL, micro_batch=4, optimizer=Home.DEVICE, **_CPU),
    "cpu-streamed": Case(config=_SMALL, micro_batch=4, weights=Home.HOST, **_CPU),
    "cpu-nvme": Case(config=_SMALL, micro_batch=4, optimizer=Home.NVME, **_CPU),
}


@dataclass(kw_only=True)
class Trainer:
    """Trains cases one after the other.

    Attributes:
        device: Where.
        steps: Timed updates of each, after `WARM_UP`.
        drive: A folder for state in files; None where no case has any.
        host_budget: What the configuration says of host memory.
        profile: The machine, where it was measured before; None measures it.
    """

    device: torch.device
    steps: int
    drive: Path | None = None
    host_budget: str | None = None
    profile: Profile | None = None
    _model: tuple[Any, nn.Module] | None = field(default=None, init=False)

    def model(self, case: Case) -> nn.Module:
        """The case's model; the last one's, with the weights that it has by now, where it fits."""
        key = (case.config, case.precision)
        if self._model is None or self._model[0] != key:
            self._model = None
            gc.collect()
            torch.manual_seed(0)
            dtype = getattr(torch, case.precision.dtype)
            with torch.device(self.device):
                built = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**case.config), dtype=dtype
                )
            self._model = (key, built)
        built = self._model[1]
        if case.recompute is Recompute.BLOCKS:
            how = {"use_reentrant": False}
            built.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        else:
            built.gradient_checkpointing_disable()
        return built

    def measured(self, case: Case, *, profile: Profile) -> dict[str, Any]:
        """Train some updates as the plan's configuration says; seconds, and bytes by tier."""
        began = time.perf_counter()
        model = self.model(case)
        # The plan's own configuration: the engine updates each unit where the plan says.
        said = step_forecast(case.shape, case.setup, profile=profile)
        config = ready_config(case.setup, places=said.places)
        if case.optimizer is Home.NVME:
            if self.drive is None:
                raise SystemExit("state in files needs --drive FOLDER")
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(self.drive)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(profile.as_json())
            file.flush()
            config["forebay"] = {**config.get("forebay", {}), "profile": file.name}
            # With a budget and drives, state goes to drives only beyond the budget.
            if self.host_budget is not None and case.optimizer is not Home.NVME:
                config["forebay"]["host_budget"] = self.host_budget
            engine, *_ = forebay.initialize(model=model, config=config)
        set_up = time.perf_counter() - began

        def window(tokens: list[torch.Tensor]) -> None:
            for batch in tokens:
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()

        with engine:
            found = self._train(case, window, engine=engine.core)
            tiers: dict[str, int] = {}
            for row in engine.ledger.table():
                tiers[row.tier.value] = tiers.get(row.tier.value, 0) + row.nbytes
        return {**found, "tiers": tiers, "setup_seconds": set_up}

    def placed(self, case: Case, *, places: list[UpdatePlace], profile: Profile) -> dict[str, Any]:
        """The same with a place for each unit; seconds alone."""
        model = self.model(case)
        source = torch.optim.AdamW(model.parameters(), lr=1e-5)
        options = EngineOptions(
            device=self.device,
            clip_norm=1.0,
            places=lambda _spec: places,
            backwards=case.accumulation,
            rates=profile.rates(),
            host_budget=None if self.host_budget is None else parse_bytes(self.host_budget),
        )
        _, optimizer = offload_with(model, source, options=options)

        def window(tokens: list[torch.Tensor]) -> None:
            for batch in tokens:
                (model(input_ids=batch, labels=batch).loss / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()

        try:
            return self._train(case, window, engine=optimizer.engine)
        finally:
            optimizer.close()

    def _train(
        self,
        case: Case,
        window: Callable[[list[torch.Tensor]], None],
        *,
        engine: Engine,
    ) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            gc.collect()  # what the case before left
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(1)
        words, rows = case.config["vocab_size"], (case.micro_batch, case.sequence)
        tokens = [
            torch.randint(0, words, rows, generator=generator).to(self.device)
            for _ in range(case.accumulation)
        ]
        seconds = []
        # From the end of one update to the end of the next, as a loop that reads no loss; what an
        # update leaves undone shows in the one after it.
        for number in range(WARM_UP + self.steps):
            if number == WARM_UP - 1:
                # A long run's copies are of locked memory. The update before ends meanwhile, so
                # that the next step is a short one.
                engine.page_locking.wait()
            began = time.perf_counter()
            window(tokens)
            seconds.append(time.perf_counter() - began)
        engine.synchronize()
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        steady = seconds[WARM_UP:]
        return {"seconds": statistics.median(steady), "all_seconds": seconds, "peak": peak}


def predicted(case: Case, *, profile: Profile) -> dict[str, Any]:
    """The same from the planner."""
    said = step_forecast(case.shape, case.setup, profile=profile)
    tiers = tier_bytes(case.shape, case.setup, places=said.places)
    return {
        "seconds": said.seconds,
        "compute_seconds": said.compute_seconds,
        "streamed": said.places.count(UpdatePlace.STREAMED),
        "bound": said.bound,
        "tiers": {
            "device": tiers.placed_on_device,
            "host": tiers.total("host"),
            "nvme": tiers.total("nvme"),
        },
        "peak": tiers.total("device"),
    }
