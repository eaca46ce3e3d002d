"""Rows of training data from files: .txt, .json, .jsonl and .parquet.

Rows flow as one `datasets.IterableDataset`, so a file of any size is read in constant memory and
nothing is written to a cache. Parquet is read by `datasets`; text and JSON are read here, because
its readers name no line and fill keys that a row does not have.

This file tells where a row stands; what it means is `samples.py`, what it becomes `tokenize.py`.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.data.samples import Sample, Schema, TextSample, parse_row
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SUFFIXES", "DataFiles", "open_files"]

SUFFIXES: Final = (".txt", ".json", ".jsonl", ".parquet")
# A text file is one document. It is handed on in pieces that end at a line, so that a file of
# many gigabytes is never held at once; 1 MiB makes the seams rarer than one in 200,000 tokens.
_PIECE_CHARACTERS: Final = 1 << 20


class DataFiles:
    """The files that a run reads, checked to exist and not to be empty.

    Iterating gives the samples in the order of the files, and can be done again. All rows must
    have one schema.

    Attributes:
        paths: The files, in order.
        nbytes: Their size on disk.
        schema: What the rows are, once the first was read.
        ignored_columns: Columns that no schema needed, seen so far.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.nbytes = sum(path.stat().st_size for path in paths)
        self.schema: Schema | None = None
        self.ignored_columns: set[str] = set()

    def __iter__(self) -> Iterator[Sample]:
        self.schema, first, blank = None, "", True
        sample: Sample
        for path in self.paths:
            for entry in _dataset(path):
                where = f"{path.name}:{entry['line']}"
                if path.suffix == ".txt":
                    schema, sample = Schema.TEXT, _piece(entry, where=where)
                else:
                    schema, sample = parse_row(entry["row"], where=where)
                    self._notice_columns(schema, entry["row"])
                if self.schema is None:
                    self.schema, first = schema, where
                elif schema is not self.schema:
                    raise ConfigError(
                        f"mixed schemas: {where} is {schema.label}, {first} is {self.schema.label}",
                        hint="train on one schema at a time, or rewrite the rows to one",
                    )
                blank = blank and isinstance(sample, TextSample) and not sample.text.strip()
                yield sample
        if blank and self.schema is not None:
            raise ConfigError(
                f"the data holds nothing but white space: {', '.join(map(str, self.paths[:3]))}",
                hint="check --data",
            )

    def _notice_columns(self, schema: Schema, row: dict[str, object]) -> None:
        known = {*schema.value, "input"} if schema is Schema.INSTRUCTION else {*schema.value}
        self.ignored_columns.update(row.keys() - known)


def open_files(paths: Sequence[Path]) -> DataFiles:
    """Find the files to read: those named, and those inside folders that are named.

    Args:
        paths: Files, or folders whose files with a known suffix are taken in order of name.

    Returns:
        The files. Nothing was read yet.

    Raises:
        ConfigError: A file is missing, empty, unreadable or of an unknown kind.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(item for item in path.rglob("*") if item.suffix in SUFFIXES)
            if not inside:
                raise ConfigError(f"no data in the folder {path}", hint=_KINDS)
            found.extend(inside)
        elif not path.exists():
            raise ConfigError(f"no such data file: {path}", hint="check --data")
        elif path.suffix not in SUFFIXES:
            raise ConfigError(f'cannot read {path}: unknown kind "{path.suffix}"', hint=_KINDS)
        else:
            found.append(path)
    for path in found:
        try:
            with path.open("rb") as file:
                if not file.read(1):
                    raise ConfigError(f"the data file {path} is empty", hint="check --data")
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}", hint="check the file's permissions"
            ) from error
    return DataFiles(found)


_KINDS: Final = f"data files end in {', '.join(SUFFIXES)}"


def _piece(entry: dict[str, Any], *, where: str) -> TextSample:
    return TextSample(where=where, text=entry["text"], first=entry["first"], last=entry["last"])


def _dataset(path: Path) -> Iterator[dict[str, Any]]:
    """Streams a file's rows, each with its line (for parquet: its row) counted from 1."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "reading data needs the package datasets", hint='pip install "forebay[train]"'
        ) from error
    if path.suffix == ".parquet":
        yield from _parquet_rows(datasets, path)
        return
    readers = {".txt": _text_pieces, ".jsonl": _json_lines, ".json": _json_rows}
    rows = datasets.IterableDataset.from_generator(
        readers[path.suffix], gen_kwargs={"path": str(path)}
    )
    empty = True
    for entry in rows:
        empty = False
        yield entry
    if empty:
        raise ConfigError(f"the data file {path} holds no rows", hint="check --data")


