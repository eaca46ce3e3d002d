"""Rows from files: what is read, and the one sentence that says what is wrong and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from forebay.data import Schema, open_files
from forebay.data.samples import (
    ChatSample,
    CompletionSample,
    InstructionSample,
    Message,
    TextSample,
    parse_row,
)
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

INSTRUCTION = {"instruction": "Add.", "input": "1 2", "output": "3"}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(open_files([path]))
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, TextSample(where="f:1", text="a")),
        (
            INSTRUCTION,
            InstructionSample(where="f:1", instruction="Add.", context="1 2", output="3"),
        ),
        (
            {"instruction": "Go.", "input": None, "output": "x"},
            InstructionSample(where="f:1", instruction="Go.", context="", output="x"),
        ),
        (
            {"prompt": "a", "completion": "b", "id": 7},
            CompletionSample(where="f:1", prompt="a", completion="b"),
        ),
        (
            {"messages": CHAT},
            ChatSample(
                where="f:1",
                messages=(
                    Message(role="user", content="hi"),
                    Message(role="assistant", content="ho"),
                ),
            ),
        ),
        # Tables that were prepared for several trainers carry the rendered text as well.
        (
            {**INSTRUCTION, "text": "all"},
            InstructionSample(where="f:1", instruction="Add.", context="1 2", output="3"),
        ),
    ],
)
def test_schemas(row: dict[str, Any], expected: object) -> None:
    assert parse_row(row, where="f:1")[1] == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "a", "id": None}, "f:1: no schema fits the keys that have a value: body"),
        ({}, "f:1: no schema fits the keys that have a value: none"),
        ({"text": 3}, 'f:1: "text" is a number, not text'),
        ({"prompt": "a", "completion": ["b"]}, 'f:1: "completion" is a list, not text'),
        ({"messages": []}, 'f:1: "messages" is an empty list, not a list of turns'),
        ({"messages": "hi"}, 'f:1: "messages" is text, not a list of turns'),
        ({"messages": [{"role": "user"}]}, "f:1: turn 1 has no role and content in text"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            'f:1: turn 1 has the role "human"',
        ),
        (
            {"messages": [CHAT[0]]},
            "f:1: no turn of the assistant, so nothing to learn among 1 turns",
        ),
    ],
)
def test_refused_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_row(row, where="f:1")
    assert caught.value.message == message
    assert caught.value.hint


def test_json_lines_count_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '\ufeff{"text":"x"}\n\n{"text":"y","id":3}\n')
    files = open_files([path])
    assert [sample.where for sample in files] == ["a.jsonl:1", "a.jsonl:3"]
    assert files.schema is Schema.TEXT
    assert files.ignored_columns == {"id"}


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_json_array_tells_the_line_of_each_row(tmp_path: Path, indent: int | None) -> None:
    rows = [dict(INSTRUCTION, id=number, deep=[{"a": None}, []]) for number in range(4)]
    text = json.dumps(rows, indent=indent)
    path = write(tmp_path, "a.json", text)
    samples = list(open_files([path]))
    per_row = json.dumps(rows[:1], indent=indent).count("\n") - (indent is not None)
    first = 1 if indent is None else 2
    assert [s.where for s in samples] == [f"a.json:{first + n * per_row}" for n in range(4)]


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", '{"text":"x"}\n{"text":"y"}\n')
    assert [sample.where for sample in open_files([path])] == ["a.json:1", "a.json:2"]


def test_keys_that_a_row_lacks_are_not_filled(tmp_path: Path) -> None:
    """A table reader would give every row every key, and so every row the same schema."""
    path = write(tmp_path, "a.jsonl", '{"text":"x"}\n{"prompt":"y","completion":"z"}\n')
    assert refusal(path) == "mixed schemas: a.jsonl:2 is prompt/completion, a.jsonl:1 is text"


def test_schemas_of_two_files_must_agree(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, "a.txt", "hello\n"),
        write(tmp_path, "b.json", json.dumps([INSTRUCTION])),
    ]
    with pytest.raises(ConfigError, match=r"b\.json:1 is instruction/output, a\.txt:1 is text"):
        list(open_files(paths))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text":"x"}\n{"text":"y"\n', "a.jsonl:2: malformed JSON: Expecting ',' del"),
        ("a.jsonl", '{"text":"x"}\n[1]\n', "a.jsonl:2: malformed JSON: expected a JSON object"),
        ("a.json", '[{"text":"a"},\n{"text":"b"}\n{"text":"c"}]', "a.json:3: malformed JSON: exp"),
        ("a.json", '[{"text":"a"},\n\n{"text" "b"}]', "a.json:3: malformed JSON: Expecting ':'"),
        ("a.json", '[\n{"text":"a"},\n3]', "a.json:3: malformed JSON: expected a JSON object"),
        ("a.json", '[{"text":"a"}]\n\n"more"', "a.json:3: malformed JSON: text after the end"),
        ("a.json", '[{"text":"a"},', "a.json:1: malformed JSON: Expecting value"),
        ("a.json", '{\n  "text": "a"\n}', "a.json:1: malformed JSON: Expecting property name"),
        ("a.jsonl", "\n \n", "the data file"),
        ("a.json", "[]", "the data file"),
        ("a.jsonl", "", "the data file"),
        ("a.txt", "", "the data file"),
        ("a.txt", b"ok\nw\xe9\n", "a.txt:2: not UTF-8 text (byte 0xe9 at column 2)"),
        ("a.jsonl", b'{"text":"w\xe9"}\n', "a.jsonl:1: not UTF-8 text (byte 0xe9 at column 11)"),
        ("a.parquet", b"nonsense", "a.parquet: not readable as parquet after row 0"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    assert refusal(write(tmp_path, name, text)).startswith(message)


def test_missing_unknown_and_empty_places(tmp_path: Path) -> None:
    assert "no such data file" in refusal(tmp_path / "none.txt")
    assert 'unknown kind ".csv"' in refusal(write(tmp_path, "a.csv", "x"))
    (tmp_path / "empty").mkdir()
    assert "no data in the folder" in refusal(tmp_path / "empty")


def test_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "notes.md"):
        write(tmp_path, name, name)
    files = open_files([tmp_path])
    assert [sample.where for sample in files] == ["a.txt:1", "b.txt:1"]
    assert files.nbytes == 10


def test_long_text_comes_in_pieces_that_end_at_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.data.sources._PIECE_CHARACTERS", 10)
    text = "".join(f"line {number}\n" for number in range(7)) + "end"
    pieces = list(open_files([write(tmp_path, "a.txt", text)]))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.first for piece in pieces] == [True, False, False, False]
    assert [piece.last for piece in pieces] == [False, False, False, True]
    assert [piece.where for piece in pieces] == ["a.txt:1", "a.txt:3", "a.txt:5", "a.txt:7"]


def test_parquet_streams_rows(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table.table({"messages": [CHAT, CHAT]}), tmp_path / "a.parquet")
    files = open_files([tmp_path / "a.parquet"])
    assert [sample.where for sample in files] == ["a.parquet:row 1", "a.parquet:row 2"]
    assert files.schema is Schema.CHAT


def test_can_be_read_again(tmp_path: Path) -> None:
    files = open_files([write(tmp_path, "a.jsonl", '{"text":"x"}\n{"text":"y"}\n')])
    assert list(files) == list(files)
