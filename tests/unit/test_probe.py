"""The probe: sane figures that load again, and a report in which nothing is unexplained."""

from __future__ import annotations

import json

import pytest
import torch

from forebay.cli.main import main
from forebay.hardware.profile import load_profile
from forebay.probe.environment import State, report
from forebay.probe.measuring import Effort, measure, thread_counts
from forebay.probe.system import read_system
from forebay.probe.workload import rate_in_common

_SMALL = Effort(elements=1 << 18, link_bytes=4 << 20, repeats=1)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_thread_counts(most, counts):
    assert thread_counts(most) == counts


def test_what_is_measured_loads_again(tmp_path, native):
    said = []
    profile = measure("cpu", effort=_SMALL, progress=said.append)
    (tmp_path / "p.json").write_text(profile.as_json())
    assert load_profile(tmp_path / "p.json", device="cpu") == profile
    assert len(said) == len(profile.threads) + 3
    assert profile.rates().host_memory > 1e6
    assert {rate.dtype for rate in profile.matrix} == {"float32", "bfloat16"}
    assert profile.node.cores >= 1
    assert profile.system == read_system(torch.device("cpu"))


class _Done:
    def __init__(self, *times):
        self._times = list(times)
        self.pieces = len(times)

    def times(self):
        return self._times


def test_rates_count_only_common_time():
    second = 10**9
    long = _Done((0, 2 * second), (2 * second, 4 * second))
    short = _Done((second, 2 * second))
    assert rate_in_common([[(long, 400)], [(short, 50)]]) == pytest.approx([100, 50])
    apart = _Done((5 * second, 6 * second))
    assert rate_in_common([[(short, 50)], [(apart, 50)]]) == [0.0, 0.0]


def test_the_report_explains_everything(tmp_path):
    found = report()
    assert len({one.part for one in found}) == len(found)
    for one in found:
        assert one.detail
        if one.state is State.LIMITED:
            assert one.remedy, one.part
    bare = {one.part: one for one in report(sys=tmp_path, proc=tmp_path)}
    assert bare["huge pages"].state is State.LIMITED
    assert "unknown" in bare["host memory"].detail


def test_the_command_reports_and_measures(tmp_path, capsys, monkeypatch, native):
    assert main(["probe", "--report", "--json"]) == 0
    parts = {row["part"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert parts["io_uring"] in {"works", "limited"}
    assert main(["probe", "--report"]) == 0
    assert "native core" in capsys.readouterr().out
    monkeypatch.setattr("forebay.probe.measuring.Effort", lambda **_: _SMALL)
    path = tmp_path / "profile.json"
    assert main(["probe", "--device", "cpu", "--quick", "--output", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "measuring: " in shown.err
    load_profile(path, device="cpu")
    assert main(["probe", "--device", "cuda:99"]) == 2
