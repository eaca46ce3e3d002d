"""Handles of device streams, which native code and torch count differently."""

from __future__ import annotations

import torch

from forebay.accelerators.cuda import stream_of


def test_the_default_stream_is_not_mistaken_for_a_new_one(monkeypatch):
    """On a GPU nothing that waited for a collective did: a stream that nobody used waited."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: ("stream", handle, device)
    )
    device = torch.device("cuda", 1)
    assert stream_of(0, device=device) == ("default", device)
    assert stream_of(42, device=device) == ("stream", 42, device)
