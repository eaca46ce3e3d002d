"""A run that goes on with other ranks stays within what sums in another order may differ by.

The loss is linear in the weights, so the exact gradient of a step is the mean of its rows. A rank
computes 1/n for its n rows, multiplies by it and adds n products in some order; the ranks' sums are
added and scaled by 1/N. With u = 2^-24 and k = n + N + 4 roundings that an addend meets at most,
the computed gradient is within k u / (1 - k u) of the mean of the rows' magnitudes (Higham, 3.1).
Adam's bound carries that on (`numerics.bounds`); two runs within E of the exact one differ by 2 E.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from distributed import linear_run, ranks
from distributed.linear_run import LAST, ROWS, SAVED, SETTINGS
from numerics.bounds import Bounded, State, U, given, ours


def _bound(state: list[torch.Tensor], size: int) -> State:
    """Exact values, and how far from them a run on so many ranks may be."""
    k = (ROWS // size + size + 4) * U
    now = State(*(given(value) for value in state))
    for step in range(SAVED, LAST):
        rows = linear_run.rows(step).double()
        gradient = Bounded(rows.mean(0), rows.abs().mean(0) * k / (1 - k))
        now = ours(now, gradient, step + 1, SETTINGS)
    return now


@pytest.mark.parametrize(
    ("saved", "sizes"),
    [(2, (1, 3)), pytest.param(1, (1, 2, 3, 4), marks=pytest.mark.slow)],
)
def test_other_numbers_of_ranks_stay_within_the_bound(tmp_path, saved, sizes):
    ranks.run(saved, linear_run.linear, str(tmp_path), 2, "saves")
    for size in sizes:
        ranks.run(size, linear_run.linear, str(tmp_path), size - 1, "goes on")
    found = {size: torch.load(tmp_path / f"{size}.pt", weights_only=True) for size in sizes}
    start = found[1][0]
    assert all(
        torch.equal(a, b) for first, _ in found.values() for a, b in zip(first, start, strict=True)
    )
    bounds = {size: _bound(start, size) for size in sizes}
    for size, (_, end) in found.items():
        for value, bound in zip(end, (bounds[size].p, bounds[size].m, bounds[size].v), strict=True):
            assert bool(((value.double() - bound.value).abs() <= bound.error).all()), size
            assert float(bound.error.median()) < 1e-5  # not so wide that nothing could fail
    for left, right in itertools.combinations(sizes, 2):
        far = (found[left][1][0].double() - found[right][1][0].double()).abs()
        assert bool((far <= bounds[left].p.error + bounds[right].p.error).all())
        assert float(far.max()) > 0  # sums in another order did differ
