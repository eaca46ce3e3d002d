"""The schema: pydantic models made from the table, and what they do not say well themselves.

`check` takes the dict that `forebay.config.reader` read and returns the values by path. It knows
names and types; which values forebay can act on, and what they mean together, is the business of
`forebay.config.support` and `forebay.config.resolve`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError, create_model

from forebay.config.keys import Auto, Key
from forebay.config.names import type_problem
from forebay.config.problems import Problem, raise_any, shown
from forebay.config.suggest import join, suggestion
from forebay.config.tables import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Values", "check", "model"]

# Sections whose `type` decides which `params` there are.
_TYPED: Final = ("optimizer", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A configuration with known keys and right types.

    Attributes:
        given: Path -> value of every key that was written, in order; aliases under their full
            name. An opaque section is one value.
        sections: Paths of the sections that were written and not null.
        autos: Paths of the keys that are "auto".
        names: Path -> name as written, of the keys that were written under another name.
    """

    given: Mapping[str, Any]
    sections: frozenset[str]
    autos: frozenset[str]
    names: Mapping[str, str]

    def name(self, path: str) -> str:
        """What the configuration calls the key."""
        return self.names.get(path, path)


def check(raw: Mapping[str, Any]) -> Values:
    """Checks names and types.

    Args:
        raw: The configuration as read.

    Raises:
        ConfigError: Unknown keys, with the nearest known ones, or else wrong types; all of them.
    """
    walk = _Walk(raw)
    tree = walk.level(raw, path="", name="")
    raise_any(walk.problems)
    try:
        checked = model("").model_validate(tree)
    except ValidationError as error:
        raise_any([_type_problem(item["loc"], item["input"], walk) for item in error.errors()])
        raise
    given: dict[str, Any] = {}
    _flatten(checked, path="", into=given)
    return Values(
        given=given,
        sections=frozenset(walk.sections),
        autos=frozenset(walk.autos),
        names=walk.names,
    )


@functools.cache
def model(level: str) -> type[BaseModel]:
    """The pydantic model of a section; "" is the whole configuration."""
    fields: dict[str, Any] = {}
    for key in dict.fromkeys(TABLE.levels[level].values()):
        if key.is_section:
            fields[key.name] = (model(key.path) | None, None)
        elif key.kind is None:
            fields[key.name] = (Any, None)
        else:
            fields[key.name] = (Annotated[Any, PlainValidator(key.kind.check)], None)
    name = "".join(word.title() for word in level.replace(".", "_").split("_"))
    return create_model(
        name or "Configuration",
        __config__=ConfigDict(extra="forbid", frozen=True, protected_namespaces=()),
        **fields,
    )


class _Walk:
    """One pass over the raw tree: names, aliases, nulls and "auto"."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.sections: list[str] = []
        self.autos: list[str] = []
        self.names: dict[str, str] = {}
        self._types: dict[str, str] = {}
        for section in _TYPED:
            content = raw.get(section)
            name = content.get("type") if isinstance(content, dict) else None
            if isinstance(name, str):
                self._types[section] = name

    def level(self, raw: Mapping[str, Any], *, path: str, name: str) -> dict[str, Any]:
        """The section under full names, without nulls that say nothing and without "auto".

        Args:
            raw: The section.
            path: Its path.
            name: What the configuration calls it.
        """
        tree: dict[str, Any] = {}
        written: dict[str, str] = {}
        for part, value in raw.items():
            key = TABLE.levels[path].get(part)
            if key is None or self._is_foreign(key):
                self._unknown(part, key, level=path)
            elif key.name in written:
                other = written[key.name]
                self._problem(
                    f"config keys {join(name, other)} and {join(name, part)} mean the same",
                    "delete one of the two",
                )
            else:
                written[key.name] = part
                if join(name, part) != key.path:
                    self.names[key.path] = join(name, part)
                self._key(key, value, tree)
        return tree

    def _key(self, key: Key, value: object, tree: dict[str, Any]) -> None:
        name = self.names.get(key.path, key.path)
        if key.is_section:
            self._section(key, value, tree)
        elif value == "auto" and key.auto is not Auto.LITERAL and not key.is_opaque:
            if key.auto is Auto.NEVER:
                self._problem(
                    f'config key {name} is "auto", and nobody here knows its value',
                    f"write {key.kind.name if key.kind else 'a value'}",
                )
            self.autos.append(key.path)
        elif value is not None or key.default is not None:
            tree[key.name] = value

    def _section(self, key: Key, value: object, tree: dict[str, Any]) -> None:
        name = self.names.get(key.path, key.path)
        if value is None:
            return
        if key.path == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        if not isinstance(value, dict):
            self._problem(
                f"config key {name} must be an object, not {shown(value)}",
                f"its keys are {', '.join(list(TABLE.levels[key.path])[:8])}",
            )
            return
        self.sections.append(key.path)
        section = key.level
        if section in _TYPED and key.name == "params":
            problem = (
                type_problem(section, self._types[section]) if section in self._types else None
            )
            if problem is not None:
                # Whose parameters these are is not known.
                return
        tree[key.name] = self.level(value, path=key.path, name=name)

    def _is_foreign(self, key: Key) -> bool:
        """Whether the key belongs to another type of the section above."""
        return bool(key.only_for) and self._types.get("scheduler", key.only_for[0]) not in (
            key.only_for
        )

    def _unknown(self, name: str, key: Key | None, *, level: str) -> None:
        if key is None:
            self._problem(
                f"config key {join(level, name)} is not known",
                suggestion(name, level=level, levels=self._levels()),
            )
        else:
            self._problem(
                f"config key {key.path} is not known for {self._types['scheduler']}",
                f"it belongs to {', '.join(key.only_for)}",
            )

    def _levels(self) -> dict[str, dict[str, Key]]:
        return {
            level: {name: key for name, key in names.items() if not self._is_foreign(key)}
            for level, names in TABLE.levels.items()
        }

    def _problem(self, message: str, hint: str) -> None:
        self.problems.append(Problem(message, hint))


def _type_problem(location: tuple[int | str, ...], value: object, walk: _Walk) -> Problem:
    key = TABLE[".".join(str(part) for part in location)]
    kind = key.kind.name if key.kind else "an object"
    name = walk.names.get(key.path, key.path)
    return Problem(f"config key {name} must be {kind}, not {shown(value)}", _unquoted(key, value))


def _unquoted(key: Key, value: object) -> str | None:
    """A hint where the text of a value would do as the value itself, as YAML's 1e-4 is text."""
    if not isinstance(value, str) or key.kind is None:
        return None
    try:
        plain = json.loads(value.lower())
        key.kind.check(plain)
    except (ValueError, RecursionError):
        return None
    return f"write {json.dumps(plain)}, without quotes"


def _flatten(section: BaseModel, *, path: str, into: dict[str, Any]) -> None:
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            _flatten(value, path=join(path, name), into=into)
        else:
            into[join(path, name)] = value
