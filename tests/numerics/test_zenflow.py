"""ZenFlow against its definition in plain PyTorch, to the bit, however bytes move."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import SumPlace, Timing
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace
from forebay.plan.zenflow import ZenFlow
from numerics.test_exactness import DEVICES
from numerics.training import CLIP, Recipe, assert_same_bits, reference, train
from numerics.zenflow_oracle import oracle, with_settings

pytestmark = pytest.mark.usefixtures("deterministic")

PLAIN = ZenFlow(topk_ratio=0.2, update_every=3, select_every=6)
MODES = {
    "plain": PLAIN,
    "overlap": replace(PLAIN, overlaps=True),
    # choices in the middle of an interval
    "odd": replace(PLAIN, select_every=7, warm_up_steps=2),
    "odd_overlap": replace(PLAIN, select_every=7, warm_up_steps=2, overlaps=True),
    "every_step": replace(PLAIN, update_every=1, select_every=1),
    "chosen_once": replace(PLAIN, select_every=None, overlaps=True),
    "auto": replace(PLAIN, update_every=None, auto_ratio=0.6),
    "auto_overlap": replace(PLAIN, update_every=None, auto_ratio=0.6, overlaps=True),
    "on_host": replace(PLAIN, keeps_state_on_host=True, overlaps=True, select_every=7),
}
LAYOUTS = {
    "by_module": EngineOptions(),
    "one_unit": EngineOptions(unit_elements=1 << 30),
    "a_unit_per_parameter": EngineOptions(unit_elements=1, piece_elements=17),
    "whole_masters": EngineOptions(bf16_master=SixteenBitMaster.WHOLE, piece_elements=64),
    "synchronous": EngineOptions(timing=Timing.SYNCHRONOUS),
    "five_threads": EngineOptions(threads=5, piece_elements=100),
}
# The odd one with overlap has all that the others have.
_QUICK = {"plain", "odd_overlap", "auto", "on_host"}
MODE_NAMES = [
    pytest.param(mode, marks=[] if mode in _QUICK else [pytest.mark.slow]) for mode in MODES
]


@functools.cache
def _oracle(recipe, settings):
    return oracle(recipe, settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_same_bits_as_the_oracle(mode, dtype, device):
    recipe = Recipe(dtype=dtype, device=device)
    expected = _oracle(recipe, MODES[mode])
    assert any(norm > CLIP for norm in expected.norms)
    assert any(norm < CLIP for norm in expected.norms)
    assert_same_bits(expected, train(with_settings(recipe, MODES[mode])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["plain", "odd_overlap"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_pieces_threads_and_masters_change_no_bit(layout, mode, device):
    recipe = Recipe(dtype=torch.bfloat16, device=device, options=LAYOUTS[layout])
    plain = replace(recipe, options=EngineOptions())
    assert_same_bits(_oracle(plain, MODES[mode]), train(with_settings(recipe, MODES[mode])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["plain", "odd_overlap"])
@pytest.mark.parametrize("sums", ["learned", "given"])
def test_several_backwards_per_update(sums, mode, device):
    recipe = Recipe(dtype=torch.bfloat16, micro=4, device=device)
    options = {} if sums == "learned" else {"backwards": 4, "sum_place": SumPlace.HOST}
    run = train(with_settings(recipe, MODES[mode], **options))
    assert_same_bits(_oracle(recipe, MODES[mode]), run)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["plain", "odd_overlap"])
@pytest.mark.parametrize("master", SixteenBitMaster)
def test_delayed_and_reordered_copies(master, mode, seed, device):
    recipe = Recipe(dtype=torch.bfloat16, micro=2, device=device)
    fault = FaultScript(seed=seed, max_delay_us=1500)
    options = {"fault": fault, "piece_elements": 50, "unit_elements": 200, "bf16_master": master}
    assert_same_bits(
        _oracle(recipe, MODES[mode]), train(with_settings(recipe, MODES[mode], **options))
    )


@pytest.mark.parametrize("device", DEVICES)
def test_warm_up_is_the_exact_mode(device):
    recipe = Recipe(dtype=torch.bfloat16, device=device)
    settings = replace(PLAIN, warm_up_steps=20)
    assert_same_bits(reference(recipe), train(with_settings(recipe, settings)))
    one_less = train(with_settings(recipe, replace(PLAIN, warm_up_steps=19)))
    assert one_less.losses == reference(recipe).losses
    assert one_less.weights["0.weight"].ne(reference(recipe).weights["0.weight"]).any()


def test_units_on_the_device_update_in_every_step():
    everywhere = Recipe(dtype=torch.bfloat16, options=EngineOptions(update=UpdatePlace.DEVICE))
    on_device = train(with_settings(everywhere, PLAIN))
    assert_same_bits(reference(Recipe(dtype=torch.bfloat16)), on_device)


class _Branches(nn.Module):
    """An embedding, a convolution, a 0-dim weight, and a branch that every third step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 13)
        self.conv = nn.Conv1d(1, 4, 3)
        self.branch = nn.Linear(13, 13)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(44, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        tokens = (x[:, 0].float() * 100).long().abs() % 300
        x = x + self.embedding(tokens) * self.scale
        if self.calls % 3 == 0:
            x = x + self.branch(x)
        return self.last(torch.tanh(self.conv(x[:, None])).flatten(1))


def _branches(dtype):
    torch.manual_seed(0)
    return _Branches().to(dtype)


@pytest.mark.parametrize("mode", ["plain", "odd_overlap", "auto"])
def test_branches_that_some_steps_take(mode):
    """Such a parameter chooses by its first gradient after a choice is due."""
    recipe = Recipe(dtype=torch.bfloat16, steps=25)
    expected = oracle(recipe, MODES[mode], _branches)
    assert len(set(expected.steps)) > 1
    assert_same_bits(expected, train(with_settings(recipe, MODES[mode]), _branches))


@pytest.mark.parametrize("mode", ["plain", "odd_overlap"])
@pytest.mark.parametrize("master", SixteenBitMaster)
def test_readers_of_state_between_steps_change_nothing(master, mode):
    """They send columns' state home, of parameters too that the next step leaves out."""
    recipe = Recipe(dtype=torch.bfloat16, steps=25)
    expected = oracle(recipe, MODES[mode], _branches)
    chosen = with_settings(recipe, MODES[mode], bf16_master=master)
    assert_same_bits(expected, train(chosen, _branches, after=lambda optimizer: optimizer.state))


def _linear(master):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = replace(PLAIN, topk_ratio=0.25, select_every=None, overlaps=True)
    options = EngineOptions(policy=settings, device="cpu", bf16_master=master)
    return offload_with(model, source, options=options)


@pytest.mark.parametrize("master", SixteenBitMaster)
@pytest.mark.parametrize("when", [2, 4, 5])
def test_a_weight_that_the_user_wrote_is_the_weight(when, master):
    """Whatever ran for it before: no column keeps an older master, no update brings one back."""
    model, optimizer = _linear(master)
    for _ in range(when):
        model(torch.randn(6, 8, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(torch.randn(6, 8, dtype=torch.bfloat16)).square().sum().backward()
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer.step()
    for _ in range(7):
        optimizer.zero_grad()
        assert model.weight.eq(0.5).all() or model.weight.isnan().all()
        model(torch.randn(6, 8, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    assert model.weight.eq(0.5).all()
