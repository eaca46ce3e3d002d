"""Whatever stands in a configuration, it resolves or ends in one `ConfigError`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config_cases import merged, nested
from forebay.config import Facts, ResolvedConfig
from forebay.config.reader import parse
from forebay.config.resolve import resolve
from forebay.config.tables import TABLE
from forebay.errors import ConfigError

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "cpu", "nvme", "fp32", "bf16", "1GiB", "AdamW", "OneCycle"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([key.name for key in TABLE]), inner, max_size=3)
    ),
    max_leaves=5,
)
_PATHS = [key.path for key in TABLE]


@st.composite
def _configurations(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(_PATHS), max_size=6)):
        config = merged(config, nested(path, draw(_VALUES)))
    return config


@settings(max_examples=300, deadline=None)
@given(config=_configurations(), dtype=st.sampled_from([None, "float32", "float16"]))
@example(config={"train_batch_size": 10**400}, dtype=None)
@example(config={"train_batch_size": 10**5000, "aio": {1.5, 2}}, dtype=None)
@example(config={"fp16": {"enabled": True, "initial_scale_power": 2**62}}, dtype=None)
@example(config={"fp16": {"enabled": True, "min_loss_scale": 5e-324}}, dtype=None)
@example(config={"zero_optimization": {"stage": []}}, dtype=None)
@example(config={"optimizer": {"type": {}, "params": 3}}, dtype=None)
def test_resolved_or_refused(config: dict[str, Any], dtype: str | None) -> None:
    facts = Facts(model_dtype=dtype, fallback_micro_batch_size=1, learning_rate=1e-3)
    try:
        result = resolve(config, facts=facts)
    except ConfigError as error:
        assert error.message
    else:
        assert isinstance(result, ResolvedConfig)
        assert resolve(json.loads(result.as_json())) == result
        assert result.table()


@given(text=st.text(alphabet='{}[]":,/*#\n\\ ab1', max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        assert isinstance(parse(text, name="text"), dict)
    except ConfigError as error:
        assert error.message.startswith("text")


def test_an_endless_integer() -> None:
    with pytest.raises(ConfigError, match="text is not JSON: Exceeds the limit"):
        parse(f'{{"train_batch_size": {"9" * 5000}}}', name="text")


@given(value=_VALUES)
def test_json_is_read_as_json(value: object) -> None:
    text = json.dumps({"value": value}, indent=1)
    # Through text, so that NaN, which equals nothing, compares too.
    assert json.dumps(parse(text, name="text"), indent=1) == text
