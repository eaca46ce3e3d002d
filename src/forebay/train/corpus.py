"""The data of a run: files tokenized, cut into rows, split, and what a user should know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.data.rows import Layout, Overlong, Rows, plan_rows, split_rows
from forebay.data.samples import Schema
from forebay.data.tokenize import Missing, Tokenizer, check_vocabulary, load_tokenizer
from forebay.data.tokens import TokenStore, build_store
from forebay.errors import ConfigError
from forebay.train.options import Packing
from forebay.units_of_measure import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forebay.data.sources import DataFiles
    from forebay.train.model import ModelSource
    from forebay.train.options import TrainOptions

__all__ = ["Corpus", "load_corpus", "sequence_length"]

_LONGEST_DEFAULT: Final = 2048
# Above this tokens go to temporary files: 5 bytes each, about as much as the text itself.
_SPILL_BYTES: Final = 256 << 20
# Without a fraction: a loss over 256 rows is known to about 1%, and takes seconds.
_DEFAULT_FRACTION: Final = 0.02
_DEFAULT_MOST_ROWS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Rows to train and evaluate on.

    Attributes:
        tokenizer: What made the tokens.
        store: The tokens.
        train: Rows to train on.
        held_out: Rows to evaluate on; may be none.
        length: The sequence length.
        lines: What a user should know, a sentence each.
    """

    tokenizer: Tokenizer
    store: TokenStore
    train: Rows
    held_out: Rows
    length: int
    lines: tuple[str, ...]


def sequence_length(options: TrainOptions, *, context: int | None) -> int:
    """The most tokens in a row.

    Raises:
        ConfigError: More than the model reads; with both numbers.
    """
    if options.sequence_length is None:
        return min(context or _LONGEST_DEFAULT, _LONGEST_DEFAULT)
    if context is not None and options.sequence_length > context:
        raise ConfigError(
            f"--sequence-length {options.sequence_length} is more than the model's context of "
            f"{context} tokens",
            hint=f"--sequence-length {context} at most",
        )
    return options.sequence_length


def load_corpus(
    files: DataFiles,
    *,
    source: ModelSource,
    options: TrainOptions,
    spill: Path,
    on_progress: Callable[[int, int], None],
) -> Corpus:
    """Read, tokenize and split the data.

    Args:
        files: What to read.
        source: Whose vocabulary and context the rows must fit.
        options: Packing, truncation, sequence length, split.
        spill: A folder for temporary files when the data is large.
        on_progress: Called now and then with the numbers of documents and tokens so far.

    Raises:
        ConfigError: A file, a row, the vocabulary or a length is refused.
    """
    length = sequence_length(options, context=source.context)
    if options.tokenizer is None:
        tokenizer = load_tokenizer(source.folder)
    else:
        tokenizer = load_tokenizer(options.tokenizer, missing=Missing.ERROR)
    check_vocabulary(tokenizer, model_vocabulary=source.vocabulary)
    store = build_store(
        files,
        tokenizer,
        spill=spill if files.nbytes > _SPILL_BYTES else None,
        on_progress=on_progress,
    )
    layout = _layout(options.packing, schema=files.schema)
    rows = plan_rows(
        store,
        layout=layout,
        length=length,
        overlong=Overlong.TRUNCATE if options.truncate else Overlong.REFUSE,
        context=source.context,
    )
    fraction = options.eval_fraction
    if fraction is None:
        # A single row cannot be shared out, and nobody asked for it.
        most = min(_DEFAULT_FRACTION, _DEFAULT_MOST_ROWS / len(rows))
        fraction = most if len(rows) > 1 else 0.0
    split = split_rows(rows, fraction=fraction, seed=options.seed)
    return Corpus(
        tokenizer=tokenizer,
        store=store,
        train=split.train,
        held_out=split.held_out,
        length=length,
        lines=(
            *_lines(files, store=store, rows=rows, layout=layout, length=length),
            f"{len(split.train)} rows to train on, {len(split.held_out)} held out",
            *tokenizer.notes,
        ),
    )


def _layout(packing: Packing, *, schema: Schema | None) -> Layout:
    is_text = schema is Schema.TEXT
    if packing is Packing.PAD or (packing is Packing.AUTO and not is_text):
        return Layout.PAD
    return Layout.CUT if is_text else Layout.PACK


_LAYOUT_WORDS: Final = {
    Layout.CUT: "text packed into rows of {length} tokens",
    Layout.PACK: "whole samples packed into rows of at most {length} tokens",
    Layout.PAD: "one sample a row of at most {length} tokens, padded",
}


def _lines(
    files: DataFiles, *, store: TokenStore, rows: Rows, layout: Layout, length: int
) -> list[str]:
    learned = int(rows.label_tokens.sum())
    schema = files.schema.label if files.schema else "none"
    lines = [
        f"{len(files.paths)} file{'s' * (len(files.paths) > 1)} of {schema}: "
        f"{counted(store.num_documents, 'document')}, {counted(store.num_tokens, 'token')}, "
        f"{learned} of them learned",
        _LAYOUT_WORDS[layout].format(length=length),
    ]
    if rows.num_truncated:
        lines.append(f"{rows.num_truncated} samples are cut off at {length} tokens")
    if rows.num_dropped:
        lines.append(f"{rows.num_dropped} rows are left out: nothing in them is learned")
    if store.num_empty:
        lines.append(f"{store.num_empty} samples are left out: nothing in them is learned")
    if files.ignored_columns:
        lines.append(f"columns not used: {', '.join(sorted(files.ignored_columns))}")
    return lines
