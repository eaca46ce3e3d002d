"""Benchmarks: the floor's arithmetic, tables, and every contestant in small."""

from __future__ import annotations

import json

import pytest

from forebay.bench import AdamBench, StepBench, StepSpec, bench_adam, floor_of
from forebay.bench.adam import AdamRow
from forebay.bench.checkpoint import CheckpointBench, CheckpointSpec, SaveRound
from forebay.bench.contestants import contestant
from forebay.bench.step_tables import step_table
from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.plan.solve import Rates
from forebay.probe.workload import Run
from unit.bench_cases import a_profile

# The ceilings of an H200 machine, with D = 95 GB/s.
_RATES = Rates(host_memory=95e9, link_up=55e9, link_down=55e9)
_3B = 3_212_749_824


@pytest.mark.parametrize(
    ("share", "host_memory", "wanted"),
    [(0.0, 95e9, 0.72), (0.25, 95e9, 0.88), (0.5, 95e9, 0.99), (0.0, 120e9, 0.80)],
)
def test_floor_gives_the_figures_of_the_design(share, host_memory, wanted):
    """W1: forward 0.25 and backward 0.657 s of 0.907, no offload 0.95 s."""
    rates = Rates(host_memory=host_memory, link_up=55e9, link_down=55e9)
    floor = floor_of(
        parameters=_3B,
        forward=0.25,
        backward=0.657,
        rates=rates,
        resident_share=share,
        staging_bytes=22e9,
        tail=0.09,
    )
    assert 0.95 / floor.seconds == pytest.approx(wanted, abs=0.03)


def test_floor_is_compute_where_nothing_moves():
    floor = floor_of(
        parameters=_3B, forward=0.2, backward=0.5, rates=_RATES, resident_share=1.0, micro_batches=4
    )
    assert floor.seconds == pytest.approx(2.8)
    assert floor.window_seconds == 0


def test_floor_streams_no_more_than_backward_has_time_for():
    slow = floor_of(parameters=_3B, forward=0.0, backward=0.01, rates=_RATES)
    assert slow.streamed_share <= 55e9 * 0.01 / 10 / _3B * 1.001


def test_step_table_sets_each_budget_beside_its_floor():
    result = {"seconds": [9.0, 9.0, 1.0, 2.0, 3.0], "tokens": 100, "host_peak_bytes": 5e9}
    result |= {"micro_batch": 8}
    passes = {"parameters": 10**8, "forward_seconds": 0.5, "backward_seconds": 1.0}
    found = StepBench(
        spec=StepSpec(variant="floor", size="tiny"),
        profile=a_profile(),
        results=(
            result | passes | {"variant": "floor"},
            result | {"variant": "r0"},
            result | {"variant": "none"},
        ),
        failures=(("deepspeed3", "exit code 1"),),
    )
    assert found.median("r0", 8) == 2.0
    assert found.floor("r0", 8) == pytest.approx(1.5)  # the window is shorter than the forward
    assert found.floor("none", 8) is None
    text = step_table(found).markdown()
    assert "| 100 | r0 | 2.0000 | 1.000 - 3.000 | 50 | 1.00 | 1.5000 | 0.75 |  | 5.0 |" in text
    assert "deepspeed3 did not finish: exit code 1" in text
    json.dumps(found.as_dict())


def test_specifications_travel_and_refuse():
    spec = StepSpec(variant="r25", size="tiny", device="cpu")
    assert StepSpec.from_json(spec.as_json()) == spec
    for wrong in (
        {"size": "huge"},
        {"steps": 2},
        {"micro_batches": (0,)},
        {"micro_batches": (8, 2)},
        {"lengths": ()},
    ):
        with pytest.raises(ConfigError):
            StepSpec(variant="floor", **wrong)
    for variant in ("fast", "mix+1", "r", "deepspeed2"):
        with pytest.raises(ConfigError, match=r"variant|DeepSpeed"):
            contestant(StepSpec(variant=variant, device="cpu"), _linear(), rates=None)


