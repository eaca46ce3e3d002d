"""Typed reading of JSON objects that nobody vouches for: every wrong type is one error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Container
    from enum import Enum

    _E = TypeVar("_E", bound=Enum)

__all__ = ["Fields"]

# 2^53: what JSON readers of other languages hold exactly.
_MAX: Final = 1 << 53


class Fields:
    """One JSON object.

    Args:
        values: Its entries.
        what: The file, for messages.
    """

    def __init__(self, values: dict[str, Any], *, what: str) -> None:
        self.values = values
        self._what = what

    def error(self, problem: str) -> CheckpointError:
        """An error about this object."""
        return CheckpointError(f"{self._what} {problem}")

    def _get(self, name: str, kind: type) -> Any:
        value = self.values.get(name)
        if type(value) is not kind:
            raise self.error(f"has no proper {name[:80]!r}")
        return value

    def text(self, name: str) -> str:
        """A text."""
        value: str = self._get(name, str)
        return value

    def choice_text(self, name: str, choices: Container[str]) -> str:
        """One of several texts."""
        value = self.text(name)
        if value not in choices:
            raise self.error(f"has the unknown {name} {value[:20]!r}")
        return value

    def choice(self, name: str, kind: type[_E]) -> _E:
        """A member of an enum by its value."""
        return kind(self.choice_text(name, {member.value for member in kind}))

    def flag(self, name: str) -> bool:
        """True or false."""
        value: bool = self._get(name, bool)
        return value

    def size(self, name: str) -> int:
        """A number from 0 to 2^53."""
        value: int = self._get(name, int)
        if not 0 <= value <= _MAX:
            raise self.error(f"has the impossible {name} {str(value)[:30]}")
        return value

    def sizes(self, name: str) -> list[int]:
        """A list of such numbers."""
        value: list[int] = self._get(name, list)
        if not all(type(item) is int and 0 <= item <= _MAX for item in value):
            raise self.error(f"has an impossible number in {name}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        value: list[str] = self._get(name, list)
        if not all(type(item) is str for item in value):
            raise self.error(f"has something that is no text in {name}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object."""
        value: dict[str, Any] = self._get(name, dict)
        return value

    def mapping_or_none(self, name: str) -> dict[str, Any] | None:
        """An object, or null."""
        return None if self.values.get(name) is None else self.mapping(name)

    def child(self, name: str) -> Fields:
        """An object, to be read on."""
        return Fields(self.mapping(name), what=self._what)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        value: list[Any] = self._get(name, list)
        if not all(type(item) is dict for item in value):
            raise self.error(f"has something that is no object in {name}")
        return [Fields(item, what=self._what) for item in value]
