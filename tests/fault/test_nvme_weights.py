"""Weights in files on drives that lie or fail: found before they are used, and one clear error."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from fault.test_nvme_faults import BLOCK, flip, model, options, step, take_over
from forebay import CheckpointError, Checkpoints, EngineClosedError, TransferError
from forebay.engine.file_space import WeightBuffers
from forebay.engine.sixteen_bit import save_sixteen_bit
from forebay.links.fake import FileFaultScript
from forebay.plan import WeightPlace
from unit.engine_cases import same, weights

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    """A folder that is empty before, during and after."""
    place = tmp_path / "state"
    place.mkdir()
    yield place
    assert list(place.iterdir()) == []


def in_files(folder, **access):
    """Weights that every pass brings up anew, in small pieces."""
    chosen = options(folder, **access)
    assert chosen.nvme is not None
    nvme = replace(chosen.nvme, weights=WeightBuffers(count=2, elements=BLOCK))
    return replace(chosen, weights=WeightPlace.NVME, pool_bytes=1, nvme=nvme)


@pytest.mark.parametrize("what", ["checkpoint", "weights"])
def test_a_save_that_meets_a_flipped_byte_says_what_and_what_to_do(what, folder, tmp_path):
    """Not "Input/output error", and not with the hint in the middle of the sentence."""
    trained = model().to(torch.bfloat16)
    optimizer = take_over(trained, in_files(folder))
    engine = optimizer.engine
    unit = next(u for u in engine.units if "2" in u.name)
    kind = unit.parts[0].files if what == "checkpoint" else unit.parts[0].weight_files
    assert kind is not None
    flip(folder, kind.offset(0) + 2 * 777)
    with pytest.raises(CheckpointError, match=r"of 2\.weight is not what was written") as caught:
        if what == "checkpoint":
            Checkpoints(optimizer, tmp_path / "saved").save("first")
        else:
            save_sixteen_bit(engine, tmp_path / "model.safetensors", excludes_frozen=False)
    assert "hint" not in caught.value.message
    assert "the drive returns wrong data" in str(caught.value.hint)
    with contextlib.suppress(TransferError):
        optimizer.close()


@pytest.mark.parametrize("reader", ["forward", "evaluation", "state_dict", "close"])
def test_a_flipped_byte_is_found_before_it_is_used_and_named(folder, reader):
    trained = model().to(torch.bfloat16)
    optimizer = take_over(trained, in_files(folder))
    for index in range(3):
        _step16(trained, optimizer, index)
    optimizer.synchronize()
    optimizer.engine.streaming.residency.drop_all()
    unit = next(u for u in optimizer.engine.units if "2" in u.name)
    flip(folder, unit.parts[0].weight_files.offset(0) + 2 * 777)
    with pytest.raises(TransferError, match=r"weight of 2\.weight is not what was written: its CR"):
        if reader == "forward":
            _step16(trained, optimizer, 3)
        elif reader == "evaluation":
            with torch.no_grad():
                trained(torch.zeros(1, 4, dtype=torch.bfloat16))
        elif reader == "state_dict":
            trained.state_dict()
        else:
            optimizer.close()
    with contextlib.suppress(TransferError):  # the engine is open yet, and cannot give it back
        optimizer.close()


def _step16(trained, optimizer, number):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    (trained(x).float() - 1.0).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fail_at", [0, 9, 30, 60, 61, 75, 90, 120])
@pytest.mark.parametrize("number", [5, 28], ids=["EIO", "ENOSPC"])
def test_a_failing_block_is_one_error_then_closed(folder, fail_at, number):
    script = FileFaultScript(seed=fail_at, max_delay_us=100, fail_at=fail_at, fail_errno=number)
    trained, optimizer = model(), None
    with pytest.raises(TransferError, match=rf"(reading|writing) \d+ bytes .*errno {number}"):
        optimizer = take_over(trained, in_files(folder, fault=script, block_bytes=BLOCK))
        for index in range(20):
            step(trained, optimizer, index)
    if optimizer is None:  # failed before the first step
        return
    with pytest.raises(EngineClosedError):
        step(trained, optimizer, 0)
    optimizer.close()
    assert all(param.isnan().all() for param in trained.parameters())


def test_short_transfers_change_nothing(folder):
    expected, trained = model(), model()
    plain = take_over(expected, options(folder))
    script = FileFaultScript(seed=1, short_at=70, short_bytes=8192)
    optimizer = take_over(trained, in_files(folder, fault=script, block_bytes=BLOCK))
    for index in range(4):
        step(expected, plain, index)
        step(trained, optimizer, index)
    assert same(weights(expected), weights(trained))
    plain.close()
    optimizer.close()
