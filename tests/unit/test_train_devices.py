"""On which devices the ranks of a run meet."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from forebay.errors import RankError
from forebay.train.options import TrainOptions
from forebay.train.run import train


def test_ranks_on_processor_cores_see_no_gpu_when_they_meet(tmp_path, monkeypatch):
    """They would meet over NCCL, and CUDA would be in use before it is hidden."""
    seen = []

    def _meet(seconds: float) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        raise RankError("nobody came")

    monkeypatch.setattr("forebay.train.ranks.init_in_time", _meet)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    paths = {"model": tmp_path / "m.json", "data": (tmp_path / "d",), "output": tmp_path / "o"}
    with pytest.raises(RankError, match="nobody came"):
        train(TrainOptions(**paths, device="cpu"), console=Console(stderr=True))
    assert seen == [""]
