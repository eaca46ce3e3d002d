"""`save_checkpoint` and `load_checkpoint`: arguments, return values, refusals."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import forebay
from checkpoint_cases import Layout, assert_same, engine_of, numbers, run, tag_of
from forebay.checkpoint.describe import describe, description_lines
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.reader import Checkpoint
from forebay.config.resolved import CheckpointSpec
from forebay.engine.schedule_state import check_schedule
from forebay.errors import CheckpointError, EngineClosedError


@pytest.fixture
def engine():
    with engine_of(Layout()) as opened:
        yield opened


@pytest.fixture
def saved(tmp_path):
    """A folder with one checkpoint, and its numbers."""
    with engine_of(Layout()) as opened:
        run(opened, 0, 3)
        opened.save_checkpoint(tmp_path, "one", client_state={"epoch": 2})
        return tmp_path, numbers(opened)


def test_tags_latest_and_client_state(engine, tmp_path):
    state = {"pair": (1, 2.5), "best": float("-inf"), "names": ["a"], "nothing": None, "on": True}
    engine.save_checkpoint(tmp_path, client_state=state)
    assert tag_of(tmp_path) == "global_step0"
    engine.save_checkpoint(tmp_path, tag=7, client_state={"x": 1}, save_latest=False)
    assert tag_of(tmp_path) == "global_step0"
    path, found = engine.load_checkpoint(str(tmp_path))
    assert (path, found) == (str(tmp_path / "global_step0"), state)
    assert engine.load_checkpoint(tmp_path, tag=7) == (str(tmp_path / "7"), {"x": 1})


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": torch.ones(1)}, r"client_state\['a'\] is a torch.Tensor"),
        ({"a": {"b": [1, {3}]}}, r"client_state\['a'\]\['b'\]\[1\] is a builtins.set"),
        ({1: 2}, "client_state has the key 1"),
        ({"a": np.float32(1)}, r"client_state\['a'\] is a numpy.float32"),
        ([1, 2], "client_state is a list, and must be a dict"),
        ([], "client_state is a list, and must be a dict"),
        ("text", "client_state is a str, and must be a dict"),
        ({"a": 10**5000}, r"client_state\['a'\] has 16610 bits"),
        ({"a": "\udcff"}, r"client_state\['a'\] .* no valid Unicode"),
        ({"\udcff": 1}, "client_state has the key"),
    ],
)
def test_client_state_that_is_not_plain_is_refused_by_its_path(engine, tmp_path, state, where):
    with pytest.raises(CheckpointError, match=where):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tag",
    [
        *("", ".", "..", "a/b", "/abs", ".hidden", "latest", "a\nb", "x" * 300, "\udcff"),
        *("x.forebay-partial", "x.forebay-replaced"),
    ],
)
def test_tags_that_are_no_names_are_refused(engine, tmp_path, tag):
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        engine.load_checkpoint(tmp_path, tag)


def test_without_latest_nothing_is_loaded(engine, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="forebay"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "latest" in caplog.text


def test_a_missing_tag_says_what_is_there(engine, saved):
    with pytest.raises(CheckpointError, match=r"no checkpoint two in .*\nhint: complete ones: one"):
        engine.load_checkpoint(saved[0], "two")


@pytest.mark.parametrize("name", ["manifest.json", "tensors-00000.safetensors"])
def test_a_missing_file_is_named(engine, saved, name):
    folder, _ = saved
    (folder / "one" / name).unlink()
    before = numbers(engine)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        engine.load_checkpoint(folder)
    assert_same(numbers(engine), before)


def test_the_same_tag_again_replaces_it(engine, tmp_path):
    for step in range(3):
        run(engine, step, step + 1)
        engine.save_checkpoint(tmp_path, "same", client_state={"step": step})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["latest", "same"]
    assert engine.load_checkpoint(tmp_path)[1] == {"step": 2}


def test_the_newest_stay(tmp_path):
    with engine_of(Layout(checkpoint=CheckpointSpec(keep=2))) as engine:
        engine.save_checkpoint(tmp_path, "first")
        for step in range(4):
            engine.save_checkpoint(tmp_path, f"s{step}", save_latest=False)
    # `latest` still names the first
    assert sorted(item.name for item in tmp_path.iterdir()) == ["first", "latest", "s2", "s3"]


def test_weights_alone(engine, saved):
    """Masters come with the weights; moments, counters, groups and schedule stay."""
    folder, want = saved
    run(engine, 10, 11)
    before = numbers(engine)
    engine.load_checkpoint(folder, load_module_only=True)
    found = numbers(engine)
    for kind in ("master", "weight"):
        assert_same(found, want, only=kind)
    for kind in ("exp_avg", "step", "lr", "counters"):
        assert_same(found, before, only=kind)


def test_without_optimizer_states(engine, saved):
    folder, want = saved
    engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    found = numbers(engine)
    assert_same(found, want, only="master")
    assert found["counters"] == want["counters"]
    assert not found["exp_avg first.weight"].any()
    assert found["step first.weight"] == 0


def test_without_the_schedule(engine, saved):
    folder, _ = saved
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_epoch == 0


def test_a_schedule_on_one_side_alone_is_refused(engine, saved):
    folder, _ = saved
    engine.lr_scheduler = None
    with pytest.raises(CheckpointError, match="no schedule"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)


def test_random_states_come_back(tmp_path, engine):
    random.seed(1)
    np.random.seed(2)
    engine.save_checkpoint(tmp_path)
    want = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    engine.load_checkpoint(tmp_path)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == want


def test_frozen_parameters_can_stay_out(tmp_path, engine):
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with engine_of(Layout(), seed=4) as other:
        fixed = other.module.fixed.weight.clone()
        other.load_checkpoint(tmp_path)
        assert torch.equal(other.module.fixed.weight, fixed)
        assert torch.equal(other.module.first.weight, engine.module.first.weight)


def test_another_model_is_refused_unless_asked(saved, engine):
    folder, _ = saved
    with (
        engine_of(Layout(hidden=41)) as other,
        pytest.raises(CheckpointError, match="has the shape"),
    ):
        other.load_checkpoint(folder)
    engine.module.register_buffer("new", torch.ones(2))
    with pytest.raises(CheckpointError, match="1 tensors are missing, the first is new"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_module_strict=False)
    assert_same(numbers(engine) | {"weight new": 0}, saved[1] | {"weight new": 0}, only="master")


def test_another_optimizer_is_refused(saved, engine):
    folder, _ = saved
    group = engine.optimizer.param_groups.pop()
    with pytest.raises(CheckpointError, match="has 2 parameter groups, this optimizer 1"):
        engine.load_checkpoint(folder)
    engine.optimizer.param_groups.append(group)


def test_own_loading_function(saved, engine):
    """It gets the state dict and the module; masters that agree with the weights are kept."""
    folder, want = saved
    seen = {}

    def load(*, src, dst):
        seen.update(src)
        with torch.no_grad():
            dst.last.bias.fill_(3.0)
            dst.first.weight.copy_(src["first.weight"])

    engine.load_checkpoint(folder, custom_load_fn=load)
    assert seen["twin.weight"] is seen["middle.weight"]
    found = numbers(engine)
    assert torch.equal(found["master first.weight"], want["master first.weight"])
    assert (found["master last.bias"] == 3.0).all()


def test_weights_written_by_hand_are_saved(tmp_path, engine):
    run(engine, 0, 1)
    engine.synchronize()
    with torch.no_grad():
        engine.module.last.bias.fill_(2.0)
    engine.save_checkpoint(tmp_path)
    with engine_of(Layout(), seed=8) as other:
        other.load_checkpoint(tmp_path)
        assert (other.module.last.bias == 2.0).all()
        assert (numbers(other)["master last.bias"] == 2.0).all()


def test_sixteen_bit_weights(tmp_path, engine):
    from safetensors.torch import load_file

    run(engine, 0, 2)
    engine.save_16bit_model(tmp_path / "out")
    engine.synchronize()
    found = load_file(tmp_path / "out" / "model.safetensors")
    state = engine.module.state_dict()
    assert found.keys() == state.keys() - {"twin.weight"}
    for name, value in found.items():
        assert torch.equal(value, state[name]), name
    with pytest.raises(CheckpointError, match="no pickles"):
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")


def test_a_closed_engine_is_not_saved(tmp_path):
    engine = engine_of(Layout())
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_statistics_are_logged_on_request(tmp_path, caplog):
    spec = CheckpointSpec(shows_statistics=True)
    logged = caplog.at_level(logging.INFO, logger="forebay")
    with engine_of(replace(Layout(), checkpoint=spec)) as engine, logged:
        engine.save_checkpoint(tmp_path)
    assert "training stood still for" in caplog.text


def test_a_pipe_beside_checkpoints_is_none(tmp_path, engine):
    for name in ("pipe", "other"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / "manifest.json")
    engine.save_checkpoint(tmp_path, "one")
    assert CheckpointFolder(tmp_path, disk=RealDisk()).complete() == [tmp_path / "one"]
    with pytest.raises(CheckpointError, match="no manifest"):
        engine.load_checkpoint(tmp_path, "pipe")


def test_a_buffer_that_was_expanded_comes_back(tmp_path):
    def opened(value: float):
        model = torch.nn.Linear(3, 3)
        model.register_buffer("wide", torch.tensor([[value], [-value]]).expand(2, 4))
        return forebay.initialize(
            model=model,
            config={
                "train_batch_size": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )[0]

    with opened(2.0) as engine:
        engine.save_checkpoint(tmp_path, "one")
    with opened(5.0) as engine:
        engine.load_checkpoint(tmp_path, "one")
        assert torch.equal(engine.module.wide, torch.tensor([[2.0], [-2.0]]).expand(2, 4))


@pytest.mark.parametrize("value", [-7, 10**30])
def test_an_impossible_place_in_a_schedule_is_refused_before_anything_changes(engine, value):
    scheduler = engine.checkpoints._steps.scheduler
    state = scheduler.state_dict()
    with pytest.raises(CheckpointError, match="impossible last_epoch"):
        check_schedule(scheduler, state | {"last_epoch": value})
    check_schedule(scheduler, state)


def test_a_description_controls_no_terminal(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "one", {"\x1b[2Jx\nwhole yes": 1})
    with Checkpoint(tmp_path / "one") as found:
        lines = list(description_lines(describe(found)))
    assert all(line.isprintable() for line in lines)
    assert any("\\x1b[2Jx\\nwhole yes" in line for line in lines)
