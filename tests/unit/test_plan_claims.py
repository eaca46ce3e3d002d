"""Published figures of ZeRO, ZeRO-Offload and ZeRO-Infinity, reproduced by the planner.

The rows are made by `tools/plan_claims.py`, which also writes `docs/plan-claims.md`.
"""

from __future__ import annotations

import runpy

import pytest

from forebay.plan.systems import efficiency
from house.tree import ROOT

_TOOL = runpy.run_path(str(ROOT / "tools" / "plan_claims.py"), run_name="plan_claims")
_ROWS = list(_TOOL["rows"]())
# What is known to miss; the page says by how much. A row that begins to hold must leave this set.
_MISSES = {
    "10B on 32 devices",
    "ZeRO-Offload on a DGX-2 against Megatron-LM",
    "largest model on 512 V100, 3D parallelism",
    "32T on 512 V100 against the largest there with 3D parallelism",
    "V100s that hold 1T, 3D parallelism",
}


@pytest.mark.parametrize("row", [row for _, row in _ROWS], ids=lambda row: row.name)
def test_a_published_figure_is_reproduced(row):
    assert row.holds is (row.name not in _MISSES), (row.published, row.predicted)


def test_every_claim_has_a_row():
    """Rows are not lost: at least one for each figure that the planner must reproduce."""
    names = " | ".join(f"{row.name}: {row.published}" for _, row in _ROWS)
    for figure in (
        "stage 0", "stage 1", "stage 2", "stage 3", "13B on 8 devices", "L2L", "PyTorch DDP",
        "model parallelism", "16 devices", "128 devices", "64 nodes", "nine tenths",
        "ten times as fast", "1T on one DGX-2", "32T on 512", "10T to 20T", "super-linearly",
        "16-bit masters", "against PyTorch DDP", "Megatron-LM", "against ZeRO-2", "each of 16",
        "does not grow", "4 nodes against one", "hidden size 64K", "NVLink-C2C", "3D parallelism",
        "both offloads", "with drives, of the throughput", "SGD", "tensor cores' peak",
    ):  # fmt: skip
        assert figure in names
    assert len({row.name for _, row in _ROWS}) == len(_ROWS)


@pytest.mark.parametrize(
    ("kind", "near", "far"), [("EXACT", 1.0005, 1.01), ("CAPACITY", 1.09, 1.11),
                              ("THROUGHPUT", 1.29, 1.31)]
)  # fmt: skip
def test_a_row_that_is_off_misses(kind, near, far):
    row, kinds = _TOOL["Row"], _TOOL["Kind"]
    for predicted, holds in ((near, True), (2 - near, True), (far, False), (2 - far, False)):
        one = row(name="x", published=1.0, predicted=predicted, kind=kinds[kind])
        assert one.holds is holds
    assert not row(name="x", published="y", predicted=False, kind=kinds.ORDERING).holds


def test_efficiency_is_a_share():
    assert efficiency(ait=1.0, bandwidth=5.0, peak=5.0) == 0.5
    assert efficiency(ait=100.0, bandwidth=1e12, peak=1.0) == pytest.approx(1.0)
