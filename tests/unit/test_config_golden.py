"""Configurations as papers, tutorials and popular trainers print them.

Those that need what is still to come are refused for exactly that, and for nothing else.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from config_cases import STAGE2_CPU, merged, refusal, resolved
from forebay.config import (
    BatchSpec,
    LossScaleSpec,
    OptimizerSpec,
    PrecisionSpec,
    ResolvedConfig,
    SchedulerSpec,
    ZeroSpec,
)
from forebay.config.loads import LoadSpec
from forebay.config.nvme_spec import NvmeSpec, WeightFilesSpec

_TRAINER: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
# A trainer's stage 2 file: everything that it knows itself is "auto".
_TRAINER_STAGE2 = _TRAINER | {
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 32,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
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
# The same trainer's stage 3 file, with the names that lack their prefix.
_TRAINER_STAGE3 = _TRAINER | {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
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
}
_INFINITY: dict[str, Any] = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/data/nvme",
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/data/nvme",
            "buffer_count": 5,
            "buffer_size": 5e8,
            "max_in_cpu": 1e9,
        },
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "sub_group_size": 1e9,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}
_SUPER: dict[str, Any] = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "ratio": 0.9,
            "super_offload": True,
            "cpuadam_cores_perc": 0.9,
        },
    },
}


def _without(config: dict[str, Any], *paths: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for path in paths:
        *sections, name = path.split(".")
        inner = config
        for section in sections:
            inner = inner[section]
        del inner[name]
    return config


def test_stage_2_on_the_host() -> None:
    assert resolved(STAGE2_CPU) == ResolvedConfig(
        batch=BatchSpec(train_batch_size=16, micro_batch_size=16),
        precision=PrecisionSpec(dtype="bfloat16"),
        clip_norm=1.0,
        optimizer=OptimizerSpec(name="AdamW", lr=1e-5, weight_decay=0.01),
        zero=ZeroSpec(stage=2, optimizer_tier="host"),
    )


def test_the_same_in_its_old_form() -> None:
    old = _without(STAGE2_CPU, "zero_optimization.offload_optimizer")
    old["zero_optimization"] |= {"cpu_offload": True, "cpu_offload_use_pin_memory": True}
    assert resolved(old) == resolved(STAGE2_CPU)
    off = merged(old, {"zero_optimization": {"cpu_offload_use_pin_memory": False}})
    assert not resolved(off).zero.pin_memory
    both = merged(old, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert "is the old name of" in str(refusal(both))


def test_trainers_stage_2() -> None:
    result = resolved(
        _TRAINER_STAGE2,
        model_dtype="bfloat16",
        micro_batch_size=4,
        accumulation_steps=8,
        learning_rate=1e-5,
    )
    assert result == ResolvedConfig(
        batch=BatchSpec(train_batch_size=32, micro_batch_size=4, accumulation_steps=8),
        precision=PrecisionSpec(dtype="bfloat16"),
        clip_norm=1.0,
        optimizer=OptimizerSpec(name="AdamW", lr=1e-5),
        zero=ZeroSpec(stage=2, optimizer_tier="host"),
    )
    half = resolved(_TRAINER_STAGE2, model_dtype="float16")
    assert half.precision.loss_scale == LossScaleSpec(initial_scale_power=32)


def test_trainers_stage_3() -> None:
    result = resolved(_TRAINER_STAGE3)
    assert result.zero == ZeroSpec(
        stage=3,
        optimizer_tier="host",
        parameter_tier="host",
        loads=LoadSpec(live_elements=0, reuse_elements=0),
        unit_elements=1,
    )
    result = resolved(_without(_TRAINER_STAGE3, "zero_optimization.offload_param"))
    assert result.zero == ZeroSpec(stage=3, optimizer_tier="host", unit_elements=1)
    notes = {row.path: row.note for row in result.rows}
    assert "the same as stage 2" in notes["zero_optimization.stage"]
    assert "changes nothing" in notes["zero_optimization.stage3_max_live_parameters"]


def test_both_offloads_with_auto_buckets() -> None:
    raw = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e9,
        },
    }
    assert resolved(raw).zero == ZeroSpec(stage=3, optimizer_tier="host", parameter_tier="host")
    none = merged(raw, {"zero_optimization": {"offload_param": {"device": "none"}}})
    assert resolved(none).zero == ZeroSpec(stage=3, optimizer_tier="host")


def test_nvme_for_both() -> None:
    weights = WeightFilesSpec(buffer_elements=500_000_000)
    assert resolved(_INFINITY).zero == ZeroSpec(
        stage=3,
        optimizer_tier="nvme",
        parameter_tier="nvme",
        loads=LoadSpec(live_elements=1_000_000_000, reuse_elements=1_000_000_000),
        nvme=NvmeSpec(paths=("/data/nvme",), weights=weights),
    )
    none = merged(_INFINITY, {"zero_optimization": {"offload_param": {"device": "none"}}})
    assert resolved(none).zero == ZeroSpec(
        stage=3, optimizer_tier="nvme", nvme=NvmeSpec(paths=("/data/nvme",))
    )


def test_super_offload() -> None:
    config = resolved(_SUPER)
    assert config.update.kind == "speculative"
    assert config.zero.ratio == 0.9
    assert config.zero.update_cores == 0.9


@pytest.mark.parametrize("change", [{"stage": 2}, {"offload_optimizer": {"device": "nvme"}}])
def test_super_offload_elsewhere(change: dict[str, Any]) -> None:
    error = refusal(_SUPER, {"zero_optimization": change})
    assert "super_offload needs stage 3 and device cpu; here the stage is" in error.message
    assert error.hint == (
        'write "stage": 3 and "offload_optimizer": {"device": "cpu", ...}, or delete it'
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offloaded_parameters_need_stage_3(stage: int) -> None:
    raw = {"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}}
    assert str(refusal(raw)) == (
        'config key zero_optimization.offload_param.device = "cpu" needs zero_optimization.stage '
        f"3, and the stage is {stage}\n"
        "hint: write stage 3, or delete zero_optimization.offload_param"
    )


def test_offloaded_parameters_need_state_on_the_host() -> None:
    raw = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    error = refusal(raw)
    assert "offload_param.device = cpu needs optimizer state off the device too" in error.message
    assert error.hint == 'write "offload_optimizer": {"device": "cpu"} beside it'
    both = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert resolved(raw, {"zero_optimization": both}).zero.pin_memory is False
    differ = merged(raw, {"zero_optimization": {"offload_param": {"pin_memory": True}}})
    assert "pin_memory is true, and" in refusal(differ, {"zero_optimization": both}).message


def test_old_form_of_offloaded_parameters() -> None:
    raw = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    assert resolved(raw).zero == ZeroSpec(stage=3, optimizer_tier="host", parameter_tier="host")


def test_integration_with_everything_auto() -> None:
    """The file that Hugging Face's documentation prints."""
    raw = _TRAINER_STAGE2 | {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "steps_per_print": float("inf"),
    }
    result = resolved(
        raw,
        model_dtype="bfloat16",
        micro_batch_size=1,
        accumulation_steps=1,
        learning_rate=3e-5,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        warmup_steps=500,
    )
    assert result.optimizer == OptimizerSpec(lr=3e-5)
    assert result.steps_per_print is None
    assert result.scheduler == SchedulerSpec(
        name="WarmupLR",
        params=(
            ("warmup_min_lr", 0.0),
            ("warmup_max_lr", None),
            ("warmup_num_steps", 500),
            ("warmup_type", "log"),
        ),
    )
