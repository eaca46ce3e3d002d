"""Every update mode over ranks: saving changes no bit, and every mode loads every other's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed import ranks, saved_modes
from distributed.saved_modes import MODES, SAVED
from distributed.saved_runs import Run

_BASE = Run(stage=2, units=1, beside=True)


def _check_saved(runs, saved):
    """On every rank: as if nobody had saved, also where updates are speculative."""
    for of_rank in saved:
        for run, result in zip(runs, of_rank, strict=True):
            taken = result["saved"].pop("taken")
            assert result["saved"] == result["plain"], run
            assert taken > 0 or run.update != "speculative"


def _check_loaded(jobs, saved, loaded, *, same_size=True):
    runs = [run for run, _ in jobs]
    for rank, of_rank in enumerate(loaded):
        for (run, others), results in zip(jobs, of_rank, strict=True):
            for other, result in zip(others, results, strict=True):
                what, n = (rank, run, other), runs.index(other)
                then = saved[0][n]["then"]
                for key in ("masters", "steps"):
                    assert result["loaded"][key] == then[key], (key, *what)
                # columns are of slices, and of state on the host
                cut_alike = (run.units, run.offload) == (other.units, other.offload)
                cut_alike = cut_alike or run.update != "zenflow"
                if run.update == other.update and cut_alike and same_size:
                    plain = saved[rank][n]["plain"]
                    assert result["loaded"] == then, what
                    assert result["losses"] == plain["losses"][SAVED:], what
                    assert result["end"] == plain["end"], what


def test_saves_beside_training_and_goes_on_from_them(tmp_path):
    """Each mode loads its own checkpoint and the next mode's."""
    runs = [replace(_BASE, update=update) for update in MODES]
    jobs = [(run, [run, other]) for run, other in zip(runs, runs[1:] + runs[:1], strict=True)]
    by_rank = ranks.run(2, saved_modes.save_and_load, str(tmp_path), jobs)
    saved, loaded = ([of_rank[i] for of_rank in by_rank] for i in range(2))
    _check_saved(runs, saved)
    _check_loaded(jobs, saved, loaded)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["bf16", "fp16", ""])
@pytest.mark.parametrize("beside", [False, True])
def test_every_stage_loads_every_other_on_two_and_three_ranks(tmp_path, beside, precision):
    base = replace(_BASE, beside=beside, precision=precision)
    runs = [
        replace(base, stage=stage, update=update, units=units)
        for stage, units in ((1, 1), (2, 10**9), (3, 1))
        for update in (MODES if units == 1 else MODES[2:])  # one unit has no complete gradient
    ]
    places = (
        ("half", "delayed"),
        ("nvme", "delayed"),
        ("half", "speculative"),
        ("half", "zenflow"),
    )
    runs += [replace(base, offload=offload, update=update) for offload, update in places]
    jobs = [(run, runs) for run in runs]
    saved = ranks.run(3, saved_modes.save, str(tmp_path), runs, seconds=400)
    _check_saved(runs, saved)
    for size in (3, 2):
        loaded = ranks.run(size, saved_modes.load, str(tmp_path), jobs, seconds=600)
        _check_loaded(jobs, saved, loaded, same_size=size == 3)
