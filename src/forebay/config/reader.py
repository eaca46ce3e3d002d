"""From a dict, a file or base64 text to a plain dict of JSON values.

JSON is read as DeepSpeed's users write it: `//`, `#` and `/* */` comments and trailing commas
pass. Duplicate keys do not. Keys and types are checked elsewhere (`forebay.config.schema`).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forebay.config.problems import Problem, raise_any, shown
from forebay.errors import ConfigError

__all__ = ["parse", "read"]

# A configuration is a few kilobytes; more than this is another kind of file.
_MAX_BYTES: Final = 4 << 20
# A string, a comment, or a comma before a closing bracket; strings match so as to be left alone.
_TOKENS: Final = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)""",
    re.DOTALL | re.VERBOSE,
)
_TRAILING_COMMA: Final = re.compile(r'("(?:[^"\\\n]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\s-]+")


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys it saw twice."""

    twice: tuple[str, ...] = ()


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a configuration.

    Args:
        source: A mapping (copied, never changed), the path of a JSON file, or base64 of JSON.

    Raises:
        ConfigError: It cannot be read, is no JSON, or is no object.
    """
    if isinstance(source, Mapping):
        try:
            return _copy(source, path="")
        except RecursionError as error:
            raise ConfigError("the configuration is nested too deeply") from error
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"cannot read the configuration: it is of type {type(source).__name__}",
            hint="give a dict, the path of a JSON file, or base64 of JSON",
        )
    text = str(source)
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        # Base64 text may be longer than a file name can be.
        is_file = False
    if is_file:
        return parse(_load(path), name=text)
    decoded = _decode(text)
    # Most words decode to something; an object starts with a brace or a comment.
    if decoded is not None and decoded.lstrip().startswith(("{", "/", "#")):
        return parse(decoded, name="base64 text")
    kind = "a folder" if path.is_dir() else "no file"
    raise ConfigError(
        f"cannot read the configuration: {shown(text)} is {kind}",
        hint="give a dict, the path of a JSON file, or base64 of JSON",
    )


def parse(text: str, *, name: str) -> dict[str, Any]:
    """Parses JSON with comments and trailing commas.

    Args:
        text: The text.
        name: What it is, for messages.

    Raises:
        ConfigError: With the line, the path of a key given twice, or what stands in place of an
            object.
    """
    if not text.strip():
        raise ConfigError(f"{name} is empty", hint="an empty configuration is {}")
    try:
        value = json.loads(_plain(text), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1].strip()
        raise ConfigError(
            f"{name} is not JSON: line {error.lineno}, column {error.colno}: "
            f"{error.msg[0].lower()}{error.msg[1:]}",
            hint=f"the line is: {line[:80]}",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply") from error
    except ValueError as error:
        # Python reads no integer of more than some thousand digits.
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{name} holds {shown(value)}", hint='a configuration is an object: {"key": value}'
        )
    try:
        twice = _twice(value, level="")
        plain = _copy(value, path="")
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply") from error
    raise_any(
        [
            Problem(f"{name}: config key {path} is given twice", hint="delete one of the two")
            for path in twice
        ]
    )
    return plain


def _load(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"{path} is no configuration: it has more than {_MAX_BYTES} bytes",
        )
    try:
        # A byte order mark is an editor's habit, not an error.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path} is not UTF-8: line {line} has the byte 0x{data[error.start]:02x}",
            hint="save the file as UTF-8",
        ) from error


def _decode(text: str) -> str | None:
    """The text behind base64, plain or URL-safe; None if it is none."""
    if not _BASE64.fullmatch(text):
        return None
    try:
        return base64.b64decode(text, altchars=b"-_" if {*text} & {*"-_"} else None).decode()
    except (binascii.Error, ValueError):
        return None


def _plain(text: str) -> str:
    """The text with comments and trailing commas blanked; lines and columns stay."""

    def blank(match: re.Match[str]) -> str:
        comment = match["comment"]
        return match[0] if comment is None else re.sub(r"[^\n]", " ", comment)

    return _TRAILING_COMMA.sub(lambda match: match[1] or " ", _TOKENS.sub(blank, text))


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        result.twice = tuple(sorted({name for name in names if names.count(name) > 1}))
    return result


def _twice(value: object, *, level: str) -> list[str]:
    found = []
    if isinstance(value, _Object):
        found += [f"{level}{name}" for name in value.twice]
        for name, inner in value.items():
            found += _twice(inner, level=f"{level}{name}.")
    elif isinstance(value, list):
        for inner in value:
            found += _twice(inner, level=level)
    return found


def _copy(value: Mapping[Any, Any], *, path: str) -> dict[str, Any]:
    """A deep copy in plain dicts; keys must be text."""
    result: dict[str, Any] = {}
    for name, inner in value.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"config key {name!r} {f'in {path} ' if path else ''}is not text",
                hint="write keys as text, as JSON does",
            )
        inner_path = f"{path}.{name}" if path else name
        result[name] = _copy(inner, path=inner_path) if isinstance(inner, Mapping) else inner
    return result
