"""Shared by the configuration tests: building configurations and reading errors."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.config import Facts, ResolvedConfig
from forebay.config.resolve import resolve
from forebay.errors import ConfigError

# As published for single-GPU fine-tuning with optimizer state on the host.
STAGE2_CPU: dict[str, Any] = {
    "train_batch_size": 16,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    },
}


def nested(path: str, value: object) -> dict[str, Any]:
    """The configuration that holds one key."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


# A section `zenflow` with which all that it does happens within a few steps.
ZENFLOW = {
    "topk_ratio": 0.3,
    "select_strategy": "step",
    "select_interval": 5,
    "update_interval": 3,
    "full_warm_up_rounds": 2,
    "overlap_step": True,
}


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both configurations; the second wins."""
    result = dict(first)
    for name, value in second.items():
        old = result.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[name] = merged(old, value) if both else value
    return result


def resolved(*parts: dict[str, Any], **facts: Any) -> ResolvedConfig:
    """Resolves the merged parts, with a batch size in case none is given."""
    raw: dict[str, Any] = {}
    for part in parts:
        raw = merged(raw, part)
    return resolve(raw, facts=Facts(**{"fallback_micro_batch_size": 1, **facts}))


def refusal(*parts: dict[str, Any], **facts: Any) -> ConfigError:
    """The error that the merged parts end in."""
    with pytest.raises(ConfigError) as caught:
        resolved(*parts, **facts)
    return caught.value
