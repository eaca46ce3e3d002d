"""Saved under any configuration, loaded under any other: {stage} x {offload} x {units} x precision.

A value of an axis joins the whole matrix by being written into `AXES`.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import forebay
from checkpoint_cases import Net, assert_same, numbers, run

_SAVED, _LAST = 4, 7
_MASTERS = ("master", "exp_avg", "step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    Attributes:
        stage: `zero_optimization.stage`.
        offload: What lies elsewhere: a name of `OFFLOADS`.
        units: `zero_optimization.sub_group_size`: how state is cut into units.
        beside: `checkpoint.writer.decoupled`: whether it is saved beside training.
        precision: Section of the working weights; "" for fp32.
    """

    stage: int
    offload: str
    units: int
    beside: bool
    precision: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)) + (
            "" if self.precision else "fp32"
        )

    def engine(self, *, seed: int = 0) -> Any:
        """A new engine."""
        torch.manual_seed(seed)
        # buffers too: a CPU's batch norm takes one dtype
        model = Net(37).to(PRECISIONS[self.precision])
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 5,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 20, "warmup_num_steps": 3},
            },
            "zero_optimization": {
                "stage": self.stage,
                "sub_group_size": self.units,
                **OFFLOADS[self.offload],
            },
            "checkpoint": {"writer": {"decoupled": self.beside}},
        }
        if self.precision:
            config[self.precision] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] |= {"initial_scale_power": 20, "loss_scale_window": 3}
        engine, *_ = forebay.initialize(model=model, config=config)
        return engine


_CPU = {"device": "cpu"}
_NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 1}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": _CPU},
    "nvme": {"offload_optimizer": _NVME},
    "weights": {"offload_optimizer": _CPU, "offload_param": _CPU},
}
# Stage 3 alone has weights elsewhere.
IMPOSSIBLE = {(stage, "weights") for stage in (0, 1, 2)}
AXES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload": tuple(OFFLOADS),
    # the model's blocks, each parameter, between layers
    "units": (1_000_000_000, 0, 1500),
    "beside": (False, True),
}
PRECISIONS = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layouts(precision: str) -> list[Case]:
    """All of one precision."""
    values = itertools.product(*AXES.values())
    cases = [Case(precision=precision, **dict(zip(AXES, row, strict=True))) for row in values]
    return [case for case in cases if (case.stage, case.offload) not in IMPOSSIBLE]


def few(precision: str) -> list[Case]:
    """Some of one precision, so that every value of every axis is among them."""
    chosen: list[Case] = []
    missing = {(name, value) for name, values in AXES.items() for value in values}
    while missing:
        best = max(layouts(precision), key=lambda case: len(missing & _values(case)))
        chosen.append(best)
        missing -= _values(best)
    return chosen


def _values(case: Case) -> set[tuple[str, Any]]:
    return {(name, getattr(case, name)) for name in AXES}


def test_the_few_have_every_value():
    for name, values in AXES.items():
        assert {getattr(case, name) for case in few("")} == set(values)


class Saved:
    """A run that is never interrupted, by precision, and a checkpoint of each configuration."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self.whole = functools.cache(self._whole)
        self.path = functools.cache(self._path)

    def _whole(self, precision: str) -> tuple[list[float], Any, Any]:
        """Losses, and every bit when it is saved and at the end."""
        with few(precision)[0].engine() as engine:
            losses = run(engine, 0, _SAVED)
            middle = numbers(engine)
            losses += run(engine, _SAVED, _LAST)
            return losses, middle, numbers(engine)

    def _path(self, case: Case) -> Any:
        """Where a checkpoint of a run under that configuration is."""
        folder = self._folder / str(case)
        losses, _, _ = self.whole(case.precision)  # first: it draws random numbers
        with case.engine() as engine:
            assert run(engine, 0, _SAVED) == losses[:_SAVED], case
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


def _loads(saved: Saved, sources: list[Case], target: Case) -> None:
    """One engine loads them all, one after the other."""
    with target.engine(seed=5) as engine:
        run(engine, 20, 22)  # whatever it has done before is gone
        for source in sources:
            engine.load_checkpoint(saved.path(source))
            losses, middle, end = saved.whole(source.precision)
            if source.precision != target.precision:
                found = numbers(engine)
                for kind in _MASTERS:
                    assert_same(found, middle, only=kind)
                continue
            assert run(engine, _SAVED, _LAST) == losses[_SAVED:], f"{source} -> {target}"
            assert_same(numbers(engine), end)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_few_into_each_other(saved, precision):
    cases = few(precision)
    other = next(name for name in PRECISIONS if name != precision)
    for source, target in zip(cases, cases[1:] + cases[:1], strict=True):
        _loads(saved, [source, few(other)[0]], target)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "target",
    # how a configuration saves is nothing to a target
    [case for precision in PRECISIONS for case in layouts(precision) if not case.beside],
    ids=str,
)
def test_any_into_any(saved, target):
    """All of its precision go on with the same bits; of others the masters are the same."""
    _loads(saved, layouts(target.precision), target)
    for precision in PRECISIONS:
        if precision != target.precision:
            _loads(saved, few(precision), target)
