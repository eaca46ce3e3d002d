"""The memory estimators over ranks: what each of them places."""

from __future__ import annotations

import torch
from torch import nn

import forebay
from distributed import ranks
from forebay.compat.estimators import _live
from forebay.plan.setup import Cluster
from forebay.plan.zero_memory import Backwards, Offload, zero_memory

_OFFLOADS = {
    Offload.NONE: {},
    Offload.OPTIMIZER: {"offload_optimizer": {"device": "cpu"}},
    Offload.PARAMETERS: {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
_CASES = [
    (2, Offload.NONE, 1),
    (2, Offload.OPTIMIZER, 2),
    (3, Offload.NONE, 2),
    (3, Offload.OPTIMIZER, 1),
    (3, Offload.PARAMETERS, 1),
]
_BLOCKS = 6


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(_BLOCKS))).bfloat16()


def _placed() -> list[dict[str, int]]:
    """On this rank, case by case."""
    found = []
    for stage, offload, accumulation in _CASES:
        model = _model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage, **_OFFLOADS[offload]},
        }
        optimizer = torch.optim.AdamW(model.parameters())
        with forebay.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
            for _ in range(accumulation):
                engine.backward(engine(torch.ones(1, 300, dtype=torch.bfloat16)).sum())
                engine.step()
            engine.synchronize()
            rows = engine.ledger.table()
            found.append(
                {t: sum(r.nbytes for r in rows if r.tier.value == t) for t in ("host", "device")}
            )
    return found


def test_each_rank_places_what_they_say():
    """Host bytes to the byte; on the device beside gradients, which are in no ledger."""
    size = _live(_model())
    largest = max(unit.elements for unit in size.spec.units)
    by_rank = ranks.run(3, _placed)
    for (stage, offload, count), *placed in zip(_CASES, *by_rank, strict=True):
        memory = zero_memory(
            size.spec,
            stage=stage,
            offload=offload,
            backwards=Backwards.ONE if count == 1 else Backwards.SEVERAL,
            cluster=Cluster(devices_per_node=3),
        )
        assert sum(one["host"] for one in placed) == memory.host_bytes
        # sums of slices, and one unit's gradient that is whole; padding of each
        gradients = 4 * size.elements / 3 + 2 * largest + 4 * 4096 * (_BLOCKS + 3)
        most = max(one["device"] for one in placed)
        assert memory.device_bytes - gradients <= most, (stage, offload)
        # the device of this test is the host, where each of four allocations a unit fills a page
        assert most <= memory.device_bytes + _BLOCKS * 4 * 4096, (stage, offload)
