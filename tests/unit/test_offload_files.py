"""`forebay.offload` with state and weights in files."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay import BudgetError, ConfigError, EngineClosedError, StorageError
from forebay.plan import UpdatePlace, WeightPlace
from forebay.tiers.ledger import Role, Tier


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 5)).bfloat16()


def _offload(model, **arguments):
    source = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return forebay.offload(model, source, device="cpu", clip_norm=1.0, **arguments)[1]


def _weights(**arguments):
    model = _model()
    optimizer = _offload(model, **arguments)
    for number in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).bfloat16()
        (model(x).float() - 1.0).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [value.clone() for value in model.state_dict().values()]
    optimizer.close()
    return state


def test_two_lines_train_from_files_with_the_same_bits(tmp_path):
    expected = _weights()
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    aio = {"block_size": 8192, "queue_depth": 4, "thread_count": 2, "single_submit": True}
    for more in (
        {"nvme_path": str(tmp_path)},
        {"nvme_path": folders, "aio": aio},
        {"nvme_path": tmp_path, "parameters": "host"},
        {"nvme_path": tmp_path, "parameters": "nvme"},
        {"nvme_path": folders, "parameters": "nvme", "aio": {"block_size": 4096}},
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, _weights(**more), strict=True))


def test_what_is_asked_for_is_where_it_is(tmp_path):
    optimizer = _offload(_model(), nvme_path=tmp_path, parameters="nvme")
    places = {(u.placement.update, u.placement.weights) for u in optimizer.engine.units}
    assert places == {(UpdatePlace.NVME, WeightPlace.NVME)}
    ledger = optimizer.engine.ledger
    assert ledger.bytes(Tier.NVME, Role.LP_PARAMS) > 0
    assert ledger.bytes(Tier.HOST, Role.LP_PARAMS) == 0
    optimizer.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nvme_path": ["/a", "/a"]}, "names /a 2 times: a striped set has each folder once"),
        ({"nvme_path": []}, "an empty list"),
        ({"nvme_path": ""}, "a folder with an empty name"),
        ({"nvme_path": "a\0b"}, "no path has a zero byte"),
        ({"nvme_path": 5}, "must be a folder, or a list"),
        ({"nvme_path": "/a", "aio": 3}, "aio is 3; it must be a dict"),
        ({"aio": {"queue_depth": 3}}, "no folder is given"),
        ({"parameters": "nvme"}, "no folder is given"),
        ({"nvme_path": "/a", "aio": {"queue_dept": 3}}, "aio has no queue_dept"),
        ({"nvme_path": "/a", "aio": {"block_size": 5000}}, "a multiple of 4096"),
        ({"nvme_path": "/a", "aio": {"queue_depth": 0}}, "an integer from 1 to 128"),
        ({"nvme_path": "/a", "aio": {"single_submit": 1}}, "must be true or false"),
        (
            {"nvme_path": "/a", "aio": {"thread_count": 2, "intra_op_parallelism": 2}},
            "thread_count and aio.intra_op_parallelism mean the same",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        _offload(_model(), **arguments)


def test_a_missing_folder_is_an_oserror(tmp_path):
    with pytest.raises(StorageError, match="does not exist") as caught:
        _offload(_model(), nvme_path=tmp_path / "gone")
    assert isinstance(caught.value, OSError)


def test_a_missing_folder_s_hint_is_about_how_it_is_written(tmp_path):
    """What `mkdir -p` would make is no folder of that name."""
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    for path, hint in (("~/state", "the whole path"), (link, f"mkdir -p {tmp_path}/nowhere")):
        with pytest.raises(StorageError, match="does not exist") as caught:
            _offload(_model(), nvme_path=path)
        assert hint in str(caught.value.hint)


def test_long_blocks_reserve_no_more_than_the_state_takes(tmp_path):
    """A stripe is a block long, and one of 1 GiB was reserved in each folder."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    optimizer = _offload(_model(), nvme_path=folders, aio={"block_size": 1 << 30})
    sizes = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(str(tmp_path)):
                sizes.append(link.stat().st_size)
    assert len(sizes) == 2
    assert sum(sizes) == optimizer.engine.ledger.bytes(Tier.NVME)
    optimizer.close()


def test_a_forked_process_is_told_whose_engine_it_is(tmp_path):
    """It has none of the threads that would finish the last write, and waited for ever."""
    model = _model()
    optimizer = _offload(model, nvme_path=tmp_path)
    model(torch.ones(3, 4).bfloat16()).float().square().mean().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        told = 0
        for call in (optimizer.synchronize, optimizer.state_dict, model.state_dict):
            try:
                call()
            except EngineClosedError as error:
                told += f"process {os.getppid()}" in str(error)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    optimizer.synchronize()
    optimizer.close()


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_the_hint_of_a_small_budget_names_what_is_needed_and_no_more(tmp_path, parameters):
    arguments = {"nvme_path": tmp_path, "parameters": parameters}
    with pytest.raises(BudgetError, match=r"cannot place .* \((\d+) bytes\)") as caught:
        _offload(_model(), host_budget=1 << 20, **arguments)
    needed = int(str(caught.value).split(" bytes)", 1)[0].rsplit("(", 1)[1])
    hint = caught.value.hint.split("raise forebay.host_budget to ")[1].split(",")[0].split()[0]
    _offload(_model(), host_budget=hint, **arguments).close()
    _offload(_model(), host_budget=needed, **arguments).close()
    with pytest.raises(BudgetError):
        _offload(_model(), host_budget=needed - os.sysconf("SC_PAGE_SIZE"), **arguments)