def _linear():
    from torch import nn

    return nn.Linear(2, 2)


def test_adam_moves_the_same_memory(native):
    found = bench_adam(elements=1 << 16, repeats=1, threads=[1, 2])
    assert [(row.contestant, row.threads) for row in found.rows] == [
        (name, threads)
        for threads in (1, 2)
        for name in ("native fp32", "native split", "torch fused", "copy")
    ]
    assert all(run.seconds > 0 for row in found.rows for run in row.runs)


def test_adam_table_compares_by_byte():
    def row(contestant, nbytes, seconds):
        return AdamRow(
            contestant=contestant,
            threads=1,
            nbytes=nbytes,
            elements=10,
            runs=(Run(seconds, 2 * seconds),),
        )

    found = AdamBench(
        kernel_level="avx2",
        elements=10,
        repeats=1,
        rows=(
            row("native", 2 * 10**9, 1.0),
            row("torch fused", 10**9, 1.0),
            row("copy", 10**9, 0.25),
        ),
    )
    assert (
        "| 1 | native | 2.0 | 2.0 | 0.00 | 2.00 | 0.50 | 1.0 | 2.00 |" in found.table().markdown()
    )


def test_commands_write_tables(tmp_path, capsys, native):
    pytest.importorskip("transformers")
    adam = ["bench", "adam", "--elements", "65536", "--repeats", "1", "--output", str(tmp_path)]
    assert main(adam) == 0
    step = "--size nano --micro-batch 1 --sequence 16 --steps 3 --device cpu --variants r50"
    trace = tmp_path / "trace-{variant}.json"
    words = ["bench", "step", *step.split(), "--timeline", str(trace), "--output", str(tmp_path)]
    assert main(words) == 0
    assert "| r50 |" in capsys.readouterr().out
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split("-")[0] for name in names] == [
        "adam",
        "adam",
        "step",
        "step",
        *["trace"] * 2,
    ]
    assert main(["bench", "step", "--variants", "floor", "--steps", "2"]) == 2


def test_checkpoint_table_has_medians_and_ratios_within_a_round():
    common = {"nbytes": 2_000_000_000, "beside": 3.0, "step": 0.5, "steps_beside": (1.0, 0.75)}
    rounds = (
        SaveRound(disk=1.0, at_once=1.25, stall=0.01, **common),
        SaveRound(disk=2.0, at_once=2.0, stall=0.04, **common),
        SaveRound(disk=4.0, at_once=5.0, stall=0.05, **common),
    )
    found = CheckpointBench(
        results=((CheckpointSpec(), rounds),), is_direct=True, file_system="ext4 on a disk"
    )
    wanted = ["bf16, cpu", "2.00", "1.00", "1.00", "0.80", "0.80 - 1.00", "3.000", "0.0400"]
    assert list(found.table().rows[0]) == [*wanted, "1.0%", "0.750", "0.500"]


def test_checkpoint_command_writes_a_table(tmp_path, capsys):
    folder, results = tmp_path / "disk", tmp_path / "results"
    folder.mkdir()
    words = ["--millions", "4", "--rows", "8", "--repeats", "1", "--device", "cpu"]
    variants = ["--precision", "bf16,fp32", "--offload", "cpu,none"]
    where = ["--folder", str(folder), "--output", str(results)]
    assert main(["bench", "checkpoint", *words, *variants, *where]) == 0
    out = capsys.readouterr().out
    assert all(f"| {row} |" in out for row in ("bf16, cpu", "bf16, none", "fp32, none"))
    table, raw = sorted(results.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert table.name.startswith("checkpoint-")
    first = json.loads(raw.read_text())["results"][0]
    assert first["spec"]["millions"] == 4
    assert first["rounds"][0]["nbytes"] > 12 * 4_000_000
    assert not list(folder.iterdir())
    assert main(["bench", "checkpoint", "--precision", "int8", "--folder", str(folder)]) == 2
