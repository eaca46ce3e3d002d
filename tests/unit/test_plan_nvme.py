"""What a plan says of drives: bytes that a step writes, and how long they last at that pace."""

from __future__ import annotations

import re

from forebay.hardware.catalog import CATALOG
from forebay.plan.choose import choose
from forebay.plan.explain import as_text
from forebay.plan.setup import Home
from plan_cases import LLAMA_8B, question


def test_a_plan_with_state_on_drives_says_what_that_writes():
    choice = choose(question(LLAMA_8B | {"num_hidden_layers": 64}, "4090"))
    assert choice.best is not None
    assert choice.best.setup.optimizer is Home.NVME
    text = " ".join(as_text(choice).split())
    said = re.search(
        r"each update writes ([\d.]+) TB to each node's drives: at this pace they reach their "
        r"rated life in ([\d,]+) days",
        text,
    )
    assert said is not None, text
    state = 12 * choice.question.shape.parameters
    assert abs(float(said.group(1)) * 1e12 / state - 1) < 0.02
    # rated for one whole write of the drive a day for five years
    drives = CATALOG["4090"].drives
    assert drives is not None
    paces = drives.capacity_bytes / state * choice.best.seconds / 86400
    days = float(said.group(2).replace(",", ""))
    assert abs(days - paces * 5 * 365) < 0.5 + 0.01 * days  # it says whole days
    assert "never a network disk" in text
