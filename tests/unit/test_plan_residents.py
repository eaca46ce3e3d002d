"""State that stays on the device while the rest is on the host: as much as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.plan.choose import choose
from forebay.plan.explain import as_text, config_of
from forebay.plan.placement import UpdatePlace
from forebay.plan.residents import host_share, resident_places
from forebay.plan.setup import Home, Setup
from forebay.plan.share import places_for_share
from forebay.plan.step import step_forecast
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Workload
from plan_cases import LLAMA_8B, question

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_room_on_the_devices_holds_state_where_that_is_faster() -> None:
    choice = choose(question(MIXTRAL, "h100"))
    best, shape = choice.best, choice.question.shape
    assert best is not None and best.step is not None
    assert best.setup.optimizer is Home.HOST
    places = best.step.places
    resident = places.count(UpdatePlace.DEVICE)
    assert 0 < resident < len(places)
    assert places[:resident] == (UpdatePlace.DEVICE,) * resident
    # there is room for it, with some left for activations that are larger than foretold
    assert best.tiers.total("device") <= 0.92 * choice.capacity.device
    host = tuple(UpdatePlace.HOST for _ in places)
    alone = step_forecast(shape, best.setup, profile=choice.question.profile, places=host)
    assert best.seconds < 0.9 * alone.seconds
    assert f"the state of the first {resident} " in as_text(choice)


def test_room_on_the_device_holds_state_beside_drives_too() -> None:
    """A byte that stays is neither read nor written in an update."""
    asked = question(LLAMA_8B | {"num_hidden_layers": 56}, "4090", sequence=512)
    choice = choose(asked)
    best = choice.best
    assert best is not None and best.step is not None
    assert best.setup.optimizer is Home.NVME
    resident = best.step.places.count(UpdatePlace.DEVICE)
    assert 0 < resident < len(best.step.places) / 2
    assert best.tiers.total("device") <= 0.92 * choice.capacity.device
    alone = step_forecast(asked.shape, best.setup, profile=asked.profile)
    assert best.seconds < 0.97 * alone.seconds
    ratio = config_of(choice, best)["zero_optimization"]["offload_optimizer"]["ratio"]
    assert places_for_share(asked.shape.spec("bfloat16"), share=ratio) == best.step.places
    assert "Of the state that does not stay there" in as_text(choice)


def test_the_written_share_makes_the_engine_place_what_was_planned() -> None:
    choice = choose(question(MIXTRAL, "h100"))
    assert choice.best is not None and choice.best.step is not None
    config = config_of(choice, choice.best)
    assert "streamed_units" not in config.get("forebay", {})
    ratio = config["zero_optimization"]["offload_optimizer"]["ratio"]
    spec = choice.question.shape.spec("bfloat16")
    assert places_for_share(spec, share=ratio) == choice.best.step.places


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("weights", [Home.DEVICE, Home.HOST])
def test_resident_units_take_no_more_than_the_room(weights: Home, accumulation: int) -> None:
    shape = question(MIXTRAL, "h100").shape
    setup = Setup(
        stage=3,
        optimizer=Home.HOST,
        weights=weights,
        workload=Workload(sequence=256, accumulation=accumulation),
    )
    before = tier_bytes(shape, setup).total("device")
    for free in (0, 1 << 33, 1 << 36, 1 << 38):
        places = resident_places(shape, setup, free=free)
        after = tier_bytes(shape, setup, places=places).total("device")
        assert after - before <= free
        assert host_share(shape, places) == pytest.approx(
            1 - places.count(UpdatePlace.DEVICE) / len(places), abs=0.1
        )
    every = replace(setup, optimizer=Home.DEVICE, weights=Home.DEVICE)
    assert tier_bytes(shape, every).device["optim_states"] == 8 * shape.parameters
