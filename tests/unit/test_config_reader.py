"""Reading a configuration: every accepted form, and one clear error for every other."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from forebay.config.reader import parse, read
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def test_dict_is_copied() -> None:
    inner: dict[str, Any] = {"stage": 2}
    source = {"zero_optimization": inner}
    result = read(source)
    result["zero_optimization"]["stage"] = 3
    assert inner == {"stage": 2}


def test_file_by_text_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_CONFIG))
    assert read(path) == read(str(path)) == _CONFIG


def test_byte_order_mark_passes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(_CONFIG).encode())
    assert read(path) == _CONFIG


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64(encode: Any) -> None:
    config = {**_CONFIG, "log_level": "????>>>>~~~~"}
    assert read(encode(json.dumps(config).encode()).decode()) == config


def test_long_base64_is_no_file_name() -> None:
    config = {"optimizer": {"params": {"x": "y" * 10_000}}}
    assert read(base64.b64encode(json.dumps(config).encode()).decode()) == config


def test_comments_and_trailing_commas() -> None:
    text = """
    // a line
    {
      # another
      "a": 1, /* a block
      of two lines */ "b": [1, 2, ],
      "c": "http://localhost, // no comment, #1 /* }",  // after a value
      "d": "a quote \\" // no comment, }",
    }
    """
    assert parse(text, name="x") == {
        "a": 1,
        "b": [1, 2],
        "c": "http://localhost, // no comment, #1 /* }",
        "d": 'a quote " // no comment, }',
    }


def test_malformed_json_names_line_and_shows_it() -> None:
    text = '{\n  // fine\n  "a": 1\n  "b": 2\n}'
    with pytest.raises(ConfigError) as caught:
        parse(text, name="ds.json")
    assert str(caught.value) == (
        "ds.json is not JSON: line 4, column 3: expecting ',' delimiter\n"
        'hint: the line is: "b": 2'
    )


@pytest.mark.parametrize(
    "text", ["{", '{"a": }', '{"a": 1,, }', "{'a': 1}", '{"a": "\n"}', "{a: 1}"]
)
def test_other_malformed_json(text: str) -> None:
    with pytest.raises(ConfigError, match=r"x is not JSON: line \d"):
        parse(text, name="x")


def test_duplicate_keys_are_named_with_their_path() -> None:
    text = '{"a": {"stage": 1, "stage": 2}, "b": [{"c": 1, "c": 1}], "a2": {"stage": 1}}'
    with pytest.raises(ConfigError) as caught:
        parse(text, name="ds.json")
    assert str(caught.value).count("given twice") == 2
    assert "config key a.stage is given twice" in str(caught.value)
    assert "config key b.c is given twice" in str(caught.value)


@pytest.mark.parametrize(("text", "shown"), [("[1]", r"\[1\]"), ("5", "5"), ("null", "null")])
def test_only_objects(text: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"x holds {shown}"):
        parse(text, name="x")


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_empty(text: str) -> None:
    with pytest.raises(ConfigError, match="x is empty"):
        parse(text, name="x")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{\n"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not UTF-8: line 2 has the byte 0xff"):
        read(path)


@pytest.mark.parametrize("source", ["missing.json", "ds_config", "config", "", "a\0b"])
def test_missing_file(source: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration") as caught:
        read(source)
    assert caught.value.hint == "give a dict, the path of a JSON file, or base64 of JSON"


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize("source", [None, 5, b"{}", [("a", 1)]])
def test_other_types(source: Any) -> None:
    with pytest.raises(ConfigError, match="it is of type"):
        read(source)


def test_keys_must_be_text() -> None:
    with pytest.raises(ConfigError, match=r"config key 1 in fp16 is not text"):
        read({"fp16": {1: 2}})


def test_huge_and_deep(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        read(path)
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse('{"a":' * 100_000, name="x")
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(cycle)
