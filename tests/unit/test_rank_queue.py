"""The queue of a rank's collectives, on a device that never comes to an end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forebay.comm import queue
from forebay.comm.queue import Job
from forebay.errors import RankError


def test_who_waits_for_a_collective_on_the_device_hears_that_its_peer_is_gone(monkeypatch):
    monkeypatch.setattr(queue, "_LOOK_SECONDS", 0.01)

    def _gone() -> None:
        raise RankError("rank 1 of 2 is gone")

    job = Job("a sum", group=SimpleNamespace(check=_gone), device=torch.device("cpu"))
    job.finish(None, None)
    job._event = SimpleNamespace(query=lambda: False)
    with pytest.raises(RankError, match="rank 1 of 2 is gone"):
        job.wait()
    looks = iter([False, False, True])
    job._event = SimpleNamespace(query=lambda: next(looks))
    assert job.wait()
