"""`steps_per_print` is seen by whoever configured no logging, and TensorBoard gets every update."""

from __future__ import annotations

import sys

import pytest
import torch

import forebay
from compat_cases import ON_HOST, batches, engine_of, loss_of, small, train
from forebay.errors import ConfigError
from house.tree import python

_SCRIPT = """
import torch, forebay
model = torch.nn.Linear(3, 1)
engine, *_ = forebay.initialize(
    model=model,
    config={
        "train_batch_size": 2,
        "steps_per_print": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
    },
)
for _ in range(5):
    engine.backward(engine(torch.ones(2, 3, device=engine.device)).square().mean())
    engine.step()
engine.close()
"""


def test_a_script_without_any_logging_sees_its_progress():
    run = python(_SCRIPT)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert [line.split(", ")[0] for line in lines] == ["step=2", "step=4"]
    assert "skipped=0, lr=[0.25], loss=" in lines[0]
    assert "norm=" in lines[0]


def test_a_level_above_info_is_silence():
    quiet = 'import logging; logging.getLogger("forebay").setLevel("WARNING")\n'
    run = python(quiet + _SCRIPT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    # a level that lets lines through, and nobody who listens
    run = python(quiet.replace("WARNING", "DEBUG") + _SCRIPT)
    assert len(run.stderr.splitlines()) == 2
    root = 'import logging; logging.basicConfig(format="root %(message)s", level="INFO")\n'
    run = python(root + _SCRIPT)
    steps = [line for line in run.stderr.splitlines() if line.startswith("root step=")]
    assert [line[:11] for line in steps] == ["root step=2", "root step=4"]


def test_without_the_key_nothing_is_said(capsys):
    with engine_of() as engine:
        train(engine, 2)
    assert capsys.readouterr() == ("", "")


def _scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_every_update(tmp_path):
    pytest.importorskip("tensorboard")
    config = {
        "gradient_accumulation_steps": 2,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 2, "warmup_type": "linear"},
        },
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    engine = engine_of(config)
    losses = train(engine, 5)
    norm = engine.get_global_grad_norm()
    # read before close(): a script that ends without it has lost nothing
    found = _scalars(tmp_path / "job")
    assert set(found) == {f"Train/Samples/{name}" for name in ("train_loss", "lr", "grad_norm")}
    means = [(8, (losses[0] + losses[1]) / 2), (16, (losses[2] + losses[3]) / 2)]
    assert found["Train/Samples/train_loss"] == [(s, pytest.approx(v)) for s, v in means]
    # the rate that governed each update: the schedule's values at 0 and 1
    assert found["Train/Samples/lr"] == [(8, 0.0), (16, pytest.approx(0.005))]
    assert found["Train/Samples/grad_norm"][-1] == (16, pytest.approx(norm))
    engine.flush()
    engine.close()
    found = _scalars(tmp_path / "job")
    assert found["Train/Samples/train_loss"][-1] == (20, pytest.approx(losses[4]))


def test_tensorboard_of_a_loss_scale_and_a_window_that_was_discarded(tmp_path):
    pytest.importorskip("tensorboard")
    section = {"enabled": True, "output_path": str(tmp_path)}
    config = {"fp16": {"enabled": True, "initial_scale_power": 5}, "tensorboard": section}
    with engine_of(config | {"gradient_accumulation_steps": 2}) as engine:
        first, second = batches(2)
        engine.backward(loss_of(engine, first) * 1000)
        engine.step()
        engine.zero_grad()
        for x in (first, second):
            engine.backward(loss_of(engine, x) / 2, scale_wrt_gas=False)
            engine.step()
    found = _scalars(tmp_path / "DeepSpeedJobName")
    assert found["Train/Samples/loss_scale"] == [(8, 32.0)]
    assert found["Train/Samples/train_loss"][0][1] < 100


def test_the_default_folder_is_runs(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    with engine_of({"tensorboard": {"enabled": True}}) as engine:
        train(engine, 1)
    assert list((tmp_path / "runs" / "DeepSpeedJobName").glob("events.*"))


def test_tensorboard_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model = small()
    before = model[0].weight.data_ptr()
    with pytest.raises(ConfigError, match="package tensorboard is not installed") as caught:
        forebay.initialize(model=model, config=ON_HOST | {"tensorboard": {"enabled": True}})
    assert "pip install tensorboard" in caught.value.hint
    assert model[0].weight.data_ptr() == before


def test_a_folder_that_cannot_be_written(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    section = {"enabled": True, "output_path": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match=r"tensorboard\.output_path") as caught:
        engine_of({"tensorboard": section})
    assert "cannot be written" in caught.value.message


def test_losses_are_not_read_where_nobody_asks():
    """No device is waited for: a loss that raises when it is read trains as any other."""

    class Unreadable(torch.Tensor):
        def __float__(self):
            raise AssertionError("read")

    with engine_of() as engine:
        (x,) = batches(1)
        engine.backward(loss_of(engine, x).as_subclass(Unreadable))
        engine.step()