def _parquet_rows(datasets: Any, path: Path) -> Iterator[dict[str, Any]]:
    line = 0
    try:
        rows = datasets.load_dataset(
            "parquet", data_files=[str(path.resolve())], split="train", streaming=True
        )
        for line, row in enumerate(rows, start=1):
            yield {"line": f"row {line}", "row": row}
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        # pyarrow's errors are ValueError or OSError, those of datasets RuntimeError or OSError.
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(
            f"{path.name}: not readable as parquet after row {line}: {reason}",
            hint="write the file again, or take it out",
        ) from error
    if not line:
        raise ConfigError(f"the data file {path} holds no rows", hint="check --data")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a UTF-8 file with their numbers; a byte order mark is skipped."""
    name = Path(path).name
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{name}:{number}: not UTF-8 text (byte 0x{raw[error.start]:02x} at column "
                    f"{error.start + 1})",
                    hint=f"convert it: iconv -f {_encoding(raw, number)} -t utf-8 {name}",
                ) from error


def _encoding(raw: bytes, number: int) -> str:
    """What a line that is no UTF-8 may be."""
    is_wide = number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if is_wide else "latin1"


def _text_pieces(path: str) -> Iterator[dict[str, Any]]:
    held: list[str] = []
    size, start, first = 0, 1, True
    for number, line in _lines(path):
        if size >= _PIECE_CHARACTERS:
            yield {"line": start, "text": "".join(held), "first": first, "last": False}
            held, size, start, first = [], 0, number, False
        held.append(line)
        size += len(line)
    if held:
        yield {"line": start, "text": "".join(held), "first": first, "last": True}


def _json_lines(path: str) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{Path(path).name}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _malformed(where, error) from error
        yield {"line": number, "row": _object(row, where)}


def _json_rows(path: str) -> Iterator[dict[str, Any]]:
    """Reads one array of objects, or (as many .json files are) one object a line."""
    for _, line in _lines(path):
        if line.strip():
            if not line.lstrip().startswith("["):
                yield from _json_lines(path)
                return
            break
    text = "".join(line for _, line in _lines(path))
    decoder = json.JSONDecoder()
    name = Path(path).name
    at = text.index("[") + 1 if "[" in text else len(text)
    counted, number = 0, 1
    while True:
        at = _skip_space(text, at)
        number += text.count("\n", counted, at)
        counted = at
        if text[at : at + 1] == "]":
            break
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _malformed(f"{name}:{error.lineno}", error) from error
        yield {"line": number, "row": _object(row, f"{name}:{number}")}
        at = _skip_space(text, at)
        if text[at : at + 1] not in {",", "]"}:
            number += text.count("\n", counted, at)
            raise _malformed(f"{name}:{number}", 'expected "," or "]" after a row')
        at += text[at] == ","
    rest = _skip_space(text, at + 1)
    if rest < len(text):
        number += text.count("\n", counted, rest)
        raise _malformed(f"{name}:{number}", "text after the end of the array")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _object(row: object, where: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise _malformed(where, "expected a JSON object")
    return row


def _malformed(where: str, reason: object) -> ConfigError:
    text = reason.msg if isinstance(reason, json.JSONDecodeError) else reason
    return ConfigError(
        f"{where}: malformed JSON: {text}",
        hint="mend that line; a .jsonl file holds one object a line, a .json file one array",
    )
