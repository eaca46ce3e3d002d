"""Corrections of a profile from runs, and the record that a run writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.hardware.catalog import CATALOG
from forebay.hardware.profile import read_profile
from forebay.hardware.rates import DriveUse
from forebay.plan.choose import choose
from forebay.plan.learn import learn
from forebay.plan.model_config import shape_of
from forebay.plan.run_record import RUN_RECORD, Measured, RunRecord, read_record
from forebay.plan.setup import Cluster, Home, Setup
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Inputs, Workload
from plan_cases import LLAMA_3B, LLAMA_8B, question

_PROFILE = CATALOG["h200"]


def _run(factor, *, optimizer=Home.DEVICE, config=LLAMA_3B, tokens=2048, profile=_PROFILE):
    """A run that took `factor` times what the profile says."""
    setup = Setup(
        stage=2,
        optimizer=optimizer,
        weights=Home.DEVICE,
        workload=Workload(micro_batch=8, sequence=tokens),
    )
    run = RunRecord(
        machine=profile.machine,
        shape=shape_of(config, source="config"),
        setup=setup,
        streamed_units=tuple(range(6)) if optimizer is Home.HOST else None,
        measured=Measured(seconds=1.0, steps=5, host_bytes=0, device_bytes=0),
    )
    measured = replace(run.measured, seconds=factor * run.predict(profile))
    return replace(run, measured=measured)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [(home, factor) for home in (Home.DEVICE, Home.HOST) for factor in (0.9, 1.0, 1.3, 4.0)]
    # with state on the host its way there and back bounds how much faster a step can be
    + [(Home.DEVICE, 0.5)],
)
def test_what_was_learnt_predicts_the_run(optimizer, factor):
    run = _run(factor, optimizer=optimizer)
    corrected, (lesson,) = learn(_PROFILE, [run])
    assert run.predict(corrected) == pytest.approx(run.measured.seconds, rel=1e-3)
    assert lesson.measured / lesson.predicted == pytest.approx(factor, rel=1e-6)
    assert corrected.corrections.runs == 1


def test_a_run_teaches_what_bounds_it():
    """8 tokens a row leave computation nothing to do: the host's update is what is slow."""
    compute = learn(_PROFILE, [_run(1.5)])[0].corrections
    assert compute.compute > 1.4
    assert compute.host_update == 1.0
    slow = _run(1.5, optimizer=Home.HOST, config=LLAMA_8B, tokens=8)
    host = learn(_PROFILE, [slow])[0].corrections
    assert host.compute == 1.0
    assert host.host_update > 1.2


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_a_peak_teaches_what_activations_take(factor):
    run = _run(1.0)
    tiers = tier_bytes(run.shape, run.setup)
    passing = tiers.total("device") - tiers.placed_on_device
    peak = tiers.placed_on_device + int(factor * passing)
    run = replace(run, measured=replace(run.measured, device_peak_bytes=peak))
    corrected, (lesson,) = learn(_PROFILE, [run])
    factor_learnt = corrected.corrections.activations
    assert lesson.activations == pytest.approx(factor, rel=1e-3)
    again = tier_bytes(run.shape, run.setup, corrected=factor_learnt)
    assert again.total("device") == pytest.approx(peak, rel=1e-6)
    assert "on the device" in lesson.sentence()
    question_of_it = question(LLAMA_3B, "h200", devices=1)
    before = choose(question_of_it).all[0].tiers.device["activations"]
    after = choose(replace(question_of_it, profile=corrected)).all[0].tiers.device["activations"]
    assert after / before == pytest.approx(factor, rel=1e-3)


def test_a_peak_below_what_is_placed_is_refused():
    run = _run(1.0)
    run = replace(run, measured=replace(run.measured, device_peak_bytes=1 << 20))
    with pytest.raises(
        ConfigError, match=r"no factor of activations between 0\.05 and 20 makes them the same"
    ):
        learn(_PROFILE, [run])


def test_a_run_is_judged_by_the_places_that_it_had():
    run = _run(1.0, optimizer=Home.HOST, tokens=64)
    run = replace(run, streamed_units=None)
    few = replace(run, streamed_units=())
    many = replace(run, streamed_units=tuple(range(30)))
    assert few.predict(_PROFILE) != pytest.approx(many.predict(_PROFILE), rel=0.01)
    # where nobody said, the best of those that fit
    assert run.predict(_PROFILE) <= 1.001 * few.predict(_PROFILE)
    slow = replace(few, measured=replace(few.measured, seconds=1.5 * few.predict(_PROFILE)))
    corrected, _ = learn(_PROFILE, [slow])
    assert few.predict(corrected) == pytest.approx(slow.measured.seconds, rel=1e-3)


