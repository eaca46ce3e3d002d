"""Samples to text: which words a model reads, and which of them it learns to write.

With a chat template, instructions and conversations are written as the tokenizer's own template
does, so that a model tuned here is prompted as its family is. Without one, this is the template:

    ### Instruction:                      ### User:
    {instruction}                         {content}

    ### Input:                            ### Assistant:
    {input}                               {content}<eos>

    ### Response:
    {output}<eos>

The `### Input:` part stands only where there is an input; conversations go on turn by turn, with
an empty line between turns and `### System:` for a system turn. A prompt is followed by its
completion with nothing between them, whatever the tokenizer has. What is learned ends with the
end-of-sequence token, so that generation stops.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from forebay.data.samples import (
    ChatSample,
    CompletionSample,
    InstructionSample,
    Message,
    Sample,
    TextSample,
)
from forebay.data.tokenize import ChatEnd
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.data.tokenize import Tokenizer

__all__ = ["After", "Rendered", "Segment", "Use", "render"]


class Use(Enum):
    """What a stretch of text is for."""

    READ = "read"
    """Context: masked out of the loss."""
    LEARNED = "learned"
    """Every token is a label."""


class After(Enum):
    """What follows a segment."""

    NOTHING = "nothing"
    END_OF_SEQUENCE = "end_of_sequence"
    """The tokenizer's eos, with the segment's own use."""


class Segment(NamedTuple):
    """Text that is tokenized by itself.

    Segments end where a prompt ends when the model is used, so the ids that are learned are the
    ids that are generated; a tokenizer that saw both sides at once might merge across the seam.
    """

    text: str
    use: Use
    after: After = After.NOTHING


class Rendered(NamedTuple):
    """A sample as text.

    Attributes:
        segments: The text, in order.
        begins: Whether a document begins here, so that bos (where the tokenizer has one) and a
            seam belong before it.
        writes_bos: Whether bos is still missing from the text; chat templates bring their own.
    """

    segments: tuple[Segment, ...]
    begins: bool = True
    writes_bos: bool = True


def render(sample: Sample, tokenizer: Tokenizer) -> Rendered:
    """Write a sample as text.

    Args:
        sample: What to write.
        tokenizer: Whose chat template is used, where it has one.

    Returns:
        The segments to tokenize.

    Raises:
        ConfigError: The chat template refuses the conversation, or rewrites earlier turns.
    """
    if isinstance(sample, TextSample):
        after = After.END_OF_SEQUENCE if sample.last else After.NOTHING
        return Rendered((Segment(sample.text, Use.LEARNED, after),), begins=sample.first)
    if isinstance(sample, CompletionSample):
        return _answered(sample.prompt, sample.completion)
    if isinstance(sample, InstructionSample):
        if tokenizer.has_chat_template:
            return _templated(_as_messages(sample), tokenizer, where=sample.where)
        return _answered(_plain_instruction(sample), sample.output)
    if tokenizer.has_chat_template:
        return _templated(sample.messages, tokenizer, where=sample.where)
    return _plain_chat(sample)


def _answered(prompt: str, answer: str) -> Rendered:
    return Rendered(
        (
            Segment(prompt, Use.READ),
            Segment(answer, Use.LEARNED, After.END_OF_SEQUENCE),
        )
    )


def _plain_instruction(sample: InstructionSample) -> str:
    context = f"### Input:\n{sample.context}\n\n" if sample.context.strip() else ""
    return f"### Instruction:\n{sample.instruction}\n\n{context}### Response:\n"


def _as_messages(sample: InstructionSample) -> tuple[Message, ...]:
    context = f"\n\n{sample.context}" if sample.context.strip() else ""
    return (
        Message(role="user", content=sample.instruction + context),
        Message(role="assistant", content=sample.output),
    )


def _plain_chat(sample: ChatSample) -> Rendered:
    segments = []
    gap = ""
    for turn in sample.messages:
        heading = f"{gap}### {turn.role.capitalize()}:\n"
        gap = "\n\n"
        if turn.role == "assistant":
            segments.append(Segment(heading, Use.READ))
            segments.append(Segment(turn.content, Use.LEARNED, After.END_OF_SEQUENCE))
        else:
            segments.append(Segment(heading + turn.content, Use.READ))
    return Rendered(tuple(segments))


def _templated(messages: tuple[Message, ...], tokenizer: Tokenizer, *, where: str) -> Rendered:
    """Cuts a templated conversation where each turn of the assistant begins and ends.

    A template is a program, so the places are found by rendering: the text up to a turn, with the
    cue that the model is prompted with, and the text up to its end must both be beginnings of the
    whole. Templates that rewrite earlier turns (some drop their reasoning) have no such places.
    """
    whole = _render_chat(messages, tokenizer, ends=ChatEnd.COMPLETE, where=where)
    segments, at = [], 0
    for number, turn in enumerate(messages):
        if turn.role != "assistant":
            continue
        before = _render_chat(messages[:number], tokenizer, ends=ChatEnd.AWAITS_ANSWER, where=where)
        after = _render_chat(messages[: number + 1], tokenizer, ends=ChatEnd.COMPLETE, where=where)
        if not (whole.startswith(before) and whole.startswith(after) and at <= len(before)):
            raise ConfigError(
                f"{where}: the tokenizer's chat template rewrites earlier turns, so turn "
                f"{number + 1} of {len(messages)} has no place of its own",
                hint="write one row per answer, with the turns before it",
            )
        segments.append(Segment(whole[at : len(before)], Use.READ))
        segments.append(Segment(whole[len(before) : len(after)], Use.LEARNED))
        at = len(after)
    if whole[at:]:
        segments.append(Segment(whole[at:], Use.READ))
    return Rendered(tuple(segments), writes_bos=False)


def _render_chat(
    messages: tuple[Message, ...], tokenizer: Tokenizer, *, ends: ChatEnd, where: str
) -> str:
    try:
        return tokenizer.render_chat(messages, ends=ends)
    except Exception as error:
        # Templates call raise_exception with any text, as jinja2's TemplateError.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{where}: the tokenizer's chat template refuses the conversation: {reason[0]}",
            hint="put the turns into the order that the model was tuned on",
        ) from error
