"""`forebay.Checkpoints`: saving and going on in a plain loop, without DeepSpeed's face."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import forebay
from checkpoint_cases import Layout, Net, assert_same, batch, engine_of, numbers, run
from forebay import Checkpoints, SaveTiming
from forebay.engine import EngineOptions, offload_with
from forebay.errors import CheckpointError
from forebay.plan import UpdatePlace


class Loop:
    """A plain loop with a schedule."""

    def __init__(self, *, seed: int = 0, **options) -> None:
        torch.manual_seed(seed)
        self.model = Net(37).to(torch.bfloat16)
        source = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        values = EngineOptions(device="cpu", clip_norm=1.0, threads=1, **options)
        self.model, self.optimizer = offload_with(self.model, source, options=values)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=30)

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for index in range(first, last):
            loss = self.model(batch(index).to(torch.bfloat16)).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def bits(self) -> dict:
        self.optimizer.synchronize()
        state = self.optimizer.state_dict()["state"]
        found = {
            f"state {i} {k}": v.clone() for i, entry in state.items() for k, v in entry.items()
        }
        return found | {k: v.clone() for k, v in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole():
    loop = Loop()
    losses, bits = loop.run(0, 8), loop.bits()
    loop.optimizer.close()
    return losses, bits


@pytest.mark.parametrize("timing", SaveTiming)
@pytest.mark.parametrize("place", [UpdatePlace.DEVICE, UpdatePlace.HOST])
def test_a_plain_loop_goes_on_with_the_same_bits(tmp_path, whole, timing, place):
    losses, bits = whole
    loop = Loop(update=UpdatePlace.HOST)
    checkpoints = Checkpoints(
        loop.optimizer, tmp_path, scheduler=loop.scheduler, keep=2, timing=timing
    )
    for step in range(1, 6):
        assert loop.run(step - 1, step) == losses[step - 1 : step]
        checkpoints.save(f"step{step}", client_state={"next": step})
    loop.optimizer.close()
    checkpoints.wait()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["latest", "step4", "step5"]

    other = Loop(seed=9, update=place, unit_elements=1500)
    other.run(20, 22)
    checkpoints = Checkpoints(other.optimizer, tmp_path, scheduler=other.scheduler)
    for tag, step in (("step4", 4), (None, 5)):
        assert checkpoints.load(tag) == {"next": step}
        assert other.run(step, 8) == losses[step:]
        assert_same_bits(other.bits(), bits)
    other.optimizer.close()


def assert_same_bits(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


def test_both_faces_load_each_others(tmp_path):
    layout = Layout(dtype=torch.bfloat16)
    with engine_of(layout) as engine:
        run(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "engine")
        want = numbers(engine)
    torch.manual_seed(4)
    model = Net(37).to(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    model, optimizer = forebay.offload(model, torch.optim.AdamW(groups, lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    with pytest.raises(CheckpointError, match="has the state of a schedule"):
        Checkpoints(optimizer, tmp_path / "engine").load()
    Checkpoints(optimizer, tmp_path / "engine", scheduler=scheduler).load()
    assert scheduler.last_epoch == 3
    Checkpoints(optimizer, tmp_path / "plain", scheduler=scheduler).save("again")
    optimizer.close()
    with engine_of(replace(layout, place="device"), seed=6) as engine:
        engine.load_checkpoint(tmp_path / "plain")
        found = numbers(engine)
        assert engine.global_steps == 3
        for kind in ("master", "exp_avg", "step", "weight", "lr"):
            assert_same(found, want, only=kind)


def test_an_empty_folder_has_nothing_to_go_on_from(tmp_path):
    loop = Loop()
    checkpoints = Checkpoints(loop.optimizer, tmp_path / "none")
    assert checkpoints.load() is None
    with pytest.raises(CheckpointError, match="no checkpoint step1"):
        checkpoints.load("step1")
    checkpoints.save(7)
    assert checkpoints.last.path == tmp_path / "none" / "7"
    (tmp_path / "none" / "latest").unlink()
    assert checkpoints.load() == {}
    loop.optimizer.close()


def test_closing_waits_until_everything_is_read(tmp_path, monkeypatch):
    """The state's memory goes away only after it was copied."""
    import threading

    from forebay.checkpoint.disk import RealDisk

    gate = threading.Event()
    real = RealDisk.create

    def create(self, path, *, nbytes=0):
        gate.wait(30)
        return real(self, path, nbytes=nbytes)

    monkeypatch.setattr(RealDisk, "create", create)
    loop = Loop()
    loop.run(0, 2)
    checkpoints = Checkpoints(loop.optimizer, tmp_path, timing=SaveTiming.BESIDE_TRAINING)
    checkpoints.save("one")
    want = loop.bits()
    threading.Timer(0.3, gate.set).start()
    loop.optimizer.close()
    assert gate.is_set()
    checkpoints.wait()
    other = Loop(seed=3)
    assert Checkpoints(other.optimizer, tmp_path).load() == {}
    assert_same_bits(other.bits(), want)
    other.optimizer.close()
