"""Benchmarks of several points, reads and lengths: arithmetic by hand, contestants in small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import distributed

from forebay.bench import LengthsBench, ReadsBench, StepBench, StepSpec, contest
from forebay.bench.contestants import resident_share
from forebay.bench.policies import policy_of, without_policy
from forebay.bench.process import Outcome, run_alone
from forebay.bench.reads import Traffic
from forebay.bench.reads_bench import percentile
from forebay.bench.spec import Task
from forebay.bench.step import Entry, bench_step
from forebay.bench.step_tables import memory_table, step_table
from forebay.bench.training import Training
from forebay.bench.worker import run_contestant
from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.hardware.catalog import machine_named
from forebay.plan.policies import EXACT, Delayed, Speculative
from forebay.plan.program import Lane
from unit.bench_cases import a_profile


def _point(variant: str, micro_batch: int, seconds: float, **more: object) -> dict[str, object]:
    return {
        "variant": variant,
        "micro_batch": micro_batch,
        "tokens": 100 * micro_batch,
        "seconds": [9.0, 9.0, seconds],
        "host_peak_bytes": 10**9,
        "parameters": 10**6,
        "forward_seconds": seconds / 3,
        "backward_seconds": 2 * seconds / 3,
        **more,
    }


def _steps(*results: dict[str, object]) -> StepBench:
    return StepBench(
        spec=StepSpec(variant="floor", size="tiny", micro_batches=(2, 8), sequence=100),
        profile=a_profile(),
        results=results,
        failures=(),
    )


def test_each_size_is_compared_with_its_own():
    text = step_table(
        _steps(
            _point("none", 2, 1.0),
            _point("none", 8, 4.0),
            _point("r0", 2, 2.0),
            _point("r0", 8, 5.0),
            _point("deepspeed2", 8, 10.0),
            _point("deepspeed3", 8, 8.0),
        )
    ).markdown()
    assert "| 200 | r0 | 2.0000 | 2.000 - 2.000 | 100 | 0.50 |" in text
    assert "| 800 | r0 | 5.0000 | 5.000 - 5.000 | 160 | 0.80 |  |  | 1.60 |" in text
    assert "| 800 | deepspeed2 | 10.0000 | 10.000 - 10.000 | 80 | 0.40 |  |  | 0.80 |" in text
    assert "plus compute" not in text  # no compute time is known


def test_a_size_without_deepspeed_is_derived_and_says_so():
    found = _steps(
        _point("floor", 2, 1.0),
        _point("floor", 8, 4.0),
        _point("r0", 2, 1.5),
        _point("deepspeed3", 8, 9.0),
    )
    assert found.derived("deepspeed3", 2) == (6.0, 8)
    text = step_table(found).markdown()
    row = "| 200 | deepspeed3: its cost beside compute at 800 tokens, plus compute | 6.0000 |"
    assert f"{row} not measured | 33 |" in text
    assert "| 200 | r0 | 1.5000 | 1.500 - 1.500 | 133 |  | 1.0000 | 0.67 | 4.00 |" in text
    assert text.count("plus compute") == 1


def test_contestants_take_part_where_they_are_told_to():
    assert Entry.parse("r0").within((2, 4)) == (2, 4)
    assert Entry.parse("mix+0.5+0.3@4").within((2, 4)) == (4,)
    assert Entry.parse("deepspeed3@8+16") == Entry(variant="deepspeed3", micro_batches=(8, 16))
    with pytest.raises(ConfigError, match="deepspeed3@8"):
        Entry.parse("deepspeed3@all")
    spec = StepSpec(variant="floor", size="nano", micro_batches=(2, 4), device="cpu")
    with pytest.raises(ConfigError, match=r"micro-batch size 8.* 2, 4"):
        bench_step(spec, variants=["none@8"])


def test_peak_is_set_beside_ledger_and_activations():
    floor = {"device_peak_bytes": 40e9, "device_reserved_bytes": 42e9, "device_rest_bytes": 10e9}
    own = {
        "device_peak_bytes": 50e9,
        "device_reserved_bytes": 55e9,
        "device_rest_bytes": 20e9,
        "ledger_rest_bytes": 19e9,
        "ledger_peak_bytes": 27e9,
    }
    text = memory_table(_steps(_point("floor", 8, 1.0, **floor), _point("r0", 8, 1.0, **own)))
    # foretold: 19 + (40 - 10) = 49 of 50 allocated, 19 + (42 - 10) = 51 of 55 reserved
    row = "| 800 | r0 | 50.0 | 55.0 | 20.0 | 19.0 | +5.0 | 8.0 | +2.0 | +4.00 |"
    assert row in text.markdown()
    alone = memory_table(_steps(_point("r0", 8, 1.0, **own))).markdown()
    assert "| 800 | r0 | 50.0 | 55.0 | 20.0 | 19.0 | +5.0 | 8.0 |  |  |" in alone


def _reads(busy: list[float], quiet: list[float]) -> dict[str, object]:
    kinds = [("after step", "busy", busy), ("after step", "quiet", quiet)]
    kinds += [("in forward", "busy", []), ("in forward", "quiet", quiet)]
    return {
        "variant": "r0",
        "reads": [
            {"place": place, "traffic": traffic, "seconds": seconds}
            for place, traffic, seconds in kinds
        ],
    }


def test_percentile_is_the_nearest_rank():
    hundreds = [float(number) for number in range(1, 201)]
    assert percentile(hundreds, 0.99) == 198.0
    assert percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(("slow", "verdict"), [(0.0009, "yes"), (0.0015, "no")])
def test_reads_are_judged_by_what_traffic_adds(slow, verdict):
    # the slowest of 100 is an outlier, the one before it is the 99th percentile
    busy = [0.0001] * 98 + [0.0002 + slow, 5.0]
    quiet = [0.0001] * 98 + [0.0002, 7.0]
    found = ReadsBench(
        spec=StepSpec(variant="floor", size="nano", reads=100),
        profile=a_profile(),
        results=(_reads(busy, quiet),),
        failures=(),
    )
    text = found.table().markdown()
    assert f"{1e3 * slow:+.3f} | {verdict} |" in text
    # too few reads met traffic: no verdict
    assert "| r0 | in forward | busy | 0 |  |  |  |  |  |" in text


def test_traffic_is_what_has_not_come_down():
    class Ticket:
        done = False

    traffic, ticket = Traffic(), Ticket()
    traffic.submitted(Lane.UP, Ticket(), 8)
    assert not traffic.under_way
    traffic.submitted(Lane.DOWN, ticket, 8)
    assert traffic.under_way
    ticket.done = True
    assert not traffic.under_way


def _length_result(variant: str, peaks: list[float], **more: object) -> dict[str, object]:
    steps = [
        {
            "length": 1,
            "device_peak_bytes": peak,
            "device_reserved_bytes": peak,
            "allocator_retries": 1,
            "allocator_ooms": 0,
            "staging_peak_bytes": 2e9,
        }
        for peak in peaks
    ]
    return {"variant": variant, "steps": steps, "parameters": 10**9, **more}


def test_staging_is_judged_against_the_largest_activations_so_far():
    floor = _length_result("floor", [12e9, 30e9, 12e9], device_rest_bytes=10e9)
    own = _length_result("r0", [13e9, 29e9, 35e9], ledger_rest_bytes=10e9, ledger_peak_bytes=12e9)
    found = LengthsBench(
        spec=StepSpec(variant="floor", size="nano", lengths=(16, 64), steps=3),
        profile=a_profile(),
        budgets={"floor": None, "r0": int(40e9)},
        results=(floor, own),
        failures=(),
    )
    assert found.beyond(own) == [1e9, -1e9, 5e9]
    text = found.table().markdown()
    assert "| 3 | 16 | 12.0 | 12.0 | 1 | 35.0 | 35.0 | 1 | 2.0 | +5.00 |" in text
    assert "r0: 35.0 GB reserved at most under a bound of 40.0 GB, 3 allocator retries" in text


def test_running_out_of_memory_is_a_finding(monkeypatch, native):
    pytest.importorskip("transformers")
    whole = Training.step

    def _step(self, batches, number):
        if number == 2:
            raise torch.OutOfMemoryError
        return whole(self, batches, number)

    monkeypatch.setattr(Training, "step", _step)
    spec = StepSpec(
        variant="none",
        task=Task.LENGTHS,
        size="nano",
        micro_batches=(1,),
        lengths=(8, 16),
        steps=4,
        device="cpu",
    )
    (own,) = run_contestant(spec)
    assert [step["length"] for step in own["steps"]] == [8, 16]
    found = LengthsBench(
        spec=spec, profile=a_profile(), budgets={"none": 1}, results=(own,), failures=()
    )
    text = found.table().markdown()
    assert "| 3 | 8 | out of memory |" in text
    assert "none: out of memory in step 3." in text


def _here(spec: StepSpec, *, limit_seconds: float) -> Outcome:
    """A contestant in this process."""
    assert limit_seconds > 0
    return Outcome(results=tuple(run_contestant(spec)), failure="")


def _without_processes(monkeypatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(contest, "run_alone", _here)
    monkeypatch.setattr(contest, "ceilings", lambda device, *, limit_seconds: a_profile())


def test_step_command_in_small(tmp_path, capsys, monkeypatch, native):
    """Two sizes of every kind of contestant that needs no library but torch."""
    _without_processes(monkeypatch)
    words = "--size nano --micro-batch 1,2 --sequence 16 --steps 3 --device cpu"
    variants = "floor,none,r0,mix+0.5+0.5@2,fsdp2@2"
    try:
        command = ["bench", "step", *words.split(), "--variants", variants]
        assert main([*command, "--output", str(tmp_path)]) == 0
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    (table,) = tmp_path.glob("step-nano-16-to-32-tokens-*.md")
    out = capsys.readouterr().out
    assert out in table.read_text()
    rows = [line.split("|")[1:3] for line in out.splitlines() if line.startswith("|")]
    times = [(tokens.strip(), name.strip()) for tokens, name in rows][2:10]
    assert times[:3] == [("16", "floor"), ("16", "none"), ("16", "r0")]
    assert times[3:] == [("32", name) for name in ("floor", "none", "r0", "mix+0.5+0.5", "fsdp2")]


def test_what_was_found_is_kept_after_each_contestant(monkeypatch):
    kept = []

    def run_alone(spec: StepSpec, *, limit_seconds: float) -> Outcome:
        if spec.variant == "r0":
            raise KeyboardInterrupt
        return Outcome(results=(_point(spec.variant, 8, 1.0),), failure="")

    monkeypatch.setattr(contest, "run_alone", run_alone)
    monkeypatch.setattr(contest, "ceilings", lambda device, *, limit_seconds: a_profile())
    spec = StepSpec(variant="floor", size="nano", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        bench_step(spec, variants=["floor", "none", "r0"], keep=kept.append)
    assert [[one["variant"] for one in found.results] for found in kept] == [
        ["floor"],
        ["floor", "none"],
    ]


def test_contestants_of_other_libraries_learn_the_same(monkeypatch, native):
    """No offload, forebay and FSDP2 begin with the same weights and see the same losses."""
    pytest.importorskip("transformers")
    losses = {}
    try:
        for variant in ("none", "host", "fsdp2"):
            spec = StepSpec(
                variant=variant,
                size="nano",
                micro_batches=(1,),
                sequence=16,
                steps=3,
                device="cpu",
            )
            (found,) = run_contestant(spec)
            losses[variant] = found["losses"]
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert losses["host"] == pytest.approx(losses["none"], rel=1e-4)
    # its masters meet the gradients in fp32, computed from the same bf16 weights at first
    assert losses["fsdp2"] == pytest.approx(losses["none"], rel=1e-2)
    assert losses["fsdp2"][0] == losses["none"][0]


def test_reads_command_in_small(tmp_path, capsys, monkeypatch, native):
    _without_processes(monkeypatch)
    words = "--size nano --micro-batch 1 --sequence 16 --reads 6 --device cpu --variants mix+0+1"
    assert main(["bench", "reads", *words.split(), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for place in ("after step", "in forward"):
        assert f"| mix+0+1 | {place} | quiet | 6 |" in out
    assert sorted(path.suffix for path in tmp_path.glob("reads-nano-*")) == [".json", ".md"]


def test_states_command_in_small(tmp_path, capsys, monkeypatch, native):
    _without_processes(monkeypatch)
    words = "--size nano --sequence 16 --device cpu --variants device+speculative,r0+delayed"
    assert main(["bench", "states", *words.split(), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for cycle in range(1, 5):
        assert f"| r0+delayed | all | {cycle} |" in out
    found = json.loads(next(tmp_path.glob("states-nano-*.json")).read_text())
    for result in found["results"][::2]:
        assert len({cycle["moved_bytes"] for cycle in result["cycles"]} - {0}) == 1


@pytest.mark.parametrize(
    ("variant", "rest", "policy"),
    [
        ("r25+speculative", "r25", Speculative()),
        ("r0+delayed", "r0", Delayed()),
        ("mix+0+1", "mix+0+1", EXACT),
    ],
)
def test_policies_as_endings_of_variants(variant, rest, policy):
    assert policy_of(variant) == policy
    assert without_policy(variant) == rest
    assert resident_share(variant) == resident_share(rest)


@pytest.mark.parametrize("verb", ["reads", "lengths"])
def test_another_machines_profile_is_refused(verb, tmp_path, capsys):
    theirs = tmp_path / "theirs.json"
    theirs.write_text(machine_named("h200").as_json())
    words = ["--device", "cpu", "--variants", "r0", "--size", "nano", "--profile", str(theirs)]
    assert main(["bench", verb, *words]) == 2
    assert "another machine" in capsys.readouterr().err


def test_a_contestant_that_moves_nothing_has_no_reads(capsys, monkeypatch, native):
    _without_processes(monkeypatch)
    words = "--size nano --micro-batch 1 --sequence 16 --reads 1 --device cpu --variants none"
    assert main(["bench", "reads", *words.split()]) == 1
    assert "it moves nothing" in capsys.readouterr().out


def test_lengths_command_in_small(tmp_path, capsys, monkeypatch, native):
    _without_processes(monkeypatch)
    words = "--size nano --micro-batch 1 --lengths 16,32 --steps 3 --device cpu --variants r50"
    assert main(["bench", "lengths", *words.split(), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line.split("|")[2].strip() for line in out.splitlines() if line.startswith("|")] == [
        "length",
        "---",
        "16",
        "32",
        "16",
    ]
    assert sorted(path.suffix for path in tmp_path.glob("lengths-nano-*")) == [".json", ".md"]


def test_lists_of_numbers_are_checked():
    assert main(["bench", "step", "--micro-batch", "2,x"]) == 2
    assert main(["bench", "lengths", "--lengths", "long"]) == 2


def test_points_that_were_measured_survive_a_failure(monkeypatch):
    """What a process said before it died, or ran out of time, counts; half a line does not."""
    spec = StepSpec(variant="floor", task=Task.STEP, size="nano", device="cpu")
    script = "import sys, time; print('RESULT {\"a\": 1}'); print('RESULT {\"a', end=''); "
    script += "sys.stdout.flush(); "
    real = subprocess.run

    def _worker(end: str):
        command = [sys.executable, "-c", script + end]
        return lambda _command, **how: real(command, **how)

    monkeypatch.setattr(subprocess, "run", _worker("sys.exit('OSError: gone')"))
    died = run_alone(spec, limit_seconds=60)
    assert died.results == ({"a": 1},)
    assert died.failure == "exit code 1, OSError: gone"
    monkeypatch.setattr(subprocess, "run", _worker("time.sleep(60)"))
    late = run_alone(spec, limit_seconds=1.0)
    assert late.results == ({"a": 1},)
    assert late.failure == "no end within 1 s"
