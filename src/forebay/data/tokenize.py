"""Text to token ids: the model folder's own tokenizer, or plain bytes.

This file knows no samples (`render.py` turns those into text) and no batches.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.data.samples import Message

__all__ = [
    "ByteTokenizer",
    "ChatEnd",
    "HubTokenizer",
    "Missing",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
]

# Any of these makes a folder one that AutoTokenizer can read.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
# A byte-level vocabulary may be padded to a rounder size, but not be another vocabulary.
_BYTE_VOCABULARY_LIMIT: Final = 512


class ChatEnd(Enum):
    """Where a rendered conversation stops."""

    AWAITS_ANSWER = "awaits_answer"
    """Right before the words of the assistant's next turn."""
    COMPLETE = "complete"
    """After its last turn."""


class Tokenizer(Protocol):
    """What the rest of the data path asks of a tokenizer.

    Calls, in order: `render.py` asks `render_chat` and `begins_with_bos`; `tokens.py` calls
    `encode` for many texts at once; `batches.py` reads `pad_id`; the trainer calls `decode` and
    `save`.
    """

    @property
    def size(self) -> int:
        """The largest id that can come out, plus 1."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, None when the tokenizer adds none."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, None when there is none."""

    @property
    def pad_id(self) -> int:
        """The id that fills rows; never attended to and never a label."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know, such as a missing pad token."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without bos or eos."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids."""

    def render_chat(self, messages: Sequence[Message], *, ends: ChatEnd) -> str:
        """Returns a conversation as text, in the template that the model was tuned on."""

    def save(self, folder: Path) -> None:
        """Writes files from which `transformers.AutoTokenizer` loads the same tokenizer."""


class ByteTokenizer:
    """One token per byte of UTF-8 (ids 0 to 255), then bos, eos and pad.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode(["abc"]), tokenizer.decode([97, 98, 99]), tokenizer.size
        ([[97, 98, 99]], 'abc', 259)
    """

    size: Final = 259
    bos_id: Final = 256
    eos_id: Final = 257
    pad_id: Final = 258
    notes: Final = ()
    has_chat_template: Final = False

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids; the three special ids are left out."""
        return bytes(value for value in ids if value < 256).decode(errors="replace")

    def render_chat(self, messages: Sequence[Message], *, ends: ChatEnd) -> str:
        """Never called: bytes have no chat template."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json for `transformers.AutoTokenizer`."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
        from tokenizers import Tokenizer as RustTokenizer

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<|bos|>", "<|eos|>", "<|pad|>"]
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], self.bos_id)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special[0],
            "eos_token": special[1],
            "pad_token": special[2],
            "clean_up_tokenization_spaces": False,
            # Bytes are bytes: "<|eos|>" written in a text is seven of them, not the end.
            "split_special_tokens": True,
        }
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class HubTokenizer:
    """A tokenizer in the Hugging Face format, loaded by transformers from a folder.

    Args:
        inner: The `PreTrainedTokenizerBase`.
        folder: Where it came from, for messages.
    """

    def __init__(self, inner: Any, *, folder: Path) -> None:
        self._inner = inner
        self.folder = folder
        self.size: int = max(inner.get_vocab().values(), default=-1) + 1
        self.eos_id: int | None = inner.eos_token_id
        # Whether documents begin with bos is decided by what the tokenizer itself puts there.
        probe = inner("a")["input_ids"]
        starts = bool(probe) and probe[0] == inner.bos_token_id
        self.bos_id: int | None = inner.bos_token_id if starts else None
        self.has_chat_template = bool(getattr(inner, "chat_template", None))
        self.notes: tuple[str, ...] = ()
        self.pad_id: int = self._choose_pad()

    def _choose_pad(self) -> int:
        """Any id pads well, because padding is neither attended to nor learned."""
        if self._inner.pad_token_id is not None:
            return int(self._inner.pad_token_id)
        self.notes = ("the tokenizer has no pad token: rows are filled with eos, and masked",)
        return 0 if self.eos_id is None else self.eos_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without the tokenizer's own bos or eos."""
        if not texts:
            return []
        encoded = self._inner(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            # Silences the advice about texts longer than the model's context: rows are cut later.
            verbose=False,
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids, without special tokens."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Message], *, ends: ChatEnd) -> str:
        """Returns a conversation in the tokenizer's own template."""
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        return str(
            self._inner.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=ends is ChatEnd.AWAITS_ANSWER
            )
        )

    def save(self, folder: Path) -> None:
        """Writes the tokenizer beside the model."""
        self._inner.save_pretrained(str(folder))


class Missing(Enum):
    """What a folder without tokenizer files means."""

    BYTES = "bytes"
    """A model that reads bytes."""
    ERROR = "error"
    """Someone named the folder because of its tokenizer."""


def load_tokenizer(folder: Path, *, missing: Missing = Missing.BYTES) -> Tokenizer:
    """Load the tokenizer of a folder, or the byte tokenizer where there is none.

    Args:
        folder: A model folder, or one that holds tokenizer files alone.
        missing: What it means that there is none.

    Returns:
        The tokenizer; `check_vocabulary` says whether it suits the model.

    Raises:
        ConfigError: There are tokenizer files, but they cannot be read; or none where one was
            asked for.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if missing is Missing.ERROR:
            raise ConfigError(
                f"there is no tokenizer in {folder}: none of {', '.join(_TOKENIZER_FILES)}",
                hint="name a folder that tokenizer.save_pretrained wrote",
            )
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer

        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except ImportError as error:
        raise ConfigError(
            f"the tokenizer in {folder} needs a package that is missing: {_first_line(error)}",
            hint='pip install "forebay[train]"',
        ) from error
    except Exception as error:
        # transformers raises whatever its parsers do: OSError, ValueError, KeyError, Exception.
        raise ConfigError(
            f"cannot read the tokenizer in {folder}: {_first_line(error)}",
            hint="save it again with tokenizer.save_pretrained(folder)",
        ) from error
    return HubTokenizer(inner, folder=folder)


def check_vocabulary(tokenizer: Tokenizer, *, model_vocabulary: int) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for.

    A model may have more rows than the tokenizer has ids (they are padded to round sizes). The
    byte tokenizer stands in where a folder has none, so there a much larger vocabulary means
    that the tokenizer's files are missing.

    Raises:
        ConfigError: They do not fit; the message has both sizes.
    """
    if tokenizer.size > model_vocabulary:
        raise ConfigError(
            f"vocabulary mismatch: the tokenizer has ids up to {tokenizer.size - 1}, the model "
            f"{model_vocabulary} embeddings (0 to {model_vocabulary - 1})",
            hint=f"use the model's own tokenizer, or set vocab_size to {tokenizer.size}",
        )
    if isinstance(tokenizer, ByteTokenizer) and model_vocabulary > _BYTE_VOCABULARY_LIMIT:
        raise ConfigError(
            f"vocabulary mismatch: the model's folder has no tokenizer, and its vocabulary of "
            f"{model_vocabulary} is not byte-level ({tokenizer.size} to {_BYTE_VOCABULARY_LIMIT})",
            hint="put the tokenizer's files into the folder, or name their folder: --tokenizer",
        )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (as GPT-2 chose them).

    Printable Latin-1 characters stand for themselves, the rest for code points from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
