"""What a row of training data says, whatever file it came from.

A row has one of four schemas, told by its keys. Columns beside those of its schema are ignored
(data sets carry ids and sources), and named once in the summary of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ChatSample",
    "CompletionSample",
    "InstructionSample",
    "Message",
    "Sample",
    "Schema",
    "TextSample",
    "parse_row",
]

_ROLES = ("system", "user", "assistant", "tool")
_ACCEPTED = (
    'text | instruction, input, output | prompt, completion | messages [{"role", "content"}]'
)


class Schema(Enum):
    """The keys that make a row what it is; a value lists the keys that must be there."""

    CHAT = ("messages",)
    """A conversation; the assistant's turns are learned."""
    COMPLETION = ("prompt", "completion")
    """The completion is learned, exactly as it continues the prompt."""
    INSTRUCTION = ("instruction", "output")
    """The output is learned; an `input` may follow the instruction."""
    TEXT = ("text",)
    """Every token is learned."""

    @property
    def label(self) -> str:
        """The keys as messages write them."""
        return "/".join(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """A document, or a piece of one that is too long to be held at once.

    Attributes:
        where: File and line, for messages.
        text: What it says.
        first: Whether a document begins here.
        last: Whether the document ends here.
    """

    where: str
    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSample:
    """An instruction with its optional input, and the answer to learn."""

    where: str
    instruction: str
    context: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSample:
    """A prompt and the continuation to learn."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSample:
    """A conversation with at least one turn of the assistant."""

    where: str
    messages: tuple[Message, ...]


Sample = TextSample | InstructionSample | CompletionSample | ChatSample


def parse_row(row: Mapping[str, object], *, where: str) -> tuple[Schema, Sample]:
    """Read a row by its keys; a value of None counts as absent (tables fill gaps with it).

    Args:
        row: Column names and values.
        where: File and line, for messages.

    Returns:
        The schema and the sample. With the keys of several schemas the first of `Schema` counts.

    Raises:
        ConfigError: No schema fits, or a value has the wrong type.

    Example:
        >>> schema, sample = parse_row({"text": "Hello"}, where="a.jsonl:1")
        >>> schema.label, sample.text
        ('text', 'Hello')
    """
    present = {key for key, value in row.items() if value is not None}
    schema = next((known for known in Schema if present.issuperset(known.value)), None)
    if schema is None:
        keys = ", ".join(sorted(present)) or "none"
        raise ConfigError(
            f"{where}: no schema fits the keys that have a value: {keys}",
            hint=f"give each row one of: {_ACCEPTED}",
        )
    if schema is Schema.CHAT:
        return schema, ChatSample(where=where, messages=_messages(row["messages"], where=where))
    if schema is Schema.COMPLETION:
        return schema, CompletionSample(
            where=where,
            prompt=_text(row, "prompt", where=where),
            completion=_text(row, "completion", where=where),
        )
    if schema is Schema.INSTRUCTION:
        return schema, InstructionSample(
            where=where,
            instruction=_text(row, "instruction", where=where),
            context=_text(row, "input", where=where) if "input" in present else "",
            output=_text(row, "output", where=where),
        )
    return schema, TextSample(where=where, text=_text(row, "text", where=where))


def _text(row: Mapping[str, object], key: str, *, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ConfigError(
            f'{where}: "{key}" is {_kind(value)}, not text',
            hint=f'write "{key}" as a JSON string',
        )
    return value


def _messages(value: object, *, where: str) -> tuple[Message, ...]:
    hint = 'write "messages" as [{"role": "user", "content": "..."}, {"role": "assistant", ...}]'
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f'{where}: "messages" is {_kind(value)}, not a list of turns', hint=hint)
    turns = []
    for number, turn in enumerate(value, start=1):
        role = turn.get("role") if isinstance(turn, dict) else None
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(f"{where}: turn {number} has no role and content in text", hint=hint)
        if role not in _ROLES:
            raise ConfigError(
                f'{where}: turn {number} has the role "{role}"',
                hint=f"use one of {', '.join(_ROLES)}",
            )
        turns.append(Message(role=role, content=content))
    if not any(turn.role == "assistant" for turn in turns):
        raise ConfigError(
            f"{where}: no turn of the assistant, so nothing to learn among {len(turns)} turns",
            hint="add the answer as a turn of the assistant, or take the row out",
        )
    return tuple(turns)


def _kind(value: object) -> str:
    """Names a value's type as JSON does."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list" if value else "an empty list", tuple: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
