"""The folder of checkpoints: what becomes durable before what, and what a crash leaves."""

from __future__ import annotations

import os

import pytest

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run, tag_of
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.config.resolved import CheckpointSpec
from forebay.engine.save_request import SaveRequest, SaveTiming
from forebay.engine.saving import CheckpointSaver
from forebay.engine.snapshot import RunState
from forebay.errors import CheckpointError

_RUN = RunState(counters={}, config={}, client_state={})


class RecordingDisk(RealDisk):
    """Keeps the order of everything that is asked of it; may stop at one call."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        self._stop_at = stop_at

    def _note(self, what: str, name: str) -> None:
        if len(self.calls) == self._stop_at:
            raise OSError(5, "Input/output error")
        self.calls.append((what, name))

    def make_folder(self, path):
        self._note("make_folder", path.name)
        super().make_folder(path)

    def create(self, path, *, nbytes=0):
        self._note("create", path.name)
        file = super().create(path, nbytes=nbytes)
        self._names[file] = path.name
        return file

    def write(self, file, data, *, at):
        self._note("write", self._names[file])
        super().write(file, data, at=at)

    def sync(self, file):
        self._note("sync", self._names[file])
        super().sync(file)

    def sync_folder(self, path):
        self._note("sync_folder", path.name)
        super().sync_folder(path)

    def rename(self, source, target):
        self._note("rename", f"{source.name} -> {target.name}")
        super().rename(source, target)


@pytest.fixture
def engine():
    with engine_of(Layout()) as opened:
        yield opened


def _save(engine, folder, tag, *, disk=None, timing=SaveTiming.AT_ONCE):
    saver = CheckpointSaver(engine.core, disk=disk)
    saver.save(SaveRequest(folder=folder, tag=tag, timing=timing), _RUN)
    saver.wait()


@pytest.mark.parametrize("timing", SaveTiming)
def test_everything_is_durable_before_it_gets_its_name(engine, tmp_path, timing):
    disk = RecordingDisk()
    folder = tmp_path / "run"
    _save(engine, folder, "one", disk=disk, timing=timing)
    tensors, latest = "tensors-00000.safetensors", ".latest.forebay-partial"
    partial = ".one.forebay-partial"
    order = [call for call in disk.calls if call[0] != "write"]
    assert order == [
        ("make_folder", partial),
        ("create", tensors),
        ("sync", tensors),
        ("create", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync_folder", partial),
        ("rename", f"{partial} -> one"),
        ("sync_folder", "run"),
        ("create", latest),
        ("sync", latest),
        ("rename", f"{latest} -> latest"),
        ("sync_folder", "run"),
    ]
    for name in (tensors, "manifest.json", latest):
        last_write = max(i for i, call in enumerate(disk.calls) if call == ("write", name))
        assert last_write < disk.calls.index(("sync", name))


def test_a_disk_that_fails_at_any_call_leaves_a_whole_checkpoint(engine, tmp_path):
    """The first or the second, never neither; the next save cleans up and works."""
    whole = RecordingDisk()
    _save(engine, tmp_path / "count", "same", disk=whole)
    first = numbers(engine)
    other = engine_of(Layout(), seed=3)
    for call in range(len(whole.calls) + 4):
        folder = tmp_path / str(call)
        _save(engine, folder, "same")
        failed = False
        try:
            _save(other, folder, "same", disk=RecordingDisk(stop_at=call))
        except CheckpointError as error:
            failed = True
            assert "Input/output error" in str(error)
        with engine_of(Layout(), seed=5) as reader:
            reader.load_checkpoint(folder, load_lr_scheduler_states=False)
            found = numbers(reader)
            want = numbers(other) if not failed else first
            if found["master first.weight"].equal(want["master first.weight"]):
                assert_same(found, want, only="master")
            else:  # it failed after the new one had its name
                assert_same(found, numbers(other), only="master")
        _save(other, folder, "same")
        assert sorted(item.name for item in folder.iterdir()) == ["latest", "same"]
    other.close()


def test_a_crash_while_a_tag_is_replaced_loses_nothing(engine, tmp_path):
    """Between the two renames the old checkpoint has a hidden name, which readers know."""
    engine.save_checkpoint(tmp_path, "same")
    (tmp_path / "same").rename(tmp_path / ".same.forebay-replaced")
    (tmp_path / ".same.forebay-partial").mkdir()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / ".same.forebay-replaced")
    engine.save_checkpoint(tmp_path, "next")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["latest", "next", "same"]


def test_latest_may_name_what_is_not_complete(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "good")
    (tmp_path / ".bad.forebay-partial").mkdir()
    (tmp_path / "latest").write_text("bad\n")
    with pytest.raises(CheckpointError, match=r"was not written to its end\nhint: .*: good"):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        engine.load_checkpoint(tmp_path)


def test_the_newest_is_found_without_latest(engine, tmp_path):
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(tmp_path, tag, save_latest=False)
    # A file system's clock may tick in milliseconds: say plainly that "a" and "c" are newer.
    saved = (tmp_path / "c" / "manifest.json").stat().st_mtime_ns
    for later, tag in enumerate(("c", "a"), start=1):
        newer = saved + later * 1_000_000_000
        os.utime(tmp_path / tag / "manifest.json", ns=(newer, newer))
    (tmp_path / "unrelated").mkdir()
    found = CheckpointFolder(tmp_path, disk=RealDisk())
    assert [item.name for item in found.complete()] == ["a", "c", "b"]


def test_links_are_not_followed(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="is a link"):
        engine.load_checkpoint(tmp_path, "link")
    manifest = tmp_path / "real" / "manifest.json"
    manifest.rename(tmp_path / "elsewhere.json")
    manifest.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json: it is a link"):
        engine.load_checkpoint(tmp_path, "real")


def test_too_little_room_is_said_before_anything_is_written(engine, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: os.statvfs(path) and type("U", (), {"free": 1000})
    )
    with pytest.raises(CheckpointError, match=r"the checkpoint takes .* has 1000 B left"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("beside", [False, True])
def test_saves_leave_no_memory_behind(tmp_path, beside):
    """Ten saves, resident memory flat."""
    import gc

    import psutil

    process = psutil.Process()
    spec = CheckpointSpec(beside_training=beside)
    with engine_of(Layout(hidden=1300, checkpoint=spec)) as engine:
        run(engine, 0, 1)
        sizes = []
        for _ in range(10):
            engine.save_checkpoint(tmp_path, "same")
            engine.wait_for_checkpoint()
            gc.collect()
            sizes.append(process.memory_info().rss)
        nbytes = engine.checkpoints.last.nbytes
    assert nbytes > 15 << 20
    assert max(sizes[2:]) - sizes[1] < 4 << 20, sizes
    assert tag_of(tmp_path) == "same"
