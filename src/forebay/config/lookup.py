"""Values by path: from the configuration, the caller's facts or the defaults, with a row for each.

A `Lookup` is made for one resolution and thrown away. Whatever it hands out is written down as a
`Row`, so that the printed configuration is complete by construction.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from forebay.config.keys import Auto, Key, Status
from forebay.config.kinds import ElementsOf
from forebay.config.resolved import Row, Source
from forebay.config.tables import TABLE
from forebay.errors import ConfigError
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.config.facts import Facts
    from forebay.config.schema import Values

__all__ = ["Lookup", "elements_text", "unresolved"]

# The run may be shorter than the schedule, so these two may differ.
_NOT_BINDING: Final = frozenset({"total_steps"})
# fp32 master and two moments.
_STATE_ITEM_BYTES: Final = 12
_ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Lookup:
    """Answers for the keys of one configuration.

    Args:
        values: The checked configuration.
        facts: What the caller knows.
    """

    def __init__(self, values: Values, facts: Facts) -> None:
        self.values = values
        self.facts = facts
        self._rows: dict[str, Row] = {}
        self._dtype = "float32"
        for key in TABLE:
            if key.fact and (value := getattr(facts, key.fact)) is not None:
                self._check_fact(key, value)

    def take(self, path: str, *, note: str = "") -> Any:
        """The value of a key; it gets a row.

        Raises:
            ConfigError: It is "auto" and nobody knows it, or configuration and facts differ.
        """
        value, source = self.answer(path)
        self.record(path, value, source, note=note)
        return value

    def answer(self, path: str) -> tuple[Any, Source]:
        """`take` without the row."""
        key = TABLE[path]
        fact = getattr(self.facts, key.fact) if key.fact else None
        if path in self.values.given:
            return self._given(key, fact)
        is_auto = path in self.values.autos
        if fact is not None:
            return fact, Source.AUTO if is_auto else Source.CALLER
        if is_auto and key.auto is not Auto.DEFAULT:
            raise unresolved(path, self.facts)
        return key.default, Source.AUTO if is_auto else Source.DEFAULT

    def is_written(self, path: str) -> bool:
        """Whether the configuration has the key, "auto" included."""
        return path in self.values.given or path in self.values.autos

    def record(self, path: str, value: object, source: Source, *, note: str = "") -> None:
        """Writes the row of a key; a later one takes its place."""
        text = self._text(TABLE[path], value)
        self._rows[path] = Row(path=path, value=text, source=source, note=note)

    def has_row(self, path: str) -> bool:
        """Whether the key has a row already."""
        return path in self._rows

    def annotate(self, path: str, note: str) -> None:
        """Sets the note of a row that is there."""
        self._rows[path] = dataclasses.replace(self._rows[path], note=note)

    def moot(self, paths: list[str], *, note: str) -> None:
        """Writes rows for those of the keys that were written and do not act."""
        for path in paths:
            if self.is_written(path):
                value, source = self.answer(path)
                self.record(path, value, source, note=note)

    def use_dtype(self, dtype: str) -> None:
        """Sets the dtype in which numbers of elements are printed as bytes."""
        self._dtype = dtype

    def rows(self) -> tuple[Row, ...]:
        """All rows in the order of the table, with the hints that were given."""
        for key in TABLE:
            if not self.is_written(key.path) or key.path in self._rows:
                continue
            # Refused keys that are here ask for nothing; what is honoured has been taken.
            assert key.status is not Status.HONOURED, f"{key.path} was given and nobody read it"
            if key.status is Status.HINT:
                value, source = self.answer(key.path)
                note = f"changes nothing: {key.reason}"
                self.record(key.path, value, source, note=note)
        order = {key.path: index for index, key in enumerate(TABLE)}
        return tuple(sorted(self._rows.values(), key=lambda row: order[row.path]))

    def _given(self, key: Key, fact: object) -> tuple[Any, Source]:
        value = self.values.given[key.path]
        if fact is not None and fact != value and key.fact not in _NOT_BINDING:
            raise ConfigError(
                f"config key {key.path} is {self._text(key, value)}, and {self.facts.asker} says "
                f"{self._text(key, fact)}",
                hint=f'write "auto" for {key.path}, or say the same in both places',
            )
        return value, Source.GIVEN

    def _check_fact(self, key: Key, value: object) -> None:
        assert key.kind is not None
        try:
            key.kind.check(value)
        except ValueError as error:
            raise ConfigError(
                f"{key.fact} must be {key.kind.name}, and {self.facts.asker} says {value!r}"
            ) from error

    def _text(self, key: Key, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            if key.kind is not None and key.kind.elements_of is not None:
                return elements_text(value, key.kind.elements_of, dtype=self._dtype)
            if key.path.endswith("_budget"):
                return format_bytes(value)
        return value if isinstance(value, str) else json.dumps(value)


def elements_text(count: int, of: ElementsOf, *, dtype: str) -> str:
    """A number of elements, and what they take.

    Example:
        >>> elements_text(65536, ElementsOf.STATE, dtype="bfloat16")
        '65536 elements (768.0 KiB of state)'
    """
    if of is ElementsOf.STATE:
        return f"{count} elements ({format_bytes(count * _STATE_ITEM_BYTES)} of state)"
    return f"{count} elements ({format_bytes(count * _ITEM_BYTES[dtype])} in {dtype})"


def unresolved(path: str, facts: Facts) -> ConfigError:
    """The error for an "auto" that nobody answers."""
    key = TABLE[path]
    who = "a trainer that knows it, such as forebay train"
    if key.auto is Auto.MODEL:
        who = "a caller that knows the model's dtype"
    kind = key.kind.name if key.kind else "a value"
    return ConfigError(
        f'config key {path} is "auto", and {facts.asker} does not know its value',
        hint=f"write {kind}, or leave it to {who}",
    )
