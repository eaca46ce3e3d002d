"""The configuration of a run: what options add, and what they may not contradict."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from forebay.errors import ConfigError
from forebay.train.model import ModelSource
from forebay.train.options import Offload, Schedule, TrainOptions
from forebay.train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.config.resolved import ResolvedConfig


def settings(folder: Path, *, scratch: bool = True, dtype: str = "float32", **changes: Any) -> Any:
    source = ModelSource(
        folder=folder, is_from_scratch=scratch, config=None, kind="llama", dtype=dtype,
        vocabulary=259, context=64,
    )  # fmt: skip
    options = TrainOptions(model=folder, data=(folder,), output=folder, **changes)
    return Settings.read(options, source=source)


def resolved(folder: Path, **changes: Any) -> ResolvedConfig:
    result: ResolvedConfig = settings(folder, **changes).final(100)
    return result


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


def test_without_a_configuration(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert (config.zero.stage, config.zero.optimizer_tier) == (2, "host")
    assert (config.batch.micro_batch_size, config.batch.accumulation_steps) == (8, 1)
    assert config.clip_norm == 1.0
    assert config.optimizer is not None
    assert (config.optimizer.name, config.optimizer.lr) == ("AdamW", 3e-4)
    assert config.scheduler is not None
    params = dict(config.scheduler.params)
    assert config.scheduler.name == "WarmupCosineLR"
    assert (params["total_num_steps"], params["warmup_num_steps"]) == (100, 5)


def test_options_fill_in(tmp_path: Path) -> None:
    config = resolved(
        tmp_path, scratch=False, offload=Offload.NONE, batch_size=2, accumulation=3,
        warmup_steps=7, schedule=Schedule.CONSTANT,
        overrides=("gradient_clipping=0.5", "steps_per_print=3"),
    )  # fmt: skip
    assert config.zero.optimizer_tier == "device"
    assert config.batch.train_batch_size == 6
    assert config.optimizer is not None
    assert config.optimizer.lr == 2e-5
    assert config.clip_norm == 0.5
    assert config.steps_per_print == 3
    assert config.scheduler is not None
    params = dict(config.scheduler.params)
    assert (params["warmup_num_steps"], params["cos_min_ratio"]) == (7, 1.0)


def test_auto_is_answered(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                },
            },
        },
    )  # fmt: skip
    config = resolved(
        tmp_path, config=path, dtype="bfloat16", learning_rate=1e-3, accumulation=2, batch_size=4
    )
    assert config.precision.dtype == "bfloat16"
    assert config.batch.train_batch_size == 8
    assert config.optimizer is not None
    assert config.optimizer.lr == 1e-3
    assert config.scheduler is not None
    assert dict(config.scheduler.params)["warmup_num_steps"] == 5


def test_numbers_of_the_configuration_stand(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "train_batch_size": 12,
            "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 1000, "warmup_num_steps": "auto"},
            },
        },
    )
    config = resolved(tmp_path, config=path)
    assert config.batch.micro_batch_size == 4
    assert config.optimizer is not None
    assert config.optimizer.lr == 5e-4
    assert config.scheduler is not None
    # A twentieth of the schedule's own length, which may be longer than this run.
    assert dict(config.scheduler.params)["warmup_num_steps"] == 50


@pytest.mark.parametrize(
    ("overrides", "dtype", "expected"),
    [
        ((), "bfloat16", "bfloat16"),
        ((), "float16", "float16"),
        (("bf16.enabled=true",), "float32", "bfloat16"),
        (("bf16.enabled=false",), "bfloat16", "float32"),
        (("bf16.enabled=true",), "float16", "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, overrides: tuple[str, ...], dtype: str, expected: str) -> None:
    config = resolved(tmp_path, overrides=overrides, dtype=dtype)
    assert config.precision.dtype == expected


def test_draft_knows_no_length_and_complains_of_none(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 10, "warmup_num_steps": "auto"},
            }
        },
    )
    assert settings(tmp_path, config=path).draft().batch.micro_batch_size == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a.b=true", {"a": {"b": True}}),
        ("a.b=text", {"a": {"b": "text"}}),
        ('a.b={"c": [1]}', {"a": {"b": {"c": [1]}}}),
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        ("a=", {"a": ""}),
    ],
)
def test_overrides(text: str, expected: dict[str, Any]) -> None:
    from forebay.train.settings import _override

    raw: dict[str, Any] = {}
    _override(raw, text)
    assert raw == expected


@pytest.mark.parametrize("text", ["a", "=1", ".a=1", "a..b=1"])
def test_overrides_that_cannot_be_read(text: str) -> None:
    from forebay.train.settings import _override

    with pytest.raises(ConfigError, match="cannot read the override"):
        _override({}, text)
