"""Tokenizers and templates: the ids that a model reads, and which of them are learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from forebay.data.render import After, Segment, Use, render
from forebay.data.samples import (
    ChatSample,
    CompletionSample,
    InstructionSample,
    Message,
    Sample,
    TextSample,
)
from forebay.data.tokenize import ByteTokenizer, HubTokenizer, check_vocabulary, load_tokenizer
from forebay.data.tokens import build_store
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ["<unk>", "<s>", "</s>", "one", "two", "three", "user", "assistant", ":", "###", "|"]
TEMPLATE = (
    "{% for m in messages %}{{ '| ' + m.role + ' : ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '| assistant : ' }}{% endif %}"
)
TURNS = (
    Message(role="user", content="one"),
    Message(role="assistant", content="two"),
    Message(role="user", content="three"),
    Message(role="assistant", content="one"),
)


def save_words(folder: Path, **settings: Any) -> Path:
    """Saves a tokenizer of whole words into a folder, as transformers would."""
    from transformers import PreTrainedTokenizerFast

    inner = RustTokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if settings.pop("adds_bos", False):
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **settings)
    wrapped.save_pretrained(folder)
    return folder


def words(tokenizer: HubTokenizer, sample: Sample) -> str:
    """Writes a sample's tokens as words, with what is learned in brackets."""
    store = build_store([sample], tokenizer)
    return " ".join(
        f"[{WORDS[token]}]" if learned else WORDS[token]
        for token, learned in zip(store.ids, store.learned, strict=True)
    )


def test_bytes_round_trip_through_transformers(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "héllo\n\t \x00 <|eos|> 世界 🙂" + "".join(map(chr, range(256)))
    assert isinstance(loaded, HubTokenizer)
    assert loaded.encode([text, ""]) == tokenizer.encode([text, ""])
    assert tokenizer.encode([text])[0] == list(text.encode())
    assert loaded.decode(tokenizer.encode([text])[0]) == text
    assert (loaded.size, loaded.bos_id, loaded.eos_id, loaded.pad_id) == (259, 256, 257, 258)


def test_folder_without_a_tokenizer_means_bytes(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


def test_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)


def test_missing_pad_token_is_said_and_harmless(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_words(tmp_path, eos_token="</s>"))
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    assert "no pad token" in tokenizer.notes[0]


def test_bos_is_added_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = load_tokenizer(save_words(tmp_path / "a", **special))
    adding = load_tokenizer(save_words(tmp_path / "b", adds_bos=True, **special))
    text = TextSample(where="f:1", text="one two")
    # The first token of a document is never learned: nothing stands before it.
    assert words(plain, text) == "one [two] [</s>]"
    assert words(adding, text) == "<s> [one] [two] [</s>]"


@pytest.mark.parametrize(
    ("tokenizer_size", "model_size"), [(259, 258), (259, 1), (259, 513), (259, 32000)]
)
def test_vocabulary_mismatch_has_both_numbers(tokenizer_size: int, model_size: int) -> None:
    with pytest.raises(ConfigError, match="vocabulary mismatch") as caught:
        check_vocabulary(ByteTokenizer(), model_vocabulary=model_size)
    assert str(model_size) in caught.value.message
    assert str(tokenizer_size) in str(caught.value) or "258" in caught.value.message


@pytest.mark.parametrize("model_size", [259, 260, 320, 512])
def test_padded_vocabulary_is_accepted(model_size: int) -> None:
    check_vocabulary(ByteTokenizer(), model_vocabulary=model_size)


def test_hub_vocabulary_may_be_padded_freely(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_words(tmp_path, eos_token="</s>"))
    check_vocabulary(tokenizer, model_vocabulary=151936)
    with pytest.raises(ConfigError, match="ids up to 10, the model 10 embeddings"):
        check_vocabulary(tokenizer, model_vocabulary=10)


def test_plain_templates() -> None:
    tokenizer = ByteTokenizer()
    instruction = InstructionSample(where="f:1", instruction="Add.", context="1 2", output="3")
    bare = InstructionSample(where="f:1", instruction="Go.", context=" ", output="x")
    assert render(instruction, tokenizer).segments == (
        Segment("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", Use.READ),
        Segment("3", Use.LEARNED, After.END_OF_SEQUENCE),
    )
    assert render(bare, tokenizer).segments[0].text == "### Instruction:\nGo.\n\n### Response:\n"
    chat = render(ChatSample(where="f:1", messages=TURNS[:3]), tokenizer)
    assert "".join(segment.text for segment in chat.segments) == (
        "### User:\none\n\n### Assistant:\ntwo\n\n### User:\nthree"
    )
    assert [segment.text for segment in chat.segments if segment.use is Use.LEARNED] == ["two"]


def test_completion_follows_its_prompt_directly(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        save_words(tmp_path, eos_token="</s>", bos_token="<s>", adds_bos=True)
    )
    sample = CompletionSample(where="f:1", prompt="one ", completion="two three")
    assert words(tokenizer, sample) == "<s> one [two] [three] [</s>]"


def test_chat_template_marks_every_answer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        save_words(tmp_path, eos_token="</s>", bos_token="<s>", adds_bos=True,
                   chat_template=TEMPLATE)
    )  # fmt: skip
    # The template writes its own special tokens, so no bos or eos is added.
    assert words(tokenizer, ChatSample(where="f:1", messages=TURNS)) == (
        "| user : one </s> | assistant : [two] [</s>] "
        "| user : three </s> | assistant : [one] [</s>]"
    )
    instruction = InstructionSample(where="f:1", instruction="one", context="three", output="two")
    assert words(tokenizer, instruction) == "| user : one three </s> | assistant : [two] [</s>]"


def test_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else '|' }} {% endfor %}"
    tokenizer = load_tokenizer(save_words(tmp_path, eos_token="</s>", chat_template=template))
    with pytest.raises(ConfigError, match=r"f:1: .* rewrites earlier turns, so turn 2 of 4"):
        render(ChatSample(where="f:1", messages=TURNS), tokenizer)


def test_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(save_words(tmp_path, eos_token="</s>", chat_template=template))
    with pytest.raises(ConfigError, match=r"f:1: .* refuses the conversation: roles must alternat"):
        render(ChatSample(where="f:1", messages=TURNS), tokenizer)
