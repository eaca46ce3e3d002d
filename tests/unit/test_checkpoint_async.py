"""Saving beside training: a consistent snapshot, bounded memory, errors that surface."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import compat_cases
import forebay
from checkpoint_cases import PLACES, Layout, assert_same, engine_of, numbers, run
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder_lock import folder_lock
from forebay.checkpoint.manifest import BLOCK_BYTES
from forebay.checkpoint.writer import Staging
from forebay.config.resolved import CheckpointSpec
from forebay.engine.saving import CheckpointSaver
from forebay.errors import CheckpointError
from forebay.tiers.ledger import Role, Tier
from forebay.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

_BESIDE = CheckpointSpec(beside_training=True)


class GatedDisk(RealDisk):
    """Writes nothing before the gate is opened; may fail then."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.gate = threading.Event()
        self._error = error

    def write(self, file, data, *, at):
        assert self.gate.wait(60)
        if self._error is not None:
            raise self._error
        super().write(file, data, at=at)


def _with_disk(engine, disk):
    engine.checkpoints._saver = CheckpointSaver(engine.core, disk=disk)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_goes_on_before_a_byte_is_written(tmp_path, place, dtype):
    """With staging for all of the state no step waits for the disk, and the files show the past."""
    layout = Layout(place=place, dtype=dtype, checkpoint=_BESIDE)
    with engine_of(layout) as engine:
        run(engine, 0, 3)
        staging = engine.ledger.bytes(Tier.HOST, Role.STAGING)
        disk = GatedDisk()
        _with_disk(engine, disk)
        want = numbers(engine)
        head_start = threading.Timer(0.5, disk.gate.set)
        head_start.start()  # the header is written first, by the thread that copies
        engine.save_checkpoint(tmp_path)
        run(engine, 3, 8)
        engine.wait_for_checkpoint()
        after = numbers(engine)
        assert engine.ledger.bytes(Tier.HOST, Role.STAGING) == staging
    with engine_of(Layout(place=place, dtype=dtype), seed=2) as other:
        other.load_checkpoint(tmp_path)
        assert_same(numbers(other), want)
        run(other, 3, 8)
        assert_same(numbers(other), after)


def test_with_little_staging_steps_wait_for_the_disk(tmp_path):
    """A slow disk and one block of memory: the snapshot is still that of the call."""

    class SlowDisk(RealDisk):
        def write(self, file, data, *, at):
            time.sleep(0.02)
            super().write(file, data, at=at)

    spec = CheckpointSpec(beside_training=True, staging_bytes=BLOCK_BYTES)
    with engine_of(Layout(checkpoint=spec, hidden=1500)) as engine:
        run(engine, 0, 2)
        _with_disk(engine, SlowDisk())
        want = numbers(engine)
        engine.save_checkpoint(tmp_path)
        run(engine, 2, 4)
        engine.wait_for_checkpoint()
        assert engine.checkpoints.last.stall_seconds > 0
    with engine_of(Layout(hidden=1500), seed=2) as other:
        other.load_checkpoint(tmp_path)
        assert_same(numbers(other), want)


@pytest.mark.parametrize("call", ["step", "save", "wait", "close"])
def test_a_failure_surfaces_at_the_next_call(tmp_path, call):
    """Once; training goes on, and earlier checkpoints are as they were."""
    engine = engine_of(Layout(checkpoint=_BESIDE))
    engine.save_checkpoint(tmp_path, "good")
    engine.wait_for_checkpoint()
    disk = GatedDisk(OSError(28, "No space left on device"))
    _with_disk(engine, disk)
    disk.gate.set()
    engine.save_checkpoint(tmp_path, "bad")
    engine.checkpoints._saver._thread.join()
    with pytest.raises(CheckpointError, match=r"cannot save checkpoint bad .* No space left"):
        {
            "step": lambda: run(engine, 0, 1),
            "save": lambda: engine.save_checkpoint(tmp_path, "next"),
            "wait": engine.wait_for_checkpoint,
            "close": engine.close,
        }[call]()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["good", "latest"]
    if call != "close":
        _with_disk(engine, RealDisk())
        if call == "step":
            engine.step()
        run(engine, 1, 3)
        engine.save_checkpoint(tmp_path, "next")
    engine.close()


def test_weights_changed_by_hand_meanwhile_are_noticed(tmp_path):
    with engine_of(Layout(place="device", dtype=torch.float32, checkpoint=_BESIDE)) as engine:
        disk = GatedDisk()
        _with_disk(engine, disk)
        engine.save_checkpoint(tmp_path)  # waits at the header, before it reads anything
        with torch.no_grad():
            engine.module.first.weight.zero_()
        disk.gate.set()
        with pytest.raises(CheckpointError, match=r"first\.weight was changed by hand"):
            engine.wait_for_checkpoint()
    assert not list(tmp_path.iterdir())


def test_updates_that_were_made_during_backward_wait_for_it_in_the_step(tmp_path):
    """Speculation goes on beside a save; taking what it made changes state, as any update does."""
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1e3,
        "forebay": {"update": "speculative"},
        "checkpoint": {"writer": {"decoupled": True}},
    }
    with compat_cases.engine_of(config) as engine:
        compat_cases.train(engine, 3)
        disk, policy = GatedDisk(), engine.core.collector.policy
        _with_disk(engine, disk)
        before = compat_cases.bits_of(engine)
        loss = compat_cases.loss_of(engine, next(compat_cases.batches(1)))
        engine.backward(loss)
        engine.save_checkpoint(tmp_path)  # in an open window
        threading.Timer(0.3, disk.gate.set).start()
        taken = policy.taken
        engine.step()
        compat_cases.train(engine, 2)
        engine.wait_for_checkpoint()
        assert policy.taken >= taken + 3
    with compat_cases.engine_of(config) as other:
        other.load_checkpoint(tmp_path)
        assert compat_cases.same_bits(compat_cases.bits_of(other), before)


