"""Checkpoints of earlier versions of the format are read as they are."""

from __future__ import annotations

import json
import zlib

import pytest

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run
from forebay.checkpoint.describe import compare
from forebay.checkpoint.reader import Checkpoint
from forebay.errors import CheckpointError


def _as_version_1(folder) -> None:
    """Sum everything by CRC-32, under the names that version 1 has."""
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("manifest_crc32c")
    body["version"] = 1
    data, begins = {}, {}
    for file in body["files"]:
        raw = data[file["name"]] = (folder / file["name"]).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        begins[file["name"]] = end, json.loads(raw[8:end])
        del file["header_crc32c"]
        file["header_crc32"] = zlib.crc32(raw[:end])

    def sum_again(piece, key):
        begin, header = begins[piece["file"]]
        first, last = header[key]["data_offsets"]
        del piece["crc32c"]
        piece["crc32"] = [zlib.crc32(data[piece["file"]][begin + first : begin + last])]
        if first == last:
            piece["crc32"] = []

    for entry in body["parameters"]:
        for role, pieces in entry["slices"].items():
            for piece in pieces:
                sum_again(piece, f"{role}/{entry['names'][0]}")
    for name, piece in body["random_tensors"].items():
        sum_again(piece, f"random/{name}")
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    (folder / "manifest.json").write_bytes(text + b',"manifest_crc32":%d}\n' % zlib.crc32(text))


@pytest.fixture
def saved(tmp_path):
    with engine_of(Layout()) as engine:
        run(engine, 0, 2)
        engine.save_checkpoint(tmp_path, "old")
        engine.save_checkpoint(tmp_path, "new")
        want = numbers(engine)
    _as_version_1(tmp_path / "old")
    return tmp_path, want


def test_version_1_loads(saved):
    folder, want = saved
    with engine_of(Layout(), seed=4) as engine:
        engine.load_checkpoint(folder, "old")
        assert_same(numbers(engine), want)


def test_versions_compare_by_their_bytes(saved):
    """Checksums of two kinds say nothing about each other."""
    folder, _ = saved
    with Checkpoint(folder / "old") as left, Checkpoint(folder / "new") as right:
        found = compare(left, right)
    assert found["different_tensors"] == []
    assert found["same_tensors"] > 0


def test_damage_in_version_1_is_found(saved):
    folder, _ = saved
    file = folder / "old" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with Checkpoint(folder / "old") as checkpoint, pytest.raises(CheckpointError, match="damaged"):
        checkpoint.verify()
