"""JSON into frozen values: every field present, known and within a sane range, or one line why not.

Driven by the dataclasses' own annotations; it knows no format by itself.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from forebay.errors import ConfigError

__all__ = ["Between", "decode"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Between:
    """What an annotated number may be, both ends included.

    Attributes:
        least: The smallest.
        most: The largest.
    """

    least: float
    most: float


def decode(kind: type[_T], data: Any, *, where: str, hint: str) -> _T:
    """Make a value of a dataclass from decoded JSON.

    Args:
        kind: The dataclass; fields are numbers annotated with `Between`, text, dataclasses, tuples
            of these, or None.
        data: Decoded JSON.
        where: What it is, for messages.
        hint: What to do about a wrong one.

    Raises:
        ConfigError: A field is missing, unknown or absurd; names it and the range.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be an object, not {type(data).__name__}", hint=hint)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for problem, names in (
        ("is not known", sorted(set(data) - set(known))),
        (
            "is missing",
            sorted(
                name
                for name, field in known.items()
                if name not in data and field.default is MISSING
            ),
        ),
    ):
        if names:
            raise ConfigError(f"{where}: {names[0]} {problem}", hint=hint)
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(
        **{
            name: _value(hints[name], value, where=f"{where}: {name}", hint=hint)
            for name, value in data.items()
        }
    )


def _value(hint_type: Any, value: Any, *, where: str, hint: str) -> Any:
    origin = typing.get_origin(hint_type)
    options = [one for one in typing.get_args(hint_type) if one is not types.NoneType]
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(options[0], value, where=where, hint=hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, not {type(value).__name__}", hint=hint)
        return tuple(
            _value(options[0], item, where=f"{where}[{place}]", hint=hint)
            for place, item in enumerate(value)
        )
    if is_dataclass(hint_type):
        return decode(typing.cast("type[Any]", hint_type), value, where=where, hint=hint)
    if hint_type is str:
        if not isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}; it must be text", hint=hint)
        return value
    kind, allowed = options
    return _number(kind, value, allowed=allowed, where=where)


def _number(kind: Any, value: Any, *, allowed: Between, where: str) -> Any:
    whole = kind is int
    accepted = int if whole else (int, float)
    number = isinstance(value, accepted) and not isinstance(value, bool)
    if not number or not allowed.least <= value <= allowed.most:
        noun = "a whole number" if whole else "a number"
        raise ConfigError(
            f"{where} is {value!r}; it must be {noun} between {allowed.least:g} and "
            f"{allowed.most:g}"
        )
    return value
