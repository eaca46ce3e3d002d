"""What is recorded of a run: the right bytes, in order, without changing or keeping anything."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.engine import EngineOptions
from forebay.errors import UnsupportedError
from forebay.links import FaultScript
from forebay.observe import BreakdownLog, break_down, mean_of, record
from forebay.observe.figure import new_figure
from forebay.observe.perfetto import trace, write_trace
from forebay.observe.picture import draw
from forebay.observe.reasons import verdict
from forebay.plan import Lane
from forebay.plan.timeline import Row
from unit.engine_cases import PLACES, mlp, offloaded, run, same, weights

_ROW_OF = {Lane.UP: Row.UP, Lane.DOWN: Row.DOWN}


def _recorded(options: EngineOptions, steps: int = 3, micro: int = 1, dtype=torch.bfloat16):
    model = mlp(dtype)
    with offloaded(model, replace(options, clip_norm=0.5)) as optimizer:
        with record(optimizer.engine) as recording:
            run(model, optimizer, steps=steps, micro=micro)
        return recording, dict(optimizer.engine.traffic), weights(model)


@pytest.mark.parametrize("place", sorted(PLACES))
def test_bytes_equal_the_counters(place):
    recording, traffic, _ = _recorded(PLACES[place])
    assert [one.step for one in recording.records] == [1, 2, 3]
    for lane, row in _ROW_OF.items():
        assert recording.timeline.nbytes(row) == traffic[lane]


@pytest.mark.parametrize("micro", [1, 3])
def test_phases_lie_in_order_inside_their_step(micro):
    recording, _, _ = _recorded(PLACES["host"], micro=micro)
    for one in recording.records[1:]:
        names = [phase.name for phase in one.phases]
        assert names == ["forward", "backward"] * micro + ["step"]
        marks = [mark for phase in one.phases for mark in (phase.begin, phase.end)]
        assert marks == sorted(marks)
        assert one.begin <= marks[0]
        assert marks[-1] <= one.end
    ends = [(one.begin, one.end) for one in recording.records]
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_update_follows_the_decision_and_weights_follow_the_update():
    recording, _, _ = _recorded(PLACES["host"])
    for one in recording.records:
        updates = {i.name: i for i in one.timeline.in_row(Row.HOST_UPDATE)}
        assert updates
        for interval in one.timeline.in_row(Row.UP):
            update = updates[interval.name.replace("publish", "update")]
            assert one.agreed <= update.begin <= update.end <= interval.begin


def test_links_serve_one_piece_at_a_time():
    fault = FaultScript(seed=3, max_delay_us=300)
    recording, _, _ = _recorded(replace(PLACES["streamed"], fault=fault))
    for row in _ROW_OF.values():
        for one in recording.records:
            pieces = one.timeline.in_row(row)
            ends = [0.0, *(piece.end for piece in pieces)]
            assert all(p.begin >= end for p, end in zip(pieces, ends[:-1], strict=True))


def test_watching_changes_no_bit():
    plain = mlp(torch.bfloat16)
    with offloaded(plain, replace(PLACES["streamed"], clip_norm=0.5)) as optimizer:
        run(plain, optimizer, steps=3)
        wanted = weights(plain)
    _, _, found = _recorded(PLACES["streamed"])
    assert same(wanted, found)


def test_breakdown_adds_up_and_is_said():
    recording, traffic, _ = _recorded(PLACES["host"])
    parts = [break_down(one) for one in recording.records]
    mean = mean_of(parts)
    assert mean.up_bytes * 3 == traffic[Lane.UP]
    for part in parts:
        assert part.bwd == pytest.approx(part.bwd_inner + part.bwd_other)
        assert 0 <= part.exposed_wait <= part.step_seconds
        assert part.fwd + part.bwd + part.step <= part.step_seconds * (1 + 1e-9)
        assert part.bwd_allreduce == part.allgather == part.reduce_scatter == 0.0
    log = BreakdownLog(every=3)
    lines = [line for one in recording.records for line in log.lines(one)]
    assert len(lines) == 5
    names = "fwd bwd bwd_inner bwd_allreduce bwd_other step optim_step allgather reduce_scatter"
    assert all(f"{name}: " in lines[0] for name in [*names.split(), "exposed_wait", "up", "down"])
    assert lines[3].startswith("mean of 3 steps")
    assert lines[4].endswith(".")


@pytest.mark.parametrize(
    ("exposed", "on", "words"),
    [
        (0.01, {}, "Computation bounds"),
        (0.5, {Row.HOST_UPDATE: 0.4, Row.UP: 0.1}, "the update on the host"),
        (0.5, {Row.HOST_UPDATE: 0.1, Row.UP: 0.45}, "the link to the device"),
        (0.5, {Row.DOWN: 0.5}, "the link to the host"),
        (0.5, {Row.DOWN: 0.1}, "no lane worked"),
    ],
)
def test_the_verdict_names_what_was_waited_for(exposed, on, words):
    lanes = dict.fromkeys((Row.HOST_UPDATE, Row.UP, Row.DOWN), 0.0) | on
    assert words in verdict(step=1.0, exposed=exposed, on=lanes)


def test_a_trace_and_a_picture_show_every_row(tmp_path):
    recording, _, _ = _recorded(PLACES["nvme"])
    data = trace([recording.timeline, recording.timeline])
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * len(recording.timeline.intervals)
    assert min(event["ts"] for event in spans) == 0
    assert {event["pid"] for event in spans} == {1, 2}
    write_trace(tmp_path / "trace.json", [recording.timeline])
    json.loads((tmp_path / "trace.json").read_text())
    pytest.importorskip("matplotlib")
    draw(tmp_path / "trace.svg", [recording.timeline])
    drawn = (tmp_path / "trace.svg").read_text()
    absent = {Row.RANKS}  # one process
    assert {row for row in Row if row.value not in drawn} == absent


def test_wall_clock_breakdown_prints_a_line_for_each_step(capsys):
    model = nn.Linear(4, 3)
    engine, *_ = forebay.initialize(
        model=model,
        config={
            "train_batch_size": 5,
            "steps_per_print": 2,
            "wall_clock_breakdown": True,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    with engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(5, 4)).sum())
            engine.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "time (ms)" in line]
    assert [line.split(" time")[0] for line in lines] == [
        "step=1",
        "step=2",
        "mean of 2 steps",
        "step=3",
        "step=4",
        "mean of 2 steps",
    ]


def test_without_matplotlib_what_shows_the_same_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        UnsupportedError, match="needs matplotlib, which is not installed"
    ) as caught:
        new_figure(width=1, height=1, instead="look out of the window")
    assert caught.value.hint == "pip install matplotlib, or look out of the window"
