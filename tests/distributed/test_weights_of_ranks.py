"""Whole weights of models that are spread over ranks: 16-bit files, exports, fp32, and slices."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from distributed import ranks, saved_runs
from distributed.saved_runs import Net, Run
from forebay.cli.main import main
from forebay.errors import CheckpointError, UnsupportedError
from forebay.optim.reference import round_to
from forebay.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

_FROZEN = {"fixed.weight", "fixed.bias"}
_TRAINED = {f"{name}.{kind}" for name in ("first", "middle", "last") for kind in ("weight", "bias")}
_TRAINED.add("empty")


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    """A folder that three ranks wrote, and the masters that they had."""
    folder = tmp_path_factory.mktemp("saved")
    run = Run(stage=request.param, precision="bf16" if request.param == 3 else "")
    ranks.run(3, saved_runs.save_weights, str(folder), run)
    found = torch.load(folder / "masters.pt", weights_only=True)
    return folder, {name: value for name, value in found.items() if " " not in name}


def test_weights_in_16_bits(saved):
    folder, masters = saved
    found = load_file(folder / "weights" / "model.safetensors")
    assert found.keys() == _TRAINED | _FROZEN | {"shift"}
    for name, master in masters.items():
        assert torch.equal(found[name], round_to(master, torch.bfloat16)), name
    assert load_file(folder / "trained" / "trained.safetensors").keys() == _TRAINED | {"shift"}


def test_whole_fp32_weights(saved, tmp_path):
    folder, masters = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == _TRAINED | _FROZEN | {"shift", "twin.weight"}
    assert state["twin.weight"] is state["middle.weight"]
    for name, master in masters.items():
        assert torch.equal(state[name], master), name
    assert _FROZEN.isdisjoint(
        get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    )
    model = load_state_dict_from_zero_checkpoint(Net(0.0), folder, tag="global_step2")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", max_shard_size="64KB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    written = {name: value for file in files for name, value in load_file(file).items()}
    assert written.keys() == _TRAINED | _FROZEN | {"shift"}
    assert all(torch.equal(value, state[name]) for name, value in written.items())


def test_what_is_not_honoured_is_refused(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(UnsupportedError, match="no pickles"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "a", safe_serialization=False)
    with pytest.raises(UnsupportedError, match="lazy_mode"):
        get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    other = torch.nn.Linear(2, 2)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match="another model"):
        load_state_dict_from_zero_checkpoint(other, folder)
    assert torch.equal(other.weight, before)


def test_the_command_line_reads_checkpoints_of_ranks(saved, tmp_path, capsys):
    folder, masters = saved
    assert main(["inspect", str(folder)]) == 0
    assert "3 files, every checksum matches" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--diff", str(folder)]) == 0
    assert main(["export", str(folder), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], master) for name, master in masters.items())


def test_a_rank_that_cannot_write_the_weights_lets_no_other_wait(tmp_path):
    (tmp_path / "a file").write_text("x")
    for rank, said in enumerate(
        ranks.run(3, saved_runs.save_weights_nowhere, str(tmp_path), Run(stage=3))
    ):
        assert ("rank 0 of 3: " in said) == (rank > 0)
        assert "cannot save" in said


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=3),
        *(
            pytest.param(Run(stage=stage, offload=offload), marks=pytest.mark.slow)
            for stage, offload in ((0, "cpu"), (1, "none"), (2, "nvme"), (3, "weights"))
        ),
    ],
)
def test_a_plain_torch_state_is_taken_over(run):
    for checks in ranks.run(3, saved_runs.import_plain, run):
        assert all(checks.values()), checks


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=2, offload="nvme"),
        *(
            pytest.param(Run(stage=stage, offload=offload), marks=pytest.mark.slow)
            for stage, offload in (
                (0, "cpu"),
                (1, "none"),
                (3, "none"),
                (3, "nvme"),
                (3, "weights"),
            )
        ),
    ],
)
def test_slices_are_read_and_written(run):
    for checks in ranks.run(3, saved_runs.local_values, run):
        assert all(checks.values()), checks
