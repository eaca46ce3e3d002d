"""The tokens of a data set: one long row of ids with a mark on those that are learned.

Everything is tokenized once, before training, so that rows can be counted, shuffled and found
again by number. In memory for ordinary data; in unlinked temporary files when it is large.
Which tokens stand together in a training row is decided in `rows.py`.
"""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, TypeVar

import numpy as np

from forebay.data.render import After, Rendered, Use, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy.typing as npt

    from forebay.data.samples import Sample
    from forebay.data.tokenize import Tokenizer

__all__ = ["TokenStore", "build_store"]

_Item = TypeVar("_Item", bound=np.generic)

# Enough text for a tokenizer to use all its threads, little enough to hold twice.
_BATCH_CHARACTERS: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """Token ids of documents, one after the other.

    Attributes:
        ids: int32, all documents.
        learned: uint8, 1 where the token is a label. The first token of a document never is:
            nothing of its document stands before it.
        starts: int64, where each document begins, and the end of the last.
        num_empty: Samples left out because nothing in them could be learned.
    """

    ids: npt.NDArray[np.int32]
    learned: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    num_empty: int

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.ids)


def build_store(
    samples: Iterable[Sample],
    tokenizer: Tokenizer,
    *,
    spill: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """Tokenize samples, in their order.

    Args:
        samples: What to tokenize; read once.
        tokenizer: How.
        spill: A folder for temporary files that hold the tokens; None keeps them in memory.
        on_progress: Called now and then with the numbers of documents and tokens so far.

    Returns:
        The tokens.

    Raises:
        ConfigError: A file or a row is refused.
    """
    builder = _Builder(tokenizer, spill=spill)
    waiting: list[Rendered] = []
    characters = 0
    for sample in samples:
        rendered = render(sample, tokenizer)
        waiting.append(rendered)
        characters += sum(len(segment.text) for segment in rendered.segments)
        if characters >= _BATCH_CHARACTERS:
            builder.add(waiting)
            waiting, characters = [], 0
            if on_progress is not None:
                on_progress(builder.num_documents, builder.num_tokens)
    builder.add(waiting)
    return builder.finish()


class _Builder:
    """Grows a store."""

    def __init__(self, tokenizer: Tokenizer, *, spill: Path | None) -> None:
        self._tokenizer = tokenizer
        self._ids, self._learned = _scratch(spill), _scratch(spill)
        self._starts: list[int] = []
        self._num_empty = 0
        self.num_tokens = 0
        self._learns = 0

    @property
    def num_documents(self) -> int:
        return len(self._starts)

    def add(self, batch: list[Rendered]) -> None:
        texts = [segment.text for rendered in batch for segment in rendered.segments]
        encoded = iter(self._tokenizer.encode(texts))
        eos = self._tokenizer.eos_id
        for rendered in batch:
            ids: list[int] = []
            learned = bytearray()
            if rendered.begins:
                self._close_document()
                if rendered.writes_bos and self._tokenizer.bos_id is not None:
                    ids.append(self._tokenizer.bos_id)
                    learned.append(0)
            for segment in rendered.segments:
                piece = next(encoded)
                if segment.after is After.END_OF_SEQUENCE and eos is not None:
                    piece = [*piece, eos]
                ids.extend(piece)
                learned.extend(bytes([segment.use is Use.LEARNED]) * len(piece))
            self._append(ids, learned)

    def _append(self, ids: list[int], learned: bytearray) -> None:
        if not ids:
            return
        if self.num_tokens == self._starts[-1]:
            learned[0] = 0
        self._ids.write(np.array(ids, dtype=np.int32).tobytes())
        self._learned.write(learned)
        self._learns += learned.count(1)
        self.num_tokens += len(ids)

    def _close_document(self) -> None:
        """Ends the open document and begins one; one without a label is written over."""
        if self._starts and not self._learns:
            self._num_empty += 1
            self.num_tokens = self._starts.pop()
            self._ids.seek(self.num_tokens * 4)
            self._learned.seek(self.num_tokens)
        self._starts.append(self.num_tokens)
        self._learns = 0

    def finish(self) -> TokenStore:
        # The start that this opens is the end of the last document.
        self._close_document()
        return TokenStore(
            ids=_array(self._ids, np.dtype(np.int32), self.num_tokens),
            learned=_array(self._learned, np.dtype(np.uint8), self.num_tokens),
            starts=np.array(self._starts, dtype=np.int64),
            num_empty=self._num_empty,
        )


def _scratch(spill: Path | None) -> IO[bytes]:
    return io.BytesIO() if spill is None else tempfile.TemporaryFile(dir=spill)


def _array(file: IO[bytes], dtype: np.dtype[_Item], length: int) -> npt.NDArray[_Item]:
    if isinstance(file, io.BytesIO):
        return np.frombuffer(file.getbuffer(), dtype=dtype, count=length)
    with file:
        if not length:
            return np.empty(0, dtype=dtype)
        file.flush()
        # The mapping has its own handle on the unlinked file; its pages are the kernel's to drop.
        return np.memmap(file, dtype=dtype, mode="r", shape=(length,))
