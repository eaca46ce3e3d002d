"""The resolved configuration: refusals beside it, its table, its JSON, its independence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from config_cases import STAGE2_CPU, nested, refusal, resolved
from forebay.config import BudgetSpec, ResolvedConfig, Source, TensorBoardSpec
from forebay.config.resolve import resolve
from house.tree import python


def _row(config: ResolvedConfig, path: str) -> tuple[str, Source, str]:
    return next((row.value, row.source, row.note) for row in config.rows if row.path == path)


def test_clipping_is_on_unless_it_is_turned_off() -> None:
    path = "gradient_clipping"
    assert resolved({}).clip_norm == 1.0
    assert _row(resolved({}), path)[:2] == ("1.0", Source.DEFAULT)
    assert resolved({path: "auto"}).clip_norm == 1.0
    assert _row(resolved({path: "auto"}), path)[:2] == ("1.0", Source.AUTO)
    assert resolved({path: "auto"}, clip_norm=0.5).clip_norm == 0.5
    assert resolved({}, clip_norm=0.0).clip_norm is None
    assert resolved({path: 0}).clip_norm is None
    assert _row(resolved({path: 0}), path) == ("0.0", Source.GIVEN, "clipping is off")


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"zenflow": None}},
        {"compile": {"deepcompile": False}},
        {"amp": {"enabled": False}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": {"device": None, "super_offload": False}}},
        {"wandb": {"enabled": False, "project": "x"}},
        {"flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1}},
        {"elasticity": {"enabled": False}, "data_efficiency": {}, "autotuning": None},
        {"activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": None}},
        {"checkpoint": {"writer": None, "tag_validation": "Warn"}},
        {"forebay": {"update": "exact", "reduction": "ranked"}},
    ],
    ids=str,
)
def test_a_refused_key_that_asks_for_nothing_passes(config: dict[str, Any]) -> None:
    assert resolved(config) == resolved({"zero_optimization": config.get("zero_optimization")})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("activation_checkpointing.profile", True, "true is not supported yet"),
        ("memory_breakdown", True, "true is not supported yet"),
        ("checkpoint.load_universal", True, "true is not supported yet"),
        ("zero_optimization.load_from_fp32_weights", False, "false is refused"),
        ("csv_monitor.enabled", True, "true is not supported yet"),
        ("elasticity", {"enabled": True}, '{"enabled": true} is refused: forebay trains'),
        ("compression_training", {"x": 1}, '{"x": 1} is refused: forebay trains'),
        ("gradient_predivide_factor", 2.0, "2.0 is refused: gradients are averaged once"),
    ],
)  # fmt: skip
def test_refused(path: str, value: object, message: str) -> None:
    text = str(refusal(nested(path, value)))
    assert text.startswith(f"config key {path} = {message}")
    assert "\nhint: " in text


def test_budgets_and_units_are_printed_in_bytes() -> None:
    config = resolved(
        STAGE2_CPU,
        {"forebay": {"device_budget": "20GiB", "host_budget": 2**34}},
        {"zero_optimization": {"sub_group_size": 5e7}},
    )
    assert config.budgets == BudgetSpec(device_bytes=20 * 2**30, host_bytes=2**34)
    assert _row(config, "forebay.device_budget")[0] == "20.0 GiB"
    assert config.zero.unit_elements == 50_000_000
    size = "50000000 elements (95.4 MiB in bfloat16)"
    assert _row(config, "zero_optimization.sub_group_size")[0] == size
    bucket = "500000000 elements (953.7 MiB in bfloat16)"
    assert _row(config, "zero_optimization.reduce_bucket_size")[0] == bucket


@pytest.mark.parametrize(
    ("given", "units"),
    [(1e9, None), (0, 1), (1, 1), (2, 2), ("auto", None), (10**9 + 1, 10**9 + 1)],
)
def test_sub_group_size(given: object, units: int | None) -> None:
    config = resolved(nested("zero_optimization.sub_group_size", given))
    assert config.zero.unit_elements == units


@pytest.mark.parametrize("size", ["24", "24G", -1, "1.0x", True])
def test_budgets_are_strict(size: object) -> None:
    message = str(refusal({"forebay": {"host_budget": size}}))
    assert 'forebay.host_budget must be a size such as "24GiB", or a number of bytes' in message


def test_tensorboard() -> None:
    assert resolved({"tensorboard": {"enabled": False, "job_name": "x"}}).tensorboard is None
    config = resolved({"tensorboard": {"enabled": True, "output_path": "runs", "job_name": "x"}})
    assert config.tensorboard == TensorBoardSpec(output_path="runs", job_name="x")


_CASES: list[dict[str, Any]] = [
    {},
    STAGE2_CPU,
    {"fp16": {"enabled": True, "loss_scale": 64}, "gradient_clipping": 0},
    {"fp16": {"enabled": True, "hysteresis": 4}, "zero_optimization": {"sub_group_size": 0}},
    {"bf16": {"enabled": True, "check_grad_overflow": False}, "steps_per_print": 10},
    {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
    {"optimizer": {"type": "Adam", "params": {"lr": 0}}, "dataloader_drop_last": True},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-4, 1e-5]}}},
    {"forebay": {"device_budget": "1GiB", "host_budget": "2GiB", "synchronous": True}},
    {"tensorboard": {"enabled": True}, "train_batch_size": 12, "gradient_accumulation_steps": 3},
]


@pytest.mark.parametrize("case", _CASES, ids=range(len(_CASES)))
def test_json_resolves_to_the_same(case: dict[str, Any]) -> None:
    config = resolved(case)
    assert resolve(json.loads(config.as_json())) == config


def test_table_is_plain_and_aligned() -> None:
    lines = resolved(STAGE2_CPU).table().splitlines()
    column = lines[0].index("value")
    assert all(line[column - 1] == " " != line[column] for line in lines)
    stage = next(line.split() for line in lines if line.startswith("zero_optimization.stage"))
    assert stage == ["zero_optimization.stage", "2", "given"]


def test_the_configuration_is_not_changed() -> None:
    raw = {"zero_optimization": {"cpu_offload": True}, "bfloat16": {"enabled": "auto"}}
    before = json.dumps(raw)
    resolved(raw, model_dtype="float32")
    assert json.dumps(raw) == before


def test_frozen() -> None:
    config = resolved({})
    with pytest.raises(AttributeError):
        config.clip_norm = 2.0  # type: ignore[misc]
    assert hash(config.zero) == hash(resolved({}).zero)


@pytest.mark.parametrize("module", ["forebay.config", "forebay.config.resolved"])
def test_results_need_neither_pydantic_nor_torch(module: str) -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None; sys.modules['torch'] = None; "
        f"import {module} as m; print(m.ResolvedConfig().clip_norm)"
    )
    assert python(code).stdout.strip() == "1.0"