def test_closing_finishes_what_is_being_written(tmp_path):
    engine = engine_of(Layout(checkpoint=_BESIDE))
    disk = GatedDisk()
    _with_disk(engine, disk)
    engine.save_checkpoint(tmp_path)
    threading.Timer(0.3, disk.gate.set).start()
    engine.close()
    with engine_of(Layout(), seed=1) as other:
        assert other.load_checkpoint(tmp_path)[0] is not None


def test_two_folders_of_one_optimizer_take_turns(tmp_path):
    """The second save does not let go of what the first one still reads."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model, optimizer = forebay.offload(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    beside = forebay.SaveTiming.BESIDE_TRAINING
    last, best = (
        forebay.Checkpoints(optimizer, tmp_path / name, timing=beside) for name in ("last", "best")
    )
    disk = GatedDisk()
    last._saver = CheckpointSaver(optimizer.engine, disk=disk)
    before = [param.detach().clone() for param in model.parameters()]
    last.save("one")
    threading.Timer(0.3, disk.gate.set).start()
    best.save("one")
    assert (tmp_path / "last" / "one" / "manifest.json").exists()
    best.wait()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for checkpoints in (last, best):
        checkpoints.load("one")
        assert all(map(torch.equal, before, model.parameters()))
    optimizer.close()


def test_staging_counts_blocks_that_wait_to_be_used_again():
    staging = Staging(2 * BLOCK_BYTES)
    for block in [staging.take(BLOCK_BYTES) for _ in range(2)]:
        staging.give(block)
    small = [staging.take(BLOCK_BYTES // 2) for _ in range(4)]
    assert sum(map(len, small)) == 2 * BLOCK_BYTES
    assert not staging._blocks


@pytest.mark.parametrize("setter", ["master", "moment"])
def test_state_set_by_hand_meanwhile_is_not_in_the_checkpoint(tmp_path, setter):
    with engine_of(Layout(checkpoint=_BESIDE)) as engine:
        run(engine, 0, 2)
        want = numbers(engine)
        disk = GatedDisk()
        _with_disk(engine, disk)
        engine.save_checkpoint(tmp_path)
        threading.Timer(0.3, disk.gate.set).start()
        param = engine.module.first.weight
        if setter == "master":
            safe_set_full_fp32_param(param, torch.zeros(param.shape))
        else:
            safe_set_full_optimizer_state(param, torch.zeros(param.shape), "exp_avg")
        engine.wait_for_checkpoint()
        engine.load_checkpoint(tmp_path)
        assert_same(numbers(engine), want)


def test_a_save_beside_training_makes_do_with_what_the_budget_leaves(tmp_path):
    model = torch.nn.Linear(64, 64)
    budget = 3 * BLOCK_BYTES
    model, optimizer = forebay.offload(
        model, torch.optim.AdamW(model.parameters()), host_budget=budget
    )
    beside = forebay.SaveTiming.BESIDE_TRAINING
    checkpoints = forebay.Checkpoints(optimizer, tmp_path, timing=beside)
    checkpoints.save("one")
    checkpoints.wait()
    assert checkpoints.load("one") == {}
    optimizer.close()


def test_what_is_still_being_saved_is_what_is_loaded(tmp_path):
    with engine_of(Layout(checkpoint=CheckpointSpec(beside_training=True, keep=1))) as engine:
        engine.save_checkpoint(tmp_path, "old")
        engine.wait_for_checkpoint()
        run(engine, 0, 2)
        want, disk = numbers(engine), GatedDisk()
        _with_disk(engine, disk)
        engine.save_checkpoint(tmp_path, "new")
        threading.Timer(0.3, disk.gate.set).start()
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "new")
        assert_same(numbers(engine), want)


def test_saves_of_two_jobs_into_one_folder_take_turns(tmp_path):
    """The second one neither removes nor finishes what the first is writing."""
    with engine_of(Layout(checkpoint=_BESIDE)) as one, engine_of(Layout(), seed=1) as other:
        disk = GatedDisk()
        _with_disk(one, disk)
        run(one, 0, 1)
        want = numbers(one)
        one.save_checkpoint(tmp_path, "same")
        while not (tmp_path / ".same.forebay-partial").exists():
            time.sleep(0.01)
        second = threading.Thread(target=other.save_checkpoint, args=(tmp_path, "same"))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        disk.gate.set()
        one.wait_for_checkpoint()
        second.join(60)
        assert_same(numbers(other), _loaded(tmp_path, "same"))
        one.save_checkpoint(tmp_path, "own")
        one.wait_for_checkpoint()
        assert_same(want, _loaded(tmp_path, "own"))


def _loaded(folder, tag):
    with engine_of(Layout(), seed=2) as engine:
        engine.load_checkpoint(folder, tag)
        return numbers(engine)


def test_a_folder_that_is_never_free_is_an_error(tmp_path):
    with (
        folder_lock(tmp_path),
        pytest.raises(CheckpointError, match="another save has been writing into"),
        folder_lock(tmp_path, limit_seconds=0.1),
    ):
        pass
    with folder_lock(tmp_path, limit_seconds=0.1):
        pass
