"""A full disk leaves the old checkpoint; damage is named before anything changes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess

import pytest

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run
from forebay.errors import CheckpointError

_HIDDEN = 500


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB; skipped where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a file system of a fixed size needs root")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=12m", "none", str(folder)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("this container may not mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _old_is_there(folder, want):
    assert sorted(item.name for item in folder.iterdir()) == ["latest", "old"]
    with engine_of(Layout(hidden=_HIDDEN), seed=1) as other:
        other.load_checkpoint(folder)
        assert_same(numbers(other), want)


def _saved_once(folder):
    engine = engine_of(Layout(hidden=_HIDDEN))
    run(engine, 0, 2)
    engine.save_checkpoint(folder, "old")
    want = numbers(engine)
    run(engine, 2, 3)
    return engine, want


def test_full_disk(small_disk, monkeypatch):
    """Both ways: seen before writing, and in the middle of it."""
    engine, want = _saved_once(small_disk)
    filler = small_disk.parent / "disk" / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"x" * (free - (2 << 20)))
    with pytest.raises(CheckpointError, match=r"has 2\.0 MiB left"):
        engine.save_checkpoint(small_disk, "new")
    monkeypatch.setattr("forebay.engine.saving._require_room", lambda folder, nbytes: None)
    for tag in ("new", "old"):
        with pytest.raises(CheckpointError, match="No space left on device"):
            engine.save_checkpoint(small_disk, tag)
    filler.unlink()
    _old_is_there(small_disk, want)
    run(engine, 3, 4)
    engine.save_checkpoint(small_disk, "new")
    engine.close()


def test_file_too_large(tmp_path):
    """The same through a limit on the size of files, where no file system can be mounted."""
    engine, want = _saved_once(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            engine.save_checkpoint(tmp_path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _old_is_there(tmp_path, want)
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(Layout()) as engine:
        run(engine, 0, 2)
        engine.save_checkpoint(folder, "one")
    return folder / "one"


@pytest.mark.parametrize("name", ["manifest.json", "tensors-00000.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "grow"])
def test_damage_is_named_before_anything_changes(saved, tmp_path, name, damage):
    """One bit at each of some twenty places, or a byte less or more."""
    size = (saved / name).stat().st_size
    places = range(0, size, max(1, size // 20)) if damage == "flip" else [size - 1]
    with engine_of(Layout(), seed=3) as engine:
        before = numbers(engine)
        for place in places:
            folder = tmp_path / str(place)
            shutil.copytree(saved, folder / "one")
            file = folder / "one" / name
            data = bytearray(file.read_bytes())
            if damage == "flip":
                data[place] ^= 0x10
            file.write_bytes({"flip": data, "truncate": data[:-1], "grow": data + b"x"}[damage])
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
                engine.load_checkpoint(folder, "one")
            assert len(caught.value.message.splitlines()) == 1
        assert_same(numbers(engine), before)
