"""Manifests and headers from strangers: refused with one line, nothing outside is touched."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run
from forebay.checkpoint.checksum import Checksum
from forebay.checkpoint.header import MAX_HEADER_BYTES, parse_header
from forebay.checkpoint.manifest_json import MAX_MANIFEST_BYTES
from forebay.checkpoint.reader import Checkpoint
from forebay.checkpoint.values import decode, encode
from forebay.errors import CheckpointError

_TENSORS = "tensors-00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(Layout()) as engine:
        run(engine, 0, 1)
        engine.save_checkpoint(folder, "one", client_state={"epoch": 1})
    return folder / "one"


def _sealed(body: dict[str, Any]) -> bytes:
    """A manifest with a checksum that matches, as an attacker writes it."""
    body.pop("manifest_crc32c", None)
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return text + b',"manifest_crc32c":%d}\n' % Checksum.CRC32C.of(text)


def _refused(folder) -> str:
    around = sorted(folder.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught, Checkpoint(folder) as checkpoint:
        checkpoint.verify()
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.message) < 600
    assert sorted(folder.parent.rglob("*")) == around
    return caught.value.message


def _parameter(body):
    return next(p for p in body["parameters"] if p["kind"] == "trained" and p["shape"] != [])


def _master(body):
    return _parameter(body)["slices"]["master"]


def _nested(depth):
    return [_nested(depth - 1)] if depth else 0


_ATTACKS = {
    "parent": lambda b: b["files"][0].update(name="../one/tensors-00000.safetensors"),
    "absolute": lambda b: b["files"][0].update(name="/etc/passwd"),
    "other ending": lambda b: b["files"][0].update(name="manifest.json"),
    "hidden": lambda b: b["files"][0].update(name=".tensors.safetensors"),
    "no text": lambda b: b["files"][0].update(name=3),
    "slice elsewhere": lambda b: _master(b)[0].update(file="/etc/passwd"),
    "too large": lambda b: b["files"][0].update(bytes=1 << 60),
    "negative": lambda b: b["files"][0].update(bytes=-1),
    "fraction": lambda b: b["files"][0].update(bytes=1.5),
    "flag as number": lambda b: b["files"][0].update(bytes=True),
    "same file twice": lambda b: b["files"].append(dict(b["files"][0])),
    "file that is not there": lambda b: b["files"].append(
        {**b["files"][0], "name": "a.safetensors"}
    ),
    "absurd shape": lambda b: _parameter(b).update(shape=[1 << 52, 1 << 52]),
    "many dims": lambda b: _parameter(b).update(shape=[1 << 50] * 100_000),
    "other shape": lambda b: _parameter(b).update(shape=[1]),
    "overlap": lambda b: _master(b).append(dict(_master(b)[0])),
    "missing": lambda b: _master(b).clear(),
    "hole": lambda b: _master(b)[0].update(start=1),
    "short": lambda b: _master(b)[0].update(end=_master(b)[0]["end"] - 1),
    "backwards": lambda b: _master(b)[0].update(start=5, end=2),
    "no checksums": lambda b: _master(b)[0].update(crc32c=[]),
    "many checksums": lambda b: _master(b)[0].update(crc32c=[1] * 1000),
    "wrong checksum": lambda b: _master(b)[0]["crc32c"].__setitem__(0, 1),
    "unknown dtype": lambda b: _parameter(b).update(dtype="F1"),
    "unknown kind": lambda b: _parameter(b).update(kind="magic"),
    "other kind": lambda b: _parameter(b).update(kind="frozen", group=None),
    "group of a buffer": lambda b: b["parameters"][-1].update(group=[None]),
    "unknown group": lambda b: _parameter(b).update(group=7),
    "unknown role": lambda b: _parameter(b)["slices"].update(gradient=[]),
    "role less": lambda b: _parameter(b)["slices"].pop("exp_avg"),
    "no name": lambda b: _parameter(b).update(names=[]),
    "name twice": lambda b: _parameter(b).update(names=["first.bias", "first.bias"]),
    "parameter twice": lambda b: b["parameters"].append(dict(_parameter(b))),
    "parameter less": lambda b: b["parameters"].remove(_parameter(b)),
    "no list": lambda b: b.update(parameters={}),
    "null": lambda b: b.update(files=None),
    "strange value": lambda b: b["client_state"].update({"$eval": "1"}),
    "deep": lambda b: b["client_state"].update(x=_nested(500)),
    "strange float": lambda b: b["client_state"].update({"x": {"$float": "import os"}}),
    "negative step": lambda b: _parameter(b).update(step=-3),
    "counter": lambda b: b["counters"].update(global_steps="many"),
    "other format": lambda b: b.update(format="pickle"),
    "earlier version": lambda b: b.update(version=1),
    "version as flag": lambda b: b.update(version=True),
    "later version": lambda b: b.update(version=3),
}


@pytest.mark.parametrize("attack", _ATTACKS)
def test_a_manifest_that_lies(saved, tmp_path, attack):
    folder = shutil.copytree(saved, tmp_path / "one")
    body = json.loads((folder / "manifest.json").read_bytes())
    _ATTACKS[attack](body)
    (folder / "manifest.json").write_bytes(_sealed(body))
    _refused(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"format":"forebay-checkpoint","format":"forebay-checkpoint"}',
        b'{"format":NaN}',
        b'{"format":' + b"1" * 10_000 + b"}",
    ],
)
def test_a_manifest_that_is_none(saved, tmp_path, data):
    folder = shutil.copytree(saved, tmp_path / "one")
    (folder / "manifest.json").write_bytes(data)
    _refused(folder)


def test_a_huge_manifest(saved, tmp_path):
    """A file with a hole, which takes no room on the disk and would fill memory."""
    folder = shutil.copytree(saved, tmp_path / "one")
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    assert str(MAX_MANIFEST_BYTES) in _refused(folder)


def test_files_that_are_links_or_pipes(saved, tmp_path):
    import os

    folder = shutil.copytree(saved, tmp_path / "one")
    (folder / _TENSORS).unlink()
    (folder / _TENSORS).symlink_to(saved / _TENSORS)
    assert "it is a link" in _refused(folder)
    (folder / _TENSORS).unlink()
    os.mkfifo(folder / _TENSORS)
    assert "no regular file" in _refused(folder)


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_header_that_lies_about_its_length(saved, tmp_path, length):
    folder = shutil.copytree(saved, tmp_path / "one")
    with (folder / _TENSORS).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    _refused(folder)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def _paths(value, here=()):
    yield here
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from _paths(item, (*here, key))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_in_any_place(saved, tmp_path_factory, data):
    """One value of a manifest becomes another: opened and verified, or one CheckpointError."""
    body = json.loads((saved / "manifest.json").read_bytes())
    body["random"] = {}
    path = data.draw(st.sampled_from([p for p in _paths(body) if p]))
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = data.draw(_json)
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("any") / "one")
    (folder / "manifest.json").write_bytes(_sealed(body))
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.verify()
    except CheckpointError as error:
        assert len(error.message.splitlines()) == 1
    finally:
        shutil.rmtree(folder.parent)


@pytest.fixture
def fresh():
    """Engines that have loaded nothing, each as long as it stays so."""

    class Fresh:
        engine = None

        def get(self):
            if self.engine is None:
                self.engine = engine_of(Layout(), seed=3)
                self.before = numbers(self.engine)
            return self.engine

        def drop(self):
            self.engine.close()
            self.engine = None

    holder = Fresh()
    yield holder
    if holder.engine is not None:
        holder.drop()


# What an engine takes from a manifest beside tensors.
_TAKEN = (
    *("rule", "groups", "loss_scale", "scheduler", "random", "counters", "client_state", "data"),
    "policy",
)
_STRANGE = st.sampled_from(
    [None, True, -1, 1.5, 1e308, 1 << 60, "", "x", [], [1], {}, {"a": 1}, {"$float": "nan"}]
)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_an_engine_loads_any_value_or_stays_as_it_was(saved, tmp_path_factory, fresh, data):
    body = json.loads((saved / "manifest.json").read_bytes())
    taken = [path for path in _paths(body) if path and path[0] in _TAKEN and len(path) < 5]
    path = data.draw(st.sampled_from(taken))
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = data.draw(_STRANGE | _json)
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("any") / "one")
    (folder / "manifest.json").write_bytes(_sealed(body))
    engine = fresh.get()
    try:
        engine.load_checkpoint(folder.parent, "one")
        run(engine, 1, 2)
    except CheckpointError as error:
        assert len(error.message.splitlines()) == 1
        assert_same(numbers(engine), fresh.before)
    else:
        fresh.drop()
    finally:
        shutil.rmtree(folder.parent)


def test_groups_of_different_directions_are_refused_before_anything_changes(saved, tmp_path, fresh):
    body = json.loads((saved / "manifest.json").read_bytes())
    body["groups"][0]["maximize"] = not body["groups"][0].get("maximize", False)
    folder = shutil.copytree(saved, tmp_path / "one")
    (folder / "manifest.json").write_bytes(_sealed(body))
    engine = fresh.get()
    with pytest.raises(CheckpointError, match="maximize"):
        engine.load_checkpoint(tmp_path, "one")
    assert_same(numbers(engine), fresh.before)


@pytest.mark.parametrize("name", ["last_epoch", "T_max", "base_lrs"])
def test_a_schedule_that_has_lost_a_number_is_refused(saved, tmp_path, fresh, name):
    body = json.loads((saved / "manifest.json").read_bytes())
    assert body["scheduler"][name] is not None
    body["scheduler"][name] = None
    folder = shutil.copytree(saved, tmp_path / "one")
    (folder / "manifest.json").write_bytes(_sealed(body))
    engine = fresh.get()
    with pytest.raises(CheckpointError, match=name):
        engine.load_checkpoint(tmp_path, "one")
    assert_same(numbers(engine), fresh.before)


_HEADERS = {
    "other dtype": lambda entry: entry.update(dtype="I32"),
    "other shape": lambda entry: entry.update(shape=[*entry["shape"], 7]),
    "overlap": lambda entry: entry.update(data_offsets=[0, entry["data_offsets"][1]]),
    "beyond the end": lambda entry: entry.update(
        data_offsets=[value + (1 << 40) for value in entry["data_offsets"]]
    ),
    "backwards": lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]),
    "gone": lambda entry: entry.clear(),
}


@pytest.mark.parametrize("attack", _HEADERS)
def test_a_header_that_disagrees_with_the_manifest(saved, tmp_path, attack):
    """Both have checksums that match."""
    folder = shutil.copytree(saved, tmp_path / "one")
    body = json.loads((folder / "manifest.json").read_bytes())
    raw = (folder / _TENSORS).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    key = max(header, key=lambda name: header[name]["data_offsets"][0])
    _HEADERS[attack](header[key])
    if not header[key]:
        del header[key]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    assert len(text) == end - 8
    (folder / _TENSORS).write_bytes(raw[:8] + text + raw[end:])
    body["files"][0]["header_crc32c"] = Checksum.CRC32C.of(raw[:8] + text)
    (folder / "manifest.json").write_bytes(_sealed(body))
    assert _TENSORS in _refused(folder)


_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F1", 3]),
        "shape": st.lists(st.integers(-2, 1 << 60) | st.just(2), max_size=4),
        "data_offsets": st.lists(
            st.integers(-8, 1 << 62) | st.sampled_from([0, 8, 16]), max_size=3
        ),
    }
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=4), _entry | _json, max_size=4), st.integers(0, 64))
def test_any_header(entries, data_bytes):
    """Parsed into tensors that tile the data exactly, or refused."""
    text = json.dumps(entries).encode()
    try:
        found = parse_header(text, data_bytes=data_bytes, what="file")
    except CheckpointError:
        return
    assert sum(spec.nbytes for spec, _, _ in found.values()) == data_bytes


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 64))
def test_any_bytes_as_header(text, data_bytes):
    with pytest.raises(CheckpointError):
        parse_header(text or b"x", data_bytes=data_bytes + 1, what="file")


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(_plain)
def test_plain_values_come_back(value):
    found = decode(json.loads(json.dumps(encode(value, where="value"), allow_nan=False)))
    assert repr(found) == repr(value)
