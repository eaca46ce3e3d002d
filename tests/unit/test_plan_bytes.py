"""What the planner says that an update moves and places, beside what a run on the CPU counts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.plan.loads import Uses
from forebay.plan.memory import forecast
from forebay.plan.model_config import shape_of
from forebay.plan.placement import UpdatePlace
from forebay.plan.program import Lane, build_program
from forebay.plan.ready import ready_config
from forebay.plan.residents import host_share
from forebay.plan.setup import Home, Setup
from forebay.plan.tiers import in_engine, placement_of
from forebay.plan.workload import Workload

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("optimizer", "weights", "accumulation", "tied", "resident"),
    [
        (Home.NVME, Home.NVME, 1, False, 0),
        (Home.NVME, Home.NVME, 3, False, 0),
        (Home.NVME, Home.HOST, 2, False, 0),
        (Home.HOST, Home.HOST, 1, False, 0),
        (Home.HOST, Home.HOST, 2, True, 0),
        (Home.NVME, Home.NVME, 1, False, 2),
        (Home.NVME, Home.DEVICE, 2, False, 1),
    ],
)
def test_a_run_moves_what_the_plan_says(optimizer, weights, accumulation, tied, resident, tmp_path):
    """`resident` first units' state stays on the device, as a written ratio says."""
    work = Workload(micro_batch=2, sequence=8, accumulation=accumulation)
    setup = Setup(stage=3, optimizer=optimizer, weights=weights, workload=work)
    assert in_engine(setup)
    llama = _LLAMA | {"tie_word_embeddings": tied}
    shape, stays = shape_of(llama, source="test"), UpdatePlace.DEVICE
    rest = len(shape.unit_elements()) - resident
    places = (stays,) * resident + (UpdatePlace.HOST,) * rest if resident else ()
    config = ready_config(setup, host_share=host_share(shape, places))
    for given in config["zero_optimization"].values():
        if isinstance(given, dict) and given["device"] == "nvme":
            given["nvme_path"] = str(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**llama), dtype=torch.bfloat16)
    tokens, seen = torch.randint(0, 500, (2, 8)), []
    with forebay.initialize(model=model, config=config)[0] as engine:
        for _ in range(4):
            for _ in range(accumulation):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            engine.synchronize()
            seen.append(engine.core.traffic)
        placed = forecast(engine.core.placement)
    planned = placement_of(shape, setup, places=places)
    assert forecast(planned) == placed
    order = range(len(planned.units))
    uses = Uses.expected(planned, order=order, again=order[:tied])
    program = build_program(planned, order=order, uses=uses)
    for lane in (Lane.READ, Lane.WRITE, Lane.UP, Lane.DOWN):
        assert seen[-1].get(lane, 0) - seen[-2].get(lane, 0) == program.traffic(lane), lane
