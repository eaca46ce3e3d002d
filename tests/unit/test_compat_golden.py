"""Configurations of the kind that popular trainers ship, through `initialize` and some updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay
from compat_cases import small, train
from config_cases import merged
from forebay.errors import ConfigError

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
SCALED = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE2: dict[str, Any] = AUTO_BATCH | {
    "zero_allow_untested_optimizer": True,
    "fp16": SCALED,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}
STAGE2_SHORT: dict[str, Any] = AUTO_BATCH | {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "bf16": {"enabled": "auto"},
    "fp16": SCALED | {"auto_cast": False, "initial_scale_power": 32},
    "wall_clock_breakdown": False,
}
STAGE3: dict[str, Any] = AUTO_BATCH | {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 0,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "wall_clock_breakdown": False,
}
WITH_SCHEDULE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": "auto"},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": True,
    },
}
SHIPPED = {"stage2": STAGE2, "short": STAGE2_SHORT, "stage3": STAGE3, "tutorial": WITH_SCHEDULE}
# Those with an fp16 section train fp16 models too.
CASES = [
    (name, dtype)
    for name, raw in SHIPPED.items()
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if dtype is not torch.float16 or "fp16" in raw
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_they_train(name, dtype):
    raw, model = SHIPPED[name], small(dtype)
    arguments: dict[str, Any] = {}
    if "optimizer" not in raw:
        arguments["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, _, scheduler = forebay.initialize(model=model, config=raw, **arguments)
    with engine:
        assert engine.get_batch_info() == ((8, 4, 2) if name == "tutorial" else (1, 1, 1))
        assert engine.gradient_clipping() == 1.0
        assert engine.bfloat16_enabled() is (dtype is torch.bfloat16)
        assert engine.fp16_enabled() is (dtype is torch.float16)
        if dtype is torch.float16:
            assert optimizer.cur_scale == (2.0**32 if name == "short" else 2.0**16)
        assert (scheduler is not None) is (name == "tutorial")
        tiers = {(row.tier.value, row.role.value) for row in engine.ledger.table()}
        assert {("host", "hp_params"), ("host", "optim_states")} <= tiers
        streams = [unit.streams_weights for unit in engine.core.units]
        assert set(streams) == {"offload_param" in raw["zero_optimization"]}
        assert [record.label for record in engine.core.units[0].records] == (
            ["0.weight"] if name == "stage3" else ["0.weight", "0.bias"]
        )
        losses = train(engine, 24 if dtype is torch.float16 else 12)
        if optimizer.cur_scale == 1.0:
            assert engine.skipped_steps == 0
            assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size = 2 is refused: weights and"),
    ],
)
def test_what_they_ask_for_that_is_not_there_is_refused_alone(change, message):
    raw = merged(STAGE3, {"zero_optimization": change})
    with pytest.raises(ConfigError) as caught:
        forebay.initialize(
            model=small(), optimizer=torch.optim.AdamW, model_parameters=None, config=raw
        )
    lines = str(caught.value).splitlines()
    assert message in lines[0]
    assert lines[-1].startswith("hint: write zero_optimization.mics_shard_size with the same")


def test_offloaded_parameters_under_stage_2_are_refused_with_both_ways_out():
    raw = merged(STAGE2, {"zero_optimization": {"offload_param": {"device": "cpu"}}})
    with pytest.raises(ConfigError) as caught:
        forebay.initialize(model=small(), optimizer=torch.optim.AdamW, config=raw)
    assert "and the stage is 2" in caught.value.message
    assert "write stage 3, or delete" in caught.value.hint


@pytest.mark.parametrize("sizes", ["auto", None])
def test_a_loader_that_nobody_gives_a_batch_size_is_an_error(sizes):
    raw = {name: value for name, value in STAGE2.items() if "batch" not in name}
    if sizes is not None:
        raw["train_micro_batch_size_per_gpu"] = sizes
    model = small()
    client = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu \(not given\)"):
        forebay.initialize(model=model, optimizer=client, config=raw, training_data=[1, 2])
    with forebay.initialize(model=model, optimizer=client, config=raw)[0] as engine:
        assert engine.train_micro_batch_size_per_gpu() == 1


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_an_auto_that_nobody_resolves_is_an_error(section):
    raw = WITH_SCHEDULE | {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    if section == "scheduler":
        raw = WITH_SCHEDULE | {
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
        }
    with pytest.raises(ConfigError, match=r'is "auto", and forebay\.initialize does not'):
        forebay.initialize(model=small(), config=raw)
