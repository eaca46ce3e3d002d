"""Runs on several ranks whose state leaves the device in between; see test_moved_states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed

from distributed.saved_runs import Run, engine_of, go_on
from distributed.training import Recipe, begin, digest, join, loss_of, windows
from forebay.comm.fake import SlowGroup
from forebay.comm.torch_group import TorchGroup
from forebay.engine import Engine
from forebay.engine.state_moves import MOVABLE, HostPages
from forebay.errors import BudgetError, RankError, StateAwayError
from forebay.tiers.ledger import Role, Tier

STATE = (Role.OPTIM_STATES, Role.HP_PARAMS)


@dataclass(frozen=True)
class Moves:
    """When state leaves and comes back: after each step, and after each backward.

    Attributes:
        between: What leaves after a step; the model then generates if its weights are here.
        inside: What leaves after a backward.
    """

    between: Sequence[Role] = ()
    inside: Sequence[Role] = ()


def _on_device(engine: Engine) -> dict[Role, int]:
    return {role: engine.ledger.bytes(Tier.DEVICE, role) for role in MOVABLE}


def _round_trip(engine: Engine, roles: Sequence[Role], use: Callable[[], object]) -> None:
    before = _on_device(engine)
    gone = engine.moves.offload(roles, pages=HostPages.LOCKED)
    stays = {Role.LP_PARAMS: engine.placement.pool_bytes}  # room for copies, and none is there
    left = _on_device(engine)
    assert all(left[role] == stays.get(role, 0) for role in roles), (left, roles)
    use()
    assert engine.moves.reload() == gone
    assert _on_device(engine) == before


def _run(recipe: Recipe, moves: Moves) -> dict[str, Any]:
    # slow: weights and sums are on their way when state is to leave
    model, optimizer = begin(recipe, SlowGroup(TorchGroup(), seconds=recipe.slow_seconds))
    engine, losses, said, host = optimizer.engine, [], [], []
    x = windows(recipe, rank=distributed.get_rank())[0][0]

    def generate() -> None:
        with torch.no_grad():
            said.append(digest([model(x)]))

    def refused() -> None:
        for use in (lambda: model(x), optimizer.step, model.state_dict):
            with suppress(StateAwayError):
                use()
                raise AssertionError("state is away")

    def in_between() -> None:
        refused() if Role.LP_PARAMS in engine._barrier.away else generate()

    for window in windows(recipe, rank=distributed.get_rank()):
        for micro in window:
            loss = loss_of(model, micro, recipe)
            loss.backward()
            losses.append(loss.item())
            if moves.inside:
                _round_trip(engine, moves.inside, lambda: None)
        optimizer.step()
        optimizer.zero_grad()
        if moves.between:
            _round_trip(engine, moves.between, in_between)
            host.append(engine.ledger.bytes(Tier.HOST))
        if len(said) < len(losses) // recipe.micro:
            generate()
    assert len(set(host)) <= 1  # the second cycle needs no more than the first
    optimizer.synchronize()
    states = [t for entry in optimizer.state.values() for t in entry.values()]
    found = {
        "losses": losses,
        "said": said,
        "weights": digest(list(model.state_dict().values())),
        "states": digest(states),
    }
    optimizer.close()
    return found


def runs(jobs: list[tuple[Recipe, list[Moves]]]) -> list[list[dict[str, Any]]]:
    """Each recipe as it is, then with each of the moves."""
    join()
    return [[_run(recipe, moves) for moves in (Moves(), *every)] for recipe, every in jobs]


def load_while_away(folder: str, run: Run) -> list[str]:
    """A checkpoint is loaded while state is away: what it says; then it is loaded and used."""
    said = []
    with engine_of(run) as engine:
        go_on(engine, 0, 2)
        engine.save_checkpoint(folder)
        engine.offload_states()
        try:
            engine.load_checkpoint(folder)
        except StateAwayError as error:
            said.append(error.message)
        engine.reload_states()
        engine.load_checkpoint(folder)
        go_on(engine, 2, 4)
    return said


def other_states(recipe: Recipe) -> list[str]:
    """Rank 1 asks for other states than the others: what all say; nothing has moved."""
    join()
    model, optimizer = begin(recipe, TorchGroup())
    engine, said = optimizer.engine, []
    mine = (Role.LP_PARAMS,) if distributed.get_rank() == 1 else STATE
    for window in windows(recipe, rank=distributed.get_rank()):
        try:
            engine.moves.offload(mine, pages=HostPages.LOCKED)
        except RankError as error:
            said.append(error.message)
        loss_of(model, window[0], recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return said


def one_without_room(recipe: Recipe) -> list[str]:
    """One rank's host has no room: what all say; nothing has moved, and training goes on."""
    join()
    budget = 1 << 14 if distributed.get_rank() == 1 else None
    model, optimizer = begin(replace(recipe, host_budget=budget), TorchGroup())
    engine, said = optimizer.engine, []
    before = [engine.ledger.bytes(tier) for tier in Tier]
    for window in windows(recipe, rank=distributed.get_rank()):
        try:
            engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
        except BudgetError as error:
            said.append(error.message)
        assert [engine.ledger.bytes(tier) for tier in Tier] == before
        loss_of(model, window[0], recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return said
