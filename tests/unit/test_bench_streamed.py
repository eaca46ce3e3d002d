"""Benchmarks of models larger than the device: what they move, and the forecast beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.bench import StepBench, StepSpec
from forebay.bench.contestants import build_model, resident_share
from forebay.bench.spec import SHAPES
from forebay.bench.step import bench_step
from forebay.bench.step_tables import traffic_table
from forebay.bench.streamed import Streamed
from forebay.bench.worker import run_contestant
from forebay.errors import ConfigError
from forebay.hardware.profile import MatrixRate
from unit.bench_cases import a_profile

pytest.importorskip("transformers")


def _run(variant: str, size: str = "nano", **more) -> dict:
    spec = StepSpec(
        variant=variant, size=size, micro_batches=(1,), sequence=16, steps=4, device="cpu", **more
    )
    (found,) = run_contestant(spec)
    return found


def test_names_say_where_weights_state_and_activations_are():
    assert Streamed.of("streamed+2+0.5+host+offload") == Streamed(
        pool_bytes=2_000_000_000, resident=0.5, updates_on_host=True
    )
    assert Streamed.of("streamed+offload") == Streamed()
    assert Streamed.of("device+offload") is None
    assert Streamed.of("streamed+1+layer+delayed+offload") == Streamed(pool_bytes=1_000_000_000)
    assert resident_share("streamed+1+0.25+offload") == 0.25
    with pytest.raises(ConfigError, match=r"streamed\+4"):
        Streamed.of("streamed+much")


def test_weights_on_the_host_cross_twice_an_update(native):
    """2 bytes per parameter and pass, less what stays where a pass turns: never 6."""
    found = _run("streamed+0+0+host")
    in_all = found["up_bytes"] / found["parameters"]
    assert 2.0 <= in_all <= 4.0
    # four micro-batches: in layer order as one, and sums in fp32
    usual, layer = (_run(f"streamed+0+0+host{end}", accumulation=4) for end in ("", "+layer"))
    assert layer["losses"] == usual["losses"]
    assert layer["up_bytes"] == found["up_bytes"] < usual["up_bytes"] / 2
    assert layer["down_bytes"] == 2 * found["down_bytes"] == usual["down_bytes"] / 2
    assert found["down_bytes"] == pytest.approx(2 * found["parameters"], rel=0.01)
    assert found["weights_in_time"] == 1.0
    assert found["forecast_host_bytes"] == pytest.approx(14 * found["parameters"], rel=0.05)


def test_half_of_the_parameters_stay(native):
    half, none = _run("streamed+0+0.6+host"), _run("streamed+0+0+host")
    assert 0 < half["up_bytes"] < none["up_bytes"]
    assert half["forecast_host_bytes"] < none["forecast_host_bytes"]


def test_any_variant_may_keep_activations_on_the_host(native):
    layers, tokens, width, item = 4, 16, 256, 2
    inputs = (layers - 1) * tokens * width * item  # of all layers but the last
    there, here = _run("device+offload", "tiny"), _run("device", "tiny")
    assert there["activations_bytes"] == inputs == there["forecast_activations_bytes"]
    assert here["activations_bytes"] == here["forecast_activations_bytes"] == 0
    assert there["forecast_host_bytes"] - here["forecast_host_bytes"] == inputs
    for variant in ("device+offload", "device+layer+offload"):
        found = _run(variant, accumulation=2)
        moved = 2 * tokens * 64 * item  # of one of two layers
        assert found["activations_bytes"] == found["forecast_activations_bytes"] == moved


@pytest.mark.parametrize("variant", ["host", "device", "streamed+0+0+host"])
def test_bytes_over_the_link_are_forecast(native, variant):
    found = _run(variant, accumulation=2)
    for way in ("up", "down"):
        assert found[f"forecast_{way}_bytes"] == found[f"{way}_bytes"]


def test_frozen_shapes_train_what_is_beside_their_matrices(native, monkeypatch):
    monkeypatch.setitem(SHAPES, "nano", replace(SHAPES["nano"], frozen=True))
    spec = StepSpec(variant="device", size="nano", device="cpu")
    frozen = [p for p in build_model(spec).parameters() if not p.requires_grad]
    assert {param.ndim for param in frozen} == {2}
    found = _run("device")
    assert found["losses"][0] != found["losses"][2]
    nbytes = sum(param.nbytes for param in frozen)
    assert found["forecast_device_bytes"] > nbytes > 0
    # where they come and go the device holds a pool of them instead
    streamed = _run("streamed+0+0+host")
    assert streamed["forecast_device_bytes"] < found["forecast_device_bytes"]


def test_a_step_with_frozen_matrices_is_forecast_without_their_gradients(native, monkeypatch):
    rate = MatrixRate(dtype="bfloat16", size=64, flops=1e9)
    text = replace(a_profile(), matrix=(rate,), device_memory=1e12).as_json()
    trained = _run("device", profile=text)["forecast_seconds"]
    monkeypatch.setitem(SHAPES, "nano", replace(SHAPES["nano"], frozen=True))
    frozen = _run("device", profile=text)["forecast_seconds"]
    streamed = _run("streamed+0+0+host", profile=text)["forecast_seconds"]
    # of blocks alone 3 products for 4; the last layer's matrix is trained
    assert 0.75 * trained < frozen < 0.95 * trained
    assert streamed > frozen


def test_the_table_sets_the_forecast_beside_what_was_measured():
    one = {
        "tokens": 10,
        "variant": "streamed",
        "seconds": [9.0, 9.0, 2.0],
        "parameters": 10**9,
        "up_bytes": 4e9,
        "down_bytes": 2e9,
        "activations_bytes": 1e9,
        "weights_in_time": 0.875,
        "forecast_up_bytes": 4e9,
        "forecast_activations_bytes": 1.2e9,
        "device_reserved_bytes": 12_000_000_000,
        "forecast_device_bytes": 11_000_000_000,
        "host_peak_bytes": 15_000_000_000,
        "forecast_host_bytes": 14_000_000_000,
        "forecast_seconds": 1.5,
        "setup_seconds": 30.0,
    }
    found = StepBench(
        spec=StepSpec(variant="floor"), profile=a_profile(), results=(one,), failures=()
    )
    assert (
        "| 10 | streamed | 4.00 | 4.00 | 4.00 | 2.00 |  | 87.5 | 1.00 | 1.20 | 0.50 | 12.0 | 11.0 "
        "| 15.0 | 14.0 "
        "| 2.000 | 1.500 | 30 |" in traffic_table(found).markdown()
    )


def test_ceilings_that_are_known_are_not_measured_again(monkeypatch):
    from forebay.bench import contest as module
    from forebay.bench.process import Outcome

    def refuse(*_args, **_kwargs):
        raise AssertionError

    monkeypatch.setattr(module, "ceilings", refuse)
    monkeypatch.setattr(module, "run_alone", lambda *_a, **_k: Outcome(results=(), failure="no"))
    spec = StepSpec(variant="floor", device="cpu")
    found = bench_step(spec, variants=["none"], profile=a_profile())
    assert found.profile == a_profile()
    assert found.failures == (("none", "no"),)
