"""The table of keys is complete and consistent, and every row is checked as it says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from config_cases import merged, nested, refusal, resolved
from forebay.config import Facts
from forebay.config.keys import NOT_YET, Auto, Key, Status
from forebay.config.kinds import ANYTHING
from forebay.config.schema import check, model
from forebay.config.tables import TABLE
from forebay.errors import ConfigError

_KEYS = list(TABLE)
_LEAVES = [key for key in _KEYS if key.kind is not None and key.kind is not ANYTHING]
# These need their neighbours, and have tests of their own.
_TOGETHER = (
    "optimizer.",
    "scheduler.",
    "train_batch_size",
    "zero_optimization.cpu_offload_param",
    "data_types.grad_accum_dtype",
    "data_types.param_dtype",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "forebay.streamed_units",
    "zero_optimization.zenflow.",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.offload_optimizer.ratio",
    "bf16.check_grad_overflow",
    "forebay.update",
)
_BY_PATH = pytest.mark.parametrize("key", _LEAVES, ids=lambda key: key.path)


def _alone(key: Key, value: object) -> dict[str, Any]:
    """A configuration with one key, and the type that it belongs to."""
    config = nested(key.path, value)
    if key.only_for:
        config = merged(config, {"scheduler": {"type": key.only_for[0]}})
    return config


def test_models_and_table_agree() -> None:
    """The schema has every key and no other."""
    for level, names in TABLE.levels.items():
        assert set(model(level).model_fields) == {key.name for key in names.values()}
        assert model(level).model_config["extra"] == "forbid"


def test_a_refusal_says_what_to_write() -> None:
    """One that only says where else to look would leave the configuration refused."""
    for key in _KEYS:
        said = key.instead.split(" ")[0]
        assert said in ("", "write", "delete", "leave"), f"{key.path}: {key.instead}"


def test_reasons_hold_over_ranks_too() -> None:
    for key in _KEYS:
        assert "in one process there is none" not in key.reason, key.path
    assert "delete comms_logger; wall_clock_breakdown" in str(
        refusal({"comms_logger": {"enabled": True}})
    )
    assert "DeepSpeed has removed it" in str(
        refusal({"zero_optimization": {"legacy_stage1": True}})
    )
    rows = {row.path: row.note for row in resolved({"disable_allgather": True}).rows}
    assert "weights are exchanged" in rows["disable_allgather"]


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: key.path)
def test_row_says_enough(key: Key) -> None:
    assert key.meaning.endswith((".", "?"))
    if key.status is Status.HINT:
        assert key.reason, "a hint says why it changes nothing"
        assert key.accepts is None, "a hint takes every value"
    if key.status is Status.REFUSED:
        assert key.reason
        assert key.accepts is not None
    if key.accepts is not None:
        assert key.reason
    if key.auto is Auto.CALLER:
        assert key.fact
    if key.fact:
        assert key.fact in Facts.__dataclass_fields__
    if key.level:
        assert TABLE[key.level].is_section


@_BY_PATH
def test_default_has_the_right_type(key: Key) -> None:
    assert key.kind is not None
    if key.default is not None:
        assert key.kind.check(key.default) == key.default


@_BY_PATH
@pytest.mark.parametrize("value", [{"x": 1}, "1.0x", math.nan, [[]]], ids=str)
def test_wrong_types_name_the_key(key: Key, value: object) -> None:
    assert key.kind is not None
    if isinstance(value, str) and "text" in key.kind.name:
        value = ["1.0x", 5]
    with pytest.raises(ConfigError, match="must be") as caught:
        check(_alone(key, value))
    assert f"config key {key.path} must be " in str(caught.value)


@_BY_PATH
def test_booleans_are_no_numbers_and_numbers_no_booleans(key: Key) -> None:
    assert key.kind is not None
    wrong = 1 if "true or false" in key.kind.name else True
    with pytest.raises(ConfigError, match="must be"):
        check(_alone(key, wrong))


_BOUNDED = [
    key
    for key in _LEAVES
    if key.kind is not None and any(word in key.kind.name for word in (">", "from 0", "integer"))
]


@pytest.mark.parametrize("key", _BOUNDED, ids=lambda key: key.path)
def test_numbers_have_bounds(key: Key) -> None:
    assert key.kind is not None
    values: list[Any] = [-1, -1e-9, math.inf, -math.inf]
    if "integer" in key.kind.name:
        values = [1.5, 2.0**63, -(2**63), -math.inf]
    if key.path == "optimizer.params.betas":
        values = [[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, True]]
    for value in values:
        with pytest.raises(ConfigError, match="must be"):
            check(_alone(key, value))


@_BY_PATH
def test_auto_is_answered_or_an_error(key: Key) -> None:
    if key.auto is Auto.LITERAL:
        return
    if key.auto is Auto.NEVER:
        with pytest.raises(ConfigError, match='is "auto", and nobody here knows'):
            check(_alone(key, "auto"))
    else:
        assert key.path in check(_alone(key, "auto")).autos


@pytest.mark.parametrize(
    "key",
    [key for key in _LEAVES if not key.path.startswith(_TOGETHER)],
    ids=lambda key: key.path,
)
def test_nothing_given_is_lost(key: Key) -> None:
    """What is honoured or a hint has a row; what is refused is an error, or asks for nothing."""
    section = next((k for k in _KEYS if key.path.startswith(f"{k.path}.") and k.reason), None)
    if section is not None:
        assert f"config key {section.path} = {{...}} is" in str(
            refusal(nested(key.path, _other(key)))
        )
        return
    for value in (key.default, _other(key)):
        if value is None:
            continue
        if key.passes(value):
            paths = {row.path for row in resolved(nested(key.path, value)).rows}
            assert (key.path in paths) == (key.status is not Status.REFUSED)
        else:
            message = str(refusal(nested(key.path, value), {"zero_optimization": {"stage": 3}}))
            assert f"config key {key.path} = " in message or "needs stage 3" in message
            assert "hint: " in message


def _other(key: Key) -> Any:
    """A value of the key's type that is not its default."""
    assert key.kind is not None
    for value in (
        not key.default,
        2,
        0.5,
        0.25,
        3,
        "nvme",
        "sum",
        "text",
        "1GiB",
        "fp16",
        ["text"],
        "warn",
        8192,
    ):
        try:
            checked = key.kind.check(value)
        except ValueError:
            continue
        if checked != key.default:
            return value
    for name in key.kind.name.replace(" or ", ", ").split(", "):
        if name.strip('"') != key.default:
            return name.strip('"')
    raise AssertionError(key.path)


def test_refusals_start_alike() -> None:
    """Later work finds what it is to lift by one text."""
    late = [key.path for key in _KEYS if key.reason.startswith(NOT_YET)]
    assert "activation_checkpointing.partition_activations" in late
    assert "memory_breakdown" in late