def _with_files(slower, *, profile=_PROFILE, tokens=64):
    """A run with all state on drives that took so many times as long as the profile says."""
    setup = Setup(
        stage=2,
        optimizer=Home.NVME,
        weights=Home.DEVICE,
        workload=Workload(micro_batch=8, sequence=tokens),
    )
    slow = replace(profile, corrections=replace(profile.corrections, drives=slower))
    use = DriveUse(
        bytes_read=4 << 30,
        read_seconds=slower * (4 << 30) / profile.drives.read,
        bytes_written=2 << 30,
        write_seconds=slower * (2 << 30) / profile.drives.write,
    )
    run = RunRecord(
        machine=profile.machine,
        shape=shape_of(LLAMA_3B, source="config"),
        setup=setup,
        measured=Measured(seconds=1.0, steps=5, host_bytes=0, device_bytes=0, drives=use),
    )
    return replace(run, measured=replace(run.measured, seconds=run.predict(slow)))


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.5])
def test_files_teach_what_drives_take_and_nothing_else(slower):
    run = _with_files(slower)
    corrected, (lesson,) = learn(_PROFILE, [run])
    assert corrected.corrections.drives == pytest.approx(slower, rel=1e-6)
    # the rest of the forecast was right: no other factor stands in for the drives
    assert lesson.factor == pytest.approx(1.0, rel=0.01)
    assert run.predict(corrected) == pytest.approx(run.measured.seconds, rel=1e-3)
    assert corrected.rates().file_read == pytest.approx(_PROFILE.drives.read / slower)
    assert f"drives take {slower:.2f} times as long" in lesson.sentence()
    twice, _ = learn(corrected, [run])
    assert twice.corrections.drives == pytest.approx(slower, rel=1e-6)


def test_ranks_share_drives_and_some_runs_say_nothing_of_them():
    run = _with_files(1.0)
    both = replace(run.setup, cluster=Cluster(devices_per_node=2))
    shared = replace(run, setup=both)
    shared = replace(shared, measured=replace(run.measured, seconds=shared.predict(_PROFILE)))
    assert learn(_PROFILE, [shared])[1][0].drives == pytest.approx(0.5)
    without = replace(_PROFILE, drives=None)
    (lesson,) = learn(without, [_run(1.0, profile=without)])[1]
    assert lesson.drives is None
    assert "drives" not in lesson.sentence()


def test_drives_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="reads and writes took 40 times as long"):
        learn(_PROFILE, [_with_files(40.0)])


def test_learning_twice_changes_nothing_more():
    run = _run(1.4)
    once, _ = learn(_PROFILE, [run])
    twice, (lesson,) = learn(once, [run])
    assert lesson.factor == pytest.approx(1.0, rel=1e-3)
    assert twice.corrections.compute == pytest.approx(once.corrections.compute, rel=1e-3)
    assert twice.corrections.runs == 2


def test_several_runs_meet_in_the_middle():
    corrected, lessons = learn(_PROFILE, [_run(1.0), _run(4.0)])
    assert len(lessons) == 2
    assert 1.5 < corrected.corrections.compute < 2.5


@pytest.mark.parametrize("optimizer", [Home.DEVICE, Home.HOST])
def test_a_record_comes_back(tmp_path, optimizer):
    run = replace(_run(1.1, optimizer=optimizer), predicted_seconds=0.5, streamed_units=(0, 2))
    if optimizer is Home.HOST:
        work = replace(run.setup.workload, inputs=Inputs.HOST)
        run = replace(run, setup=replace(run.setup, workload=work))
        use = _with_files(1.0).measured.drives
        run = replace(run, measured=replace(run.measured, drives=use))
    (tmp_path / RUN_RECORD).write_text(run.as_json())
    assert read_record(tmp_path) == run
    assert json.loads(run.as_json())["predicted"]["host_bytes"] >= 0


def test_runs_of_other_machines_are_refused():
    run = replace(_run(1.0), machine=CATALOG["4090"].machine)
    with pytest.raises(ConfigError, match="another machine: cpu '2 x Intel"):
        learn(_PROFILE, [run])
    with pytest.raises(ConfigError, match="computation 20 times as fast or as slow makes it"):
        learn(_PROFILE, [_run(30.0)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "record of version 9, and this forebay reads version 1"),
        ({"measured": {"seconds": 1.0}}, "is no run's record"),
        ({"measured": {"seconds": 1.0, "drives": {"bytes_read": -1}}}, "is no run's record"),
        ({"machine": 3}, "is no run's record"),
    ],
    ids=str,
)
def test_wrong_records_are_refused(tmp_path, change, words):
    data = json.loads(_run(1.0).as_json()) | change
    (tmp_path / RUN_RECORD).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words):
        read_record(tmp_path)


def test_absurd_seconds_are_refused(tmp_path):
    data = json.loads(_run(1.0).as_json())
    data["measured"]["seconds"] = -1.0
    (tmp_path / RUN_RECORD).write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"seconds is -1.0; it must be between 0 and"):
        read_record(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "none")


def test_the_command_corrects_the_profile(tmp_path, capsys):
    profile, run = tmp_path / "machine.json", _run(1.25)
    profile.write_text(_PROFILE.as_json())
    (tmp_path / RUN_RECORD).write_text(run.as_json())
    assert main(["plan", "--learn", str(tmp_path), "--profile", str(profile)]) == 0
    assert "computation takes 1.2" in capsys.readouterr().out
    assert run.predict(read_profile(profile)) == pytest.approx(run.measured.seconds, rel=1e-3)
    assert main(["plan", "--learn", str(tmp_path)]) == 2
    assert "--learn corrects a profile" in capsys.readouterr().err
