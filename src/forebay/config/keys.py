"""One row for each configuration key: its type, default, status and meaning.

The rows are data, in `forebay.config.tables`. The schema, the checks, "did you mean" and the
reference page are made from them; to support a key is to change its row. This module holds the
row's type and the ways to look rows up.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from forebay.config.kinds import Kind

__all__ = [
    "NOT_YET",
    "Auto",
    "Key",
    "Status",
    "Table",
    "hint",
    "honoured",
    "moot",
    "opaque",
    "refused",
    "section",
]

# How the reason of a refusal starts when later work is to lift it.
NOT_YET: Final = "not supported yet"


class Status(enum.Enum):
    """What forebay does with a key."""

    HONOURED = "honoured"
    """It has its documented meaning."""
    HINT = "hint"
    """It is accepted and changes nothing; the resolved configuration says why."""
    REFUSED = "refused"
    """Only the values that ask for nothing pass."""


class Auto(enum.Enum):
    """Who answers when a key is "auto"."""

    NEVER = "never"
    """Nobody: it is an error."""
    DEFAULT = "default"
    """The default."""
    MODEL = "model"
    """The dtype of the model."""
    CALLER = "caller"
    """The trainer, through `Facts`; without it, an error."""
    LITERAL = "literal"
    """The text "auto" is one of the key's own values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Key:
    """What is known of one key.

    Attributes:
        path: Full name, with dots.
        kind: Type of the value; None for a section.
        default: DeepSpeed's default (forebay's, for keys of its own).
        status: What forebay does with it.
        meaning: One sentence for the reference page.
        accepts: Values that pass; None means all. A section that is refused as a whole accepts
            the values listed here only, null for example.
        reason: Why a hint changes nothing, or why other values are refused.
        instead: What to write instead of a refused value.
        auto: Who resolves "auto".
        fact: Field of `Facts` that fills the key, or "".
        aliases: Other names at the same level, which mean the same.
        only_for: Values of the neighbouring `type` key for which this key exists; empty: all.
        is_opaque: A section whose keys are not listed.
    """

    path: str
    kind: Kind | None
    default: object = None
    status: Status
    meaning: str
    accepts: tuple[object, ...] | None = None
    reason: str = ""
    instead: str = ""
    auto: Auto = Auto.NEVER
    fact: str = ""
    aliases: tuple[str, ...] = ()
    only_for: tuple[str, ...] = ()
    is_opaque: bool = False

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def level(self) -> str:
        """Path of the section that holds the key; "" at the top."""
        return self.path.rpartition(".")[0]

    @property
    def is_section(self) -> bool:
        """Whether the value is an object with keys that the table lists."""
        return self.kind is None and not self.is_opaque

    def passes(self, value: object) -> bool:
        """Whether the value is one that forebay can act on."""
        if self.accepts is None:
            return True
        # bool and int compare equal in Python; types must agree as well.
        return any(
            value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
            for accepted in self.accepts
        )


class _More(TypedDict, total=False):
    """What a row says beside its path, kind and meaning; see `Key`."""

    default: object
    accepts: tuple[object, ...]
    reason: str
    instead: str
    auto: Auto
    fact: str
    aliases: tuple[str, ...]
    only_for: tuple[str, ...]


def honoured(path: str, kind: Kind, meaning: str, **more: Unpack[_More]) -> Key:
    """A key with its documented meaning; with `accepts`, for those values only."""
    return Key(path=path, kind=kind, status=Status.HONOURED, meaning=meaning, **more)


def hint(path: str, kind: Kind, meaning: str, **more: Unpack[_More]) -> Key:
    """A key that changes nothing here; `reason` says why."""
    more.setdefault("auto", Auto.DEFAULT)
    return Key(path=path, kind=kind, status=Status.HINT, meaning=meaning, **more)


def refused(path: str, kind: Kind, meaning: str, **more: Unpack[_More]) -> Key:
    """A key whose default alone passes (or `accepts`); not supported yet, if no other `reason`."""
    more.setdefault("accepts", (more["default"],))
    more.setdefault("reason", NOT_YET)
    return Key(path=path, kind=kind, status=Status.REFUSED, meaning=meaning, **more)


def section(path: str, meaning: str, **more: Unpack[_More]) -> Key:
    """An object whose keys the table lists; refused as a whole when it has a `reason`."""
    status = Status.REFUSED if "reason" in more else Status.HONOURED
    if status is Status.REFUSED:
        more.setdefault("accepts", (None,))
    return Key(path=path, kind=None, status=status, meaning=meaning, **more)


def opaque(path: str, meaning: str, *, reason: str = NOT_YET, instead: str = "") -> Key:
    """An object whose keys are not listed: it passes empty, null or disabled."""
    return Key(
        path=path,
        kind=None,
        status=Status.REFUSED,
        meaning=meaning,
        accepts=(None, {}, {"enabled": False}),
        reason=reason,
        instead=instead,
        is_opaque=True,
    )


def moot(level: str, *, reason: str, rows: Mapping[str, tuple[Kind, object, str]]) -> list[Key]:
    """Keys of one section that all change nothing for one reason.

    Args:
        level: Path of the section.
        reason: Why.
        rows: Name -> kind, default, meaning.
    """
    return [
        hint(f"{level}.{name}", kind, meaning, default=default, reason=reason)
        for name, (kind, default, meaning) in rows.items()
    ]


class Table:
    """All rows, by path and by level.

    Args:
        keys: The rows. Every level but the top must have its section's row.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys: dict[str, Key] = {}
        self._levels: dict[str, dict[str, Key]] = {"": {}}
        for key in keys:
            if key.path in self._keys:
                raise ValueError(f"two rows for {key.path}")
            self._keys[key.path] = key
            if key.is_section:
                self._levels[key.path] = {}
            for name in (key.name, *key.aliases):
                self._levels[key.level][name] = key

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def __getitem__(self, path: str) -> Key:
        return self._keys[path]

    @property
    def levels(self) -> Mapping[str, Mapping[str, Key]]:
        """Section path -> accepted name (aliases too) -> row."""
        return self._levels
