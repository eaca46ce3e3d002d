"""The batch equation, and errors that show the numbers as they were written."""

from __future__ import annotations

from typing import Any

import pytest

from config_cases import refusal
from forebay.config import BatchSpec, Facts, Source
from forebay.config.batch import solve_batch
from forebay.config.resolve import resolve
from forebay.errors import ConfigError

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((64, 4, 16), 1, (64, 4, 16)),
        ((64, 4, None), 1, (64, 4, 16)),
        ((64, None, 4), 1, (64, 16, 4)),
        ((None, 4, 4), 1, (16, 4, 4)),
        ((64, None, None), 1, (64, 64, 1)),
        ((None, 4, None), 1, (4, 4, 1)),
        ((64, 4, None), 8, (64, 4, 2)),
        ((64, None, 2), 8, (64, 4, 2)),
        ((None, 4, 2), 8, (64, 4, 2)),
        ((64, None, None), 8, (64, 8, 1)),
        ((None, 4, None), 8, (32, 4, 1)),
        ((64, 4, 2), 8, (64, 4, 2)),
    ],
)
def test_triples(given: tuple[int | None, ...], world: int, expected: tuple[int, int, int]) -> None:
    train, micro, steps = given
    batch = solve_batch(train=train, micro=micro, steps=steps, world_size=world)
    assert batch == BatchSpec(
        train_batch_size=expected[0],
        micro_batch_size=expected[1],
        accumulation_steps=expected[2],
        world_size=world,
    )


@pytest.mark.parametrize(
    ("given", "world", "message", "hint"),
    [
        (
            (64, 4, 3),
            1,
            "train_batch_size 64 = train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps 3 x 1 process, and the right side is 12",
            "write train_batch_size 12",
        ),
        (
            (10, 4, None),
            1,
            "train_batch_size 10 = train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps (not given) x 1 process, and 4 does not divide 10",
            "write train_batch_size 8 or 12",
        ),
        (
            (4, None, 2),
            8,
            "train_batch_size 4 = train_micro_batch_size_per_gpu (not given) x "
            "gradient_accumulation_steps 2 x 8 processes, and 16 does not divide 4",
            "write train_batch_size 16",
        ),
        ((None, None, 4), 1, "no batch size is known", "write train_micro_batch_size_per_gpu"),
        ((None, None, None), 2, "no batch size is known", "write train_micro_batch_size_per_gpu"),
    ],
)
def test_contradictions_show_the_users_numbers(
    given: tuple[int | None, ...], world: int, message: str, hint: str
) -> None:
    train, micro, steps = given
    with pytest.raises(ConfigError) as caught:
        solve_batch(train=train, micro=micro, steps=steps, world_size=world)
    assert message in caught.value.message
    assert str(caught.value.hint).startswith(hint)


def _sources(raw: dict[str, Any], **facts: Any) -> dict[str, tuple[str, Source]]:
    rows = resolve(raw, facts=Facts(**facts)).describe()
    return {
        row.path: (row.value, row.source) for row in rows if row.path in (_TRAIN, _MICRO, _STEPS)
    }


def test_auto_is_the_callers() -> None:
    raw = {_TRAIN: "auto", _MICRO: "auto", _STEPS: "auto"}
    assert _sources(raw, micro_batch_size=4, accumulation_steps=2) == {
        _TRAIN: ("8", Source.DERIVED),
        _MICRO: ("4", Source.AUTO),
        _STEPS: ("2", Source.AUTO),
    }


def test_fallback_fills_only_what_nobody_says() -> None:
    assert _sources({}, fallback_micro_batch_size=2)[_MICRO] == ("2", Source.CALLER)
    assert _sources({_MICRO: "auto"}, fallback_micro_batch_size=2)[_MICRO] == ("2", Source.AUTO)
    assert _sources({_TRAIN: 8}, fallback_micro_batch_size=2)[_MICRO] == ("8", Source.DERIVED)
    assert _sources({_TRAIN: 8, _MICRO: "auto"}, fallback_micro_batch_size=2)[_STEPS] == (
        "1",
        Source.DERIVED,
    )


def test_auto_is_derived_where_the_equation_allows() -> None:
    raw = {_TRAIN: 64, _MICRO: 4, _STEPS: "auto"}
    assert _sources(raw)[_STEPS] == ("16", Source.DERIVED)


def test_auto_that_nobody_knows() -> None:
    error = refusal({_TRAIN: "auto", _MICRO: "auto"}, fallback_micro_batch_size=None)
    assert (
        "train_batch_size (not given) = train_micro_batch_size_per_gpu (not given) x "
        "gradient_accumulation_steps (not given) x 1 process; train_batch_size, "
        'train_micro_batch_size_per_gpu are "auto", and the caller does not know'
    ) in str(error)
    assert "forebay train" in str(error.hint)


def test_configuration_and_command_line_differ() -> None:
    error = refusal({_MICRO: 4}, micro_batch_size=8, asker="forebay train")
    assert str(error) == (
        "config key train_micro_batch_size_per_gpu is 4, and forebay train says 8\n"
        'hint: write "auto" for train_micro_batch_size_per_gpu, or say the same in both places'
    )


@pytest.mark.parametrize("facts", [{"micro_batch_size": 0}, {"accumulation_steps": -1}])
def test_facts_are_checked_too(facts: dict[str, Any]) -> None:
    assert "must be an integer >= 1, and the caller says" in str(refusal({}, **facts))
