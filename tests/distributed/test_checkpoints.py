"""Checkpoints of several ranks: saved in any layout, loaded in any other."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from distributed import ranks, saved_runs
from distributed.saved_runs import Run
from forebay.checkpoint.manifest import MANIFEST

_SAVED, _LAST = 3, 5
# Units of one parameter and of blocks, in turn.
_ALL = [
    Run(stage=stage, offload=offload, units=units)
    for (stage, offload), units in zip(
        itertools.product((0, 1, 2, 3), ("none", "cpu", "nvme")),
        itertools.cycle((1, 10**9)),
        strict=False,
    )
] + [
    Run(stage=3, offload="weights"),
    Run(stage=3, offload="weights", beside=True),
    Run(stage=3, offload="files"),
]
# Each stage, offload and unit size at least once.
_QUICK = [
    Run(stage=0, offload="cpu"),
    Run(stage=1, offload="none", units=1),
    Run(stage=2, offload="nvme", beside=True),
    Run(stage=3, offload="weights"),
    Run(stage=3, offload="files"),
]


def _check(results: list[list[dict]], saved: list[list[dict]], *, same_size: bool) -> None:
    """Against the run that was never interrupted, on every rank."""
    for rank, found in enumerate(results):
        for result in found:
            what = (result["run"], result["tag"], rank)
            then = saved[0][0]
            assert result["loaded"] == then["at_save"], what
            if same_size:
                assert result["after"] == saved[rank][0]["after"], what
                assert result["end"] == then["end"], what


def _round(folder, jobs: list[tuple[Run, list[str]]], sizes: tuple[int, ...]) -> None:
    """Save every layout on each number of ranks, and load on each what the jobs say."""
    runs = [run for run, _ in jobs]
    for size in sizes:
        place = folder / str(size)
        saved = ranks.run(size, saved_runs.save, str(place), runs, _SAVED, _LAST, seconds=400)
        for by_rank in saved:  # layouts of one number of ranks train alike
            assert all(result == by_rank[0] for result in by_rank)
        for other in sizes:
            loaded = ranks.run(other, saved_runs.load, str(place), jobs, _LAST, seconds=900)
            _check(loaded, saved, same_size=size == other)


def test_a_few_layouts_on_two_and_three_ranks(tmp_path):
    """Each loads the next one's; the whole square is in the slow suite."""
    following = [*_QUICK[1:], _QUICK[0]]
    jobs = [(run, [str(other)]) for run, other in zip(_QUICK, following, strict=True)]
    _round(tmp_path, jobs, (2, 3))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["bf16", "fp16", ""])
def test_every_layout_on_one_to_three_ranks(tmp_path, precision):
    runs = [replace(run, precision=precision) for run in _ALL]
    _round(tmp_path, [(run, [str(other) for other in runs]) for run in runs], (1, 2, 3))


@pytest.mark.slow
def test_copies_of_the_state_share_the_writing(tmp_path):
    """Four ranks, two copies of two slices: every byte once, and loaded with and without copies."""
    run = Run(stage=3, sharers=2)
    saved = ranks.run(4, saved_runs.save, str(tmp_path), [run], _SAVED, _LAST)
    manifest = json.loads((tmp_path / str(run) / MANIFEST).read_bytes())
    middle = next(e for e in manifest["parameters"] if e["names"][0] == "middle.weight")
    assert len({piece["file"] for piece in middle["slices"]["master"]}) > 2
    for target in (run, replace(run, sharers=-1)):
        loaded = ranks.run(4, saved_runs.load, str(tmp_path), [(target, [str(run)])], _LAST)
        _check(loaded, saved, same_size=target == run)


def test_each_rank_writes_its_own_slices_once(tmp_path):
    saved = ranks.run(3, saved_runs.save, str(tmp_path), [Run(stage=0)], 1, 1)
    assert len(saved) == 3
    folder = tmp_path / str(Run(stage=0))
    names = sorted(item.name for item in folder.iterdir())
    assert names == [MANIFEST, *(f"rank0000{rank}-00000.safetensors" for rank in range(3))]
    manifest = json.loads((folder / MANIFEST).read_bytes())
    middle = next(e for e in manifest["parameters"] if e["names"][0] == "middle.weight")
    pieces = [(p["start"], p["end"], p["file"]) for p in middle["slices"]["exp_avg"]]
    assert len(pieces) == 2  # of the third slice of its unit only padding is left
    assert pieces[0][0] == 0
    assert pieces[-1][1] == 151 * 151
    assert [p[0] for p in pieces[1:]] == [p[1] for p in pieces[:-1]]
    assert len({p[2] for p in pieces}) == 2


def test_a_rank_reads_what_it_holds(tmp_path):
    """In stages 1 to 3 all ranks together read each trained byte once, and verify it once."""
    saved = Run(stage=2)
    ranks.run(2, saved_runs.save, str(tmp_path), [saved], 1, 1)
    tensors = sum(file.stat().st_size for file in (tmp_path / str(saved)).glob("*.safetensors"))
    trained = sum(p.numel() for p in saved_runs.Net(0.0).parameters() if p.requires_grad)
    fixed = 2 * (151 * 107 + 107)
    runs = [Run(stage=stage, offload="none") for stage in range(4)]
    by_rank = ranks.run(3, saved_runs.count_reads, str(tmp_path), str(saved), runs)
    for run, *found in zip(runs, *by_rank, strict=True):
        elements, nbytes = map(sum, zip(*found, strict=True))
        times = 3 if run.stage == 0 else 1
        assert elements == times * 3 * trained
        # Each block is verified by those whose slices reach into it: one or two, and here, where a
        # slice is one block, hardly more. Headers and manifests are read by everybody.
        few = 3 * (64 << 10)
        assert nbytes <= 2 * tensors + times * 12 * trained + 3 * fixed + few
