"""State that leaves the device and comes back over ranks: bits, uses in between, refusals."""

from __future__ import annotations

import pytest
import torch

from distributed import moved_states, ranks
from distributed.moved_states import STATE, Moves
from distributed.saved_runs import Run
from distributed.training import Recipe
from forebay.engine.state_moves import MOVABLE
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.policies import Delayed, Speculative
from forebay.plan.zenflow import ZenFlow
from forebay.tiers.ledger import Role

DEVICE = UpdatePlace.DEVICE
GRADIENTS = (Role.LP_GRADS, Role.CONTIGUOUS_GRAD_BUFFER)
EVERY = [
    Moves(between=MOVABLE),
    Moves(between=STATE),
    Moves(between=(Role.LP_PARAMS,)),
    Moves(inside=MOVABLE),
    Moves(inside=GRADIENTS, between=STATE),
]


def _check(size, jobs):
    for results in ranks.run(size, moved_states.runs, jobs, seconds=800):
        for (recipe, every), (plain, *moved) in zip(jobs, results, strict=True):
            for moves, result in zip(every, moved, strict=True):
                assert result == plain, (recipe, moves)


def test_the_same_bits_in_stages_1_to_3():
    _check(
        2,
        [
            (Recipe(stage=1, place=DEVICE, micro=2, unit_elements=1), EVERY[:1] + EVERY[3:4]),
            (Recipe(stage=2, place=DEVICE, micro=2, slow_seconds=0.003), EVERY[3:]),
            (Recipe(stage=3, place=DEVICE, micro=2, slow_seconds=0.003), EVERY),
            (Recipe(stage=3, micro=1, weights=WeightPlace.HOST), EVERY[:1]),
            # what visits the device leaves when somebody asks between backward and step
            (Recipe(stage=2, place=UpdatePlace.STREAMED), EVERY[3:4]),
        ],
    )


def test_one_rank_without_room_keeps_all_state_where_it_is():
    told, own = ranks.run(2, moved_states.one_without_room, Recipe(stage=2, place=DEVICE, steps=2))
    assert len(told) == len(own) == 2
    assert all(message.startswith("rank 1 of 2: ") for message in told)
    assert [message.removeprefix("rank 1 of 2: ") for message in told] == own


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_place_and_mode_on_three_ranks():
    """With gradients on the device and on the host, and with columns that are important."""
    recipes = [
        Recipe(stage=stage, place=place, micro=micro, dtype=dtype, unit_elements=unit)
        for stage in (0, 1, 2, 3)
        for place, unit in ((DEVICE, 1), (UpdatePlace.HOST, None), (UpdatePlace.STREAMED, 1))
        for micro, dtype in ((1, torch.bfloat16), (3, torch.float32))
    ]
    policies = (ZenFlow(topk_ratio=0.2, update_every=2, select_every=3), Speculative(), Delayed())
    recipes += [Recipe(stage=2, policy=policy) for policy in policies]
    recipes += [Recipe(stage=n, policy=Delayed(), place=DEVICE) for n in (1, 3)]
    recipes += [Recipe(stage=3, weights=WeightPlace.HOST, place=place) for place in UpdatePlace]
    _check(3, [(recipe, [EVERY[n % 5], EVERY[(n + 2) % 5]]) for n, recipe in enumerate(recipes)])


def test_loading_while_state_is_away_is_refused_and_changes_nothing(tmp_path):
    for said in ranks.run(2, moved_states.load_while_away, str(tmp_path), Run(stage=2)):
        (message,) = said
        assert message.startswith("load_checkpoint: "), message


def test_ranks_that_move_other_states_are_named_and_nothing_moves():
    for said in ranks.run(2, moved_states.other_states, Recipe(stage=2, place=DEVICE)):
        assert said
        for message in said:
            assert "for lp_params on rank 1 and for hp_params, optim_states on rank 0" in message
