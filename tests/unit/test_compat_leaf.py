"""Leaf modules: their parameters lie in one unit, whatever else forms units."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError, UnsupportedError
from forebay.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


class Experts(nn.Module):
    """Chooses by data: only one of its linears runs in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.items[int(x.sum() > 0)](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = Experts()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.experts(self.first(x)))


def _units(model: nn.Module, **zero: object) -> list[list[str]]:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **zero}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = forebay.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        return [[record.label for record in unit.records] for unit in engine.core.units]


def _holds_whole(units: list[list[str]]) -> bool:
    return any(sum(name.startswith("experts.") for name in unit) == 6 for unit in units)


@pytest.mark.parametrize("zero", [{}, {"sub_group_size": 1}, {"sub_group_size": 30}])
def test_a_leaf_module_is_one_unit(zero):
    assert not _holds_whole(_units(Model(), **zero))
    model = Model()
    assert set_z3_leaf_modules(model, [Experts]) == [model.experts]
    units = _units(model, **zero)
    assert _holds_whole(units)
    assert sum(len(unit) for unit in units) == 10


@pytest.mark.parametrize(
    "leaf",
    [
        {"classes": ["Experts"]},
        {"classes": [f"{__name__}.Experts"], "names": "auto"},
        {"names": ["experts"]},
        {"name_suffixes": ["xperts", "perts"]},
    ],
)
def test_the_configuration_names_leaves_too(leaf):
    model = Model()
    assert _holds_whole(_units(model, sub_group_size=1, leaf_module=leaf))
    assert get_z3_leaf_modules(model) == []  # nothing stays for the next configuration
    assert not _holds_whole(_units(model, sub_group_size=1, leaf_module={}))


def test_a_leaf_that_the_model_has_not_is_warned_of(caplog):
    assert not _holds_whole(_units(Model(), leaf_module={"classes": ["Expert"], "names": ["a"]}))
    assert "zero_optimization.leaf_module.classes names Expert" in caplog.text
    assert "zero_optimization.leaf_module.names names a, and no module" in caplog.text


def test_offload_reads_the_marks_too():
    model = Model()
    set_z3_leaf_modules(model, [Experts])
    model, optimizer = forebay.offload(model, torch.optim.AdamW(model.parameters()))
    names = [[record.label for record in unit.records] for unit in optimizer.engine.units]
    optimizer.close()
    assert _holds_whole(names)


def test_an_outer_mark_wins():
    model = Model()
    set_z3_leaf_modules(model, [nn.Linear, Experts])
    assert _holds_whole(_units(model, sub_group_size=1))
    whole = Model()
    set_z3_leaf_module(whole)
    assert _units(whole) == [[name for name, _ in whole.named_parameters()]]


def test_training_with_a_leaf_gives_the_same_bits():
    def run(leaf: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        if leaf:
            set_z3_leaf_modules(model, ["Experts"])
        engine, *_ = forebay.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            config={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        )
        for step in range(6):
            x = torch.full((2, 4), 1.0 if step % 2 else -1.0, device=engine.device)
            engine.backward((engine(x) - 1.0).square().mean())
            engine.step()
        engine.close()
        return [param.detach().clone() for param in model.parameters()]

    for plain, leaf in zip(run(leaf=False), run(leaf=True), strict=True):
        assert torch.equal(plain, leaf)


def test_names_and_suffixes():
    model = Model()
    assert set_z3_leaf_modules_by_name(model, ["experts.items"]) == ([model.experts.items], [])
    assert get_z3_leaf_modules(model) == [model.experts.items]
    found, missing = set_z3_leaf_modules_by_suffix(
        model, [".items", "none"], flag=False, raise_if_not_found=False
    )
    assert (found, missing) == ([model.experts.items], ["none"])
    assert get_z3_leaf_modules(model) == []
    qualified = f"{Experts.__module__}.Experts"
    assert set_z3_leaf_modules(model, [qualified]) == [model.experts]
    assert unset_z3_leaf_modules(model, [Experts]) == [model.experts]
    assert not z3_leaf_module(model.experts)


def test_a_mark_goes_with_copies_and_hangs_nothing_on_parameters():
    model = Model()
    before = [set(vars(param)) for param in model.parameters()]
    set_z3_leaf_modules(model, [Experts])
    set_z3_leaf_modules(model, [Experts])  # once is enough
    assert [set(vars(param)) for param in model.parameters()] == before
    assert len(model.experts._load_state_dict_post_hooks) == 1
    assert z3_leaf_module(copy.deepcopy(model).experts)
    linear = nn.Linear(2, 2)
    set_z3_leaf_module(linear)
    assert z3_leaf_module(pickle.loads(pickle.dumps(linear)))
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: set_z3_leaf_modules(m, [nn.Conv1d]), "no module of class Conv1d"),
        (lambda m: set_z3_leaf_modules(m, []), "no module of class (no class)"),
        (lambda m: set_z3_leaf_modules(m, [3]), "a class or its name, not int"),
        (lambda m: set_z3_leaf_modules_by_name(m, ["x.y"]), "no module named x.y"),
    ],
)
def test_what_is_not_there(call, message):
    with pytest.raises(ConfigError) as caught:
        call(Model())
    assert message in str(caught.value)


def test_too_late():
    model = Model()
    engine, *_ = forebay.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config={}
    )
    with engine, pytest.raises(UnsupportedError, match="trained already"):
        set_z3_leaf_modules(model, [Experts])
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, [Experts]) == [model.experts]
