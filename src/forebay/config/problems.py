"""What is wrong with a configuration, gathered so that one error names all of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Problem", "raise_any", "shown"]

_MOST_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    message: str
    hint: str | None = None


def raise_any(problems: Sequence[Problem]) -> None:
    """Raises one `ConfigError` with every problem, in order; returns if there is none."""
    if not problems:
        return
    *others, last = problems
    lines = [
        line
        for problem in others
        for line in (problem.message, problem.hint and f"hint: {problem.hint}")
        if line
    ]
    raise ConfigError("\n".join([*lines, last.message]), hint=last.hint)


def shown(value: object) -> str:
    """A value as JSON would write it, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        # No JSON value, one that holds itself, or an integer too long to be printed.
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
