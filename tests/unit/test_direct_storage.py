"""GPUDirect Storage through a stand-in for KvikIO: when it is chosen, and what comes through it.

KvikIO and its driver exist on few machines; what is seen here is the choice, the offsets, the order
of reads and writes, and failures. That cuFile moves bytes is not.
"""

from __future__ import annotations

import ctypes
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forebay import TransferError
from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.links.direct_storage import DirectStorage, find_direct_storage
from forebay.plan import WeightPlace
from numerics.test_nvme import Ugly
from unit.engine_cases import batches, loss_of

CUDA = torch.device("cuda")


class CuFile:
    """Reads as KvikIO's class of this name does, into memory of the host."""

    reads: list[int]

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self._descriptor = os.open(path, os.O_RDONLY)
        self.reads = []
        self.lacks = 0

    def pread(self, buf: torch.Tensor, size: int, file_offset: int) -> Any:
        """All of it at once."""
        assert (buf.dtype, buf.numel()) == (torch.uint8, size)
        self.reads.append(file_offset)
        memory = (ctypes.c_char * size).from_address(buf.data_ptr())  # numpy() would pin its size
        came = os.preadv(self._descriptor, [memory], file_offset) - self.lacks
        return SimpleNamespace(get=lambda: came)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _library(made: list[CuFile]) -> Any:
    def _open(path: str, flags: str) -> CuFile:
        made.append(CuFile(path, flags))
        return made[-1]

    return SimpleNamespace(CuFile=_open)


def _machine(answer: Any) -> Any:
    """Modules of a machine whose cuFile answers so."""

    def get(name: str) -> Any:
        assert name == "is_gds_available"
        if isinstance(answer, Exception):
            raise answer
        return answer

    driver = SimpleNamespace() if answer is None else SimpleNamespace(get=get)
    modules = {"kvikio": SimpleNamespace(CuFile=CuFile), "kvikio.cufile_driver": driver}
    return modules.__getitem__


def _absent(name: str) -> Any:
    raise ImportError(name)


@pytest.mark.parametrize(
    ("device", "load", "reason"),
    [
        (torch.device("cpu"), _machine(True), "the device is no GPU"),
        (CUDA, _absent, "KvikIO is not installed"),
        (CUDA, _machine(False), "no driver nvidia-fs"),
        (CUDA, _machine(None), "does not say whether it can"),
        (CUDA, _machine(RuntimeError("no cuFile\nhere")), "cuFile cannot be used: no cuFile"),
    ],
    ids=["cpu", "absent", "no_driver", "old", "broken"],
)
def test_where_the_machine_has_it_not(device, load, reason):
    found = find_direct_storage(device, load=load)
    assert found.library is None
    assert reason in found.reason
    assert "\n" not in found.reason


def test_where_the_machine_has_it():
    assert find_direct_storage(CUDA, load=_machine(True)).library is not None


def _take(model, *, direct, paths, places=WeightPlace.NVME):
    nvme = NvmeOptions(paths=paths, buffer_elements=64 * 1024, direct=direct)
    options = EngineOptions(device="cpu", clip_norm=1.0, weights=places, pool_bytes=1, nvme=nvme)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return offload_with(model, source, options=options)[1]


def _train(model, optimizer):
    for x in batches(4, torch.float32, features=13):
        loss_of(model, x.to(torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def test_the_same_bits_come_this_way_and_it_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="forebay")
    made: list[CuFile] = []
    found = []
    for direct in (
        DirectStorage(library=None, reason="as asked"),
        DirectStorage(library=_library(made), reason="cuFile has its driver"),
    ):
        model = Ugly(torch.bfloat16)
        optimizer = _take(model, direct=direct, paths=(tmp_path,))
        found.append(_train(model, optimizer))
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    (file,) = made
    assert len(file.reads) > 50
    said = [record.message for record in caplog.records if "weights in files" in record.message]
    assert said == [
        "weights in files go to the device through host memory, their checksums compared: as asked",
        "weights in files go to the device by GPUDirect Storage, their checksums not compared: "
        "cuFile has its driver",
    ]
    assert list(tmp_path.iterdir()) == []


def test_several_folders_go_through_host_memory(tmp_path):
    made: list[CuFile] = []
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    direct = DirectStorage(library=_library(made), reason="")
    model = nn.Sequential(nn.Linear(13, 7)).bfloat16()
    _take(model, direct=direct, paths=tuple(folders)).close()
    assert not made


def test_a_short_read_is_one_error(tmp_path):
    made: list[CuFile] = []
    direct = DirectStorage(library=_library(made), reason="")
    model = Ugly(torch.bfloat16)
    optimizer = _take(model, direct=direct, paths=(tmp_path,))
    made[0].lacks = 1
    with pytest.raises(TransferError, match=r"did not arrive: reading \d+ bytes .* KvikIO"):
        _train(model, optimizer)
    optimizer.close()
