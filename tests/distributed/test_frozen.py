"""Frozen weights in stage 3 are spread over ranks as trained ones are, and no bit changes."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from distributed import adapters, ranks


def test_they_are_spread_and_train_the_same_adapters():
    by_rank = ranks.run(3, adapters.train_everywhere)
    for whole, spread, away in by_rank:
        for other in (spread, away):
            assert other["losses"] == whole["losses"]
            assert other["is_copied"]  # copy.deepcopy, trained and frozen
            assert other["weights"] == whole["weights"] == by_rank[0][0]["weights"]
        # what rank 1 wrote, on all of them
        assert abs(spread["written"] - 0.01) < 1e-4
        assert spread["written"] == away["written"]
    _, spread, away = by_rank[0]
    frozen, blocks, page = away["frozen"], 6, 4096
    assert frozen > 10 * blocks * page
    # slices of parameters, padded, and a pool of two blocks where they are used
    block = 2 * (adapters.WIDTH * adapters.WIDTH + adapters.WIDTH) + 4096
    assert away["held"]["device"] <= 3 * block
    assert frozen / 3 <= away["held"]["host"] <= frozen / 3 + 2 * blocks * 2 * page
    assert spread["held"]["device"] < frozen / 3 + 3 * block + 4 * blocks * page
    assert spread["held"]["host"] == 0


def test_checkpoints_hold_their_slices(tmp_path):
    assert ranks.run(3, adapters.save_and_go_on, str(tmp_path)) == [[True] * 3] * 3
    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["3.base.weight"], torch.full((400, 400), 0.5, dtype=torch.bfloat16))
    assert not any(value.isnan().any() for value in found.values())


def test_every_copy_takes_over_what_one_rank_wrote():
    assert ranks.run(4, adapters.write_in_copies) == [2.5] * 4
