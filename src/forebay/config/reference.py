"""The reference page of the configuration, made from the table.

    python -m forebay.config.reference [FILE]

writes docs/reference/configuration.md. The page is committed, and a test compares the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.config.keys import NOT_YET, Auto, Key, Status
from forebay.config.tables import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["main", "page"]

_DEFAULT_PATH: Final = Path("docs/reference/configuration.md")
_INTRODUCTION: Final = """\
<!-- Made by `python -m forebay.config.reference`; change src/forebay/config/tables instead. -->

# Configuration

The DeepSpeed JSON, and one section `forebay`. A file may have comments and trailing commas. Keys
that are not listed here are errors, with the nearest listed key as a hint; so are values of
another type. Each listed key has one status:

- **honoured**: it does what its meaning says.
- **hint**: it is accepted and changes nothing; the resolved configuration says why.
- **refused**: only the default passes, or the values named. Other values are an error that says
  what to write instead. **not yet** marks those that later versions will honour.

Numbers of elements keep DeepSpeed's meaning, and the resolved configuration prints them in bytes
too. `"auto"` is answered by whoever knows the value, as the last column says; where nobody knows
it, it is an error.
"""
_AUTO: Final = {
    Auto.MODEL: '`"auto"`: from the model\'s dtype.',
    Auto.CALLER: '`"auto"`: from the trainer.',
}


def page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    top = [key for key in TABLE if not key.level and not key.is_section]
    parts.append("## Top level\n\n" + _table(top))
    for section in TABLE:
        if section.is_section and not section.level:
            keys = [key for key in TABLE if key.path.startswith(f"{section.path}.")]
            about = " ".join(part for part in (section.meaning, _also(section)) if part)
            parts.append(f"## `{section.path}`\n\n{about}\n\n{_table(keys)}")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """Writes the page.

    Args:
        arguments: The path of the file, or nothing.
    """
    path = Path(arguments[0]) if arguments else _DEFAULT_PATH
    path.write_text(page(), encoding="utf-8")


def _table(keys: Iterable[Key]) -> str:
    lines = ["| Key | Type | Default | Status | Meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{key.path}` | {_type(key)} | {_default(key)} | {_status(key)} | {_meaning(key)} |"
        for key in keys
    ]
    return "\n".join(lines) + "\n"


def _type(key: Key) -> str:
    return key.kind.name.replace("|", "\\|") if key.kind else "an object"


def _default(key: Key) -> str:
    return "" if key.kind is None or key.default is None else f"`{json.dumps(key.default)}`"


def _status(key: Key) -> str:
    if key.status is Status.HINT:
        return "hint"
    words = "not yet" if key.reason.startswith(NOT_YET) else "refused"
    if key.status is Status.REFUSED:
        return words
    if key.accepts is None:
        return "honoured"
    passing = ", ".join(f"`{json.dumps(value)}`" for value in key.accepts if value is not None)
    return f"honoured: {passing}; others {words}"


def _meaning(key: Key) -> str:
    parts = [key.meaning, _also(key)]
    if key.only_for:
        parts.append(f"For {', '.join(key.only_for)}.")
    if key.reason and key.reason != NOT_YET:
        says = "Changes nothing" if key.status is Status.HINT else "Refused"
        parts.append(f"{says}: {key.reason}.")
    parts.append(_AUTO.get(key.auto, ""))
    return " ".join(part for part in parts if part).replace("|", "\\|")


def _also(key: Key) -> str:
    return f"Also {', '.join(f'`{name}`' for name in key.aliases)}." if key.aliases else ""


if __name__ == "__main__":
    main(sys.argv[1:])
