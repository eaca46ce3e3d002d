"""No misspelling of any key at any level is accepted, and the hint names the right key."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from config_cases import nested
from forebay.config.schema import check
from forebay.config.suggest import distance, nearest
from forebay.config.tables import TABLE
from forebay.errors import ConfigError

_ALPHABET = string.ascii_lowercase + string.ascii_uppercase + string.digits + "_-. é"
# Every accepted name of every level, aliases too.
_NAMES = [(level, name) for level, names in TABLE.levels.items() for name in names]


@st.composite
def edits(draw: st.DrawFn, word: str) -> str:
    """One deletion, insertion, swap of neighbours or substitution."""
    kind = draw(st.sampled_from(["delete", "insert", "swap", "substitute"]))
    if kind == "insert":
        at = draw(st.integers(0, len(word)))
        return word[:at] + draw(st.sampled_from(_ALPHABET)) + word[at:]
    at = draw(st.integers(0, len(word) - 1))
    if kind == "swap" and at + 1 < len(word):
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    letter = "" if kind == "delete" else draw(st.sampled_from(_ALPHABET))
    return word[:at] + letter + word[at + 1 :]


def _configuration(level: str, name: str) -> tuple[dict[str, Any], set[str]]:
    """A configuration with one name at a level, and the names that are valid there."""
    if not level:
        return {name: None}, set(TABLE.levels[level])
    config = nested(level, {name: None})
    names = TABLE.levels[level]
    if level == "scheduler.params":
        # Which schedule is asked for decides which keys there are.
        config["scheduler"]["type"] = "OneCycle"
        return config, {n for n, key in names.items() if "OneCycle" in (key.only_for or "OneCycle")}
    return config, set(names)


@pytest.mark.parametrize(("level", "name"), _NAMES, ids=lambda part: part or "top")
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_one_edit_is_refused_and_undone_by_the_hint(
    level: str, name: str, data: st.DataObject
) -> None:
    wrong = data.draw(edits(name))
    config, valid = _configuration(level, wrong)
    assume(wrong not in valid)
    with pytest.raises(ConfigError) as caught:
        check(config)
    path = f"{level}.{wrong}" if level else wrong
    error = caught.value
    assert error.message.startswith(f"config key {path} is not known")
    if name in valid:
        right = f"{level}.{name}" if level else name
        assert error.hint is not None
        assert error.hint.startswith("did you mean ")
        assert right in error.hint.removeprefix("did you mean ").rstrip("?").split(" or ")


@given(first=st.text("abc_", max_size=6), second=st.text("abc_", max_size=6), data=st.data())
def test_distance(first: str, second: str, data: st.DataObject) -> None:
    """A symmetric distance that is 0 for equal words only and at most 1 after one edit."""
    assert distance(first, second) == distance(second, first)
    assert (distance(first, second) == 0) == (first == second)
    assert distance(first, second) >= abs(len(first) - len(second))
    if first:
        assert distance(first, data.draw(edits(first))) <= 1


@given(name=st.text(min_size=1, max_size=12))
def test_nearest_offers_only_candidates(name: str) -> None:
    candidates = ["stage", "fp16", "bf16", "offload_optimizer"]
    assert set(nearest(name, candidates)) <= set(candidates)
