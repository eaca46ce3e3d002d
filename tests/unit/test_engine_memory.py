"""Memory is accounted for: the forecast is the ledger, and what does not fit is refused at once."""

from __future__ import annotations

import functools
import gc
import mmap
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

import forebay
from forebay import BudgetError
from forebay.engine import fit, offload_with
from forebay.engine.options import SumPlace
from forebay.hardware.limits import host_ceiling
from forebay.model.layout import ITEM_BYTES
from forebay.plan import Accumulation, SixteenBitMaster, UpdatePlace, forecast
from forebay.plan.placement import Placement, WeightPlace
from forebay.plan.policies import Delayed
from forebay.plan.share import places_for_share
from forebay.tiers.ledger import Role, Tier
from forebay.units_of_measure import parse_bytes
from unit.engine_cases import CPU, FILES, adamw, mlp, offloaded, run, same, weights


def _ledger_bytes(optimizer) -> dict[tuple[str, str], int]:
    return {(r.tier.value, r.role.value): r.nbytes for r in optimizer.engine.ledger.table()}


def _wide(dtype: torch.dtype) -> nn.Sequential:
    """Parts of more than a page, not a multiple of one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 700), nn.Linear(700, 30), nn.LayerNorm(30)).to(dtype)


# bf16 alone has two layouts of its master.
PLANS = list(
    product(
        [
            (torch.float32, SixteenBitMaster.SPLIT),
            (torch.bfloat16, SixteenBitMaster.SPLIT),
            (torch.bfloat16, SixteenBitMaster.WHOLE),
            (torch.float16, SixteenBitMaster.SPLIT),
        ],
        list(UpdatePlace),
        [(1, SumPlace.HOST), (3, SumPlace.HOST), (3, SumPlace.DEVICE)],
    )
)


@pytest.mark.parametrize(("form", "update", "sums"), PLANS)
def test_forecast_is_the_ledger_to_the_byte(form, update, sums):
    (dtype, master), (backwards, place) = form, sums
    options = replace(CPU, update=update, bf16_master=master, backwards=backwards, sum_place=place)
    if update is UpdatePlace.NVME:
        options = replace(options, update=None, nvme=FILES)
    model = _wide(dtype)
    model[2].float()  # two parts in one model
    with offloaded(model, options) as optimizer:
        x = torch.ones(2, 4, dtype=dtype)
        for _ in range(2):
            for _ in range(backwards):
                hidden = model[1](model[0](x)).float()
                model[2](hidden).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        planned = forecast(optimizer.engine.placement, device_page_bytes=mmap.PAGESIZE)
        held = _ledger_bytes(optimizer)
        held.pop(("device", "staging"), None)  # visits come and go
        assert held == planned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delayed_updates_are_forecast_on_host_and_device(dtype):
    """State on the device has a whole master beside weights that are one update behind."""
    places = partial(places_for_share, share=0.5)
    half = replace(CPU, policy=Delayed(), places=places, unit_elements=1)
    for options in (half, replace(half, nvme=FILES)):
        with offloaded(_wide(dtype), options) as optimizer:
            planned = forecast(optimizer.engine.placement, device_page_bytes=mmap.PAGESIZE)
            assert planned["device", "hp_params"] > 0
            assert _ledger_bytes(optimizer) == planned


def test_learned_accumulation_ends_at_its_forecast():
    model = _wide(torch.bfloat16)
    with offloaded(model) as optimizer:
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, 4).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert optimizer.engine.placement.accumulation is Accumulation.HOST_SUM
        planned = forecast(optimizer.engine.placement, device_page_bytes=mmap.PAGESIZE)
        assert _ledger_bytes(optimizer) == planned


def test_unplanned_sums_keep_no_narrow_place():
    """The caller says one backward per update and makes two, every time."""
    model = _wide(torch.bfloat16)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        for _ in range(3):
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4).bfloat16()).sum())
            engine.step()
            engine.synchronize()
        engine.backward(engine(torch.ones(2, 4).bfloat16()).sum())
        assert engine.ledger.bytes(Tier.HOST, Role.LP_GRADS) == 0
        assert engine.ledger.bytes(Tier.HOST, Role.CONTIGUOUS_GRAD_BUFFER) > 0


@pytest.mark.parametrize(
    ("dtype", "backwards", "per_param"),
    [
        (torch.bfloat16, 1, 14),
        (torch.float16, 1, 14),
        (torch.bfloat16, 4, 16),
        (torch.float32, 1, 16),
    ],
)
def test_host_bytes_per_parameter(dtype, backwards, per_param):
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    model.to(dtype)
    elements = sum(p.numel() for p in model.parameters())
    with offloaded(model, replace(CPU, backwards=backwards)) as optimizer:
        ledger = optimizer.engine.ledger
        assert ledger.bytes(Tier.HOST) == per_param * elements
        assert ledger.bytes(Tier.DEVICE) == ITEM_BYTES[str(dtype).removeprefix("torch.")] * elements


def _untouched(model: nn.Module):
    return [(p.data_ptr(), p.dtype, p._version) for p in model.parameters()], weights(model)


def _assert_refused(model, options, match) -> BudgetError:
    where, values = _untouched(model)
    with pytest.raises(BudgetError, match=match) as caught:
        offload_with(model, adamw(model), options=options)
    assert _untouched(model)[0] == where
    assert same(weights(model), values)
    assert not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())
    assert "hint: " in str(caught.value)
    return caught.value


def _suggested(error: BudgetError) -> int:
    found = re.search(r"raise \S+ to (\S+?)(,|$)", error.hint)
    return parse_bytes(found.group(1))


@pytest.mark.parametrize("backwards", [1, 2])
def test_host_budget(backwards):
    model = _wide(torch.bfloat16)
    options = replace(CPU, backwards=backwards)
    with offloaded(_wide(torch.bfloat16), options) as optimizer:
        planned = forecast(optimizer.engine.placement, device_page_bytes=mmap.PAGESIZE)
    needed = sum(value for (tier, _), value in planned.items() if tier == "host")
    error = _assert_refused(model, replace(options, host_budget=needed - 1), "host_budget")
    assert str(needed) in str(error)
    assert str(needed - 1) in str(error)
    assert _suggested(error) >= needed
    with offloaded(model, replace(options, host_budget=needed)) as optimizer:
        run_once = torch.ones(2, 4).bfloat16()
        for _ in range(backwards):
            model(run_once).sum().backward()
        optimizer.step()
        optimizer.synchronize()


def test_nearest_setting_that_fits_is_named():
    model = _wide(torch.bfloat16)
    one = forecast(_placement(model, 1), device_page_bytes=mmap.PAGESIZE)
    host = sum(value for (tier, _), value in one.items() if tier == "host")
    error = _assert_refused(model, replace(CPU, backwards=4, host_budget=host), "host_budget")
    assert "gradient_accumulation_steps to 1" in error.hint


def _placement(model: nn.Module, backwards: int) -> Placement:
    twin = _wide(torch.bfloat16)
    with offloaded(twin, replace(CPU, backwards=backwards)) as optimizer:
        return optimizer.engine.placement


def test_device_budget():
    model = _wide(torch.float32)
    with offloaded(_wide(torch.float32)) as optimizer:
        needed = optimizer.engine.ledger.bytes(Tier.DEVICE)
    error = _assert_refused(model, replace(CPU, device_budget=needed - 1), "device_budget")
    assert _suggested(error) >= needed
    with offloaded(model, replace(CPU, device_budget=needed)) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "on_device", "on_host"),
    [
        (replace(CPU, update=UpdatePlace.DEVICE), "with offload_optimizer", None),
        (replace(CPU, update=UpdatePlace.HOST), "with stage 3 and offload_param", "device: none"),
        (replace(CPU, update=UpdatePlace.HOST, weights=WeightPlace.HOST, pool_bytes=0), None, None),
        (replace(CPU, update=UpdatePlace.HOST, policy=Delayed()), None, None),
    ],
    ids=["all on the device", "state on the host", "weights too", "delayed"],
)
def test_what_a_gpu_proposes_is_what_that_placement_takes(options, on_device, on_host):
    with offloaded(_wide(torch.bfloat16), options) as optimizer:
        placement = optimizer.engine.placement
    for tier, way in (("device", on_device), ("host", on_host)):
        short = replace(options, **{f"{tier}_budget": 1})
        if tier == "host" and options.update is UpdatePlace.DEVICE:
            continue  # nothing is there
        with pytest.raises(BudgetError, match=f"{tier}_budget is") as caught:
            fit.refuse_what_does_not_fit(placement, options=short, cpu=False)
        ways = ("with offload_optimizer", "with stage 3 and offload_param", "device: none")
        assert [w for w in ways if w in caught.value.hint] == ([way] if way else [])


def test_visits_stay_inside_the_device_budget():
    model = _wide(torch.float32)
    with offloaded(_wide(torch.float32)) as optimizer:
        weights_alone = optimizer.engine.ledger.bytes(Tier.DEVICE)
    room = 8 * 1024 * 8
    options = replace(
        CPU, update=UpdatePlace.STREAMED, unit_elements=1, device_budget=weights_alone + room
    )
    with offloaded(model, options) as optimizer:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = optimizer.engine.ledger.peak_bytes(Tier.DEVICE)
        assert weights_alone < peak <= weights_alone + room + 16 * mmap.PAGESIZE


@pytest.fixture
def group_of_64_kib(tmp_path, monkeypatch):
    """A control group of version 2 around this process, made of files."""
    folder = tmp_path / "sys" / "fs" / "cgroup" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{64 << 10}\n")
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "meminfo").write_text("MemAvailable: 100000000 kB\n")
    ceiling = functools.partial(host_ceiling, sys=tmp_path / "sys", proc=proc)
    monkeypatch.setattr(fit, "host_ceiling", ceiling)
    return folder / "memory.max"


@pytest.mark.parametrize("budget", [None, 1 << 40])
def test_control_group(group_of_64_kib, budget):
    """The kernel would kill without a message; a larger host_budget does not help."""
    model = _wide(torch.float32)
    error = _assert_refused(model, replace(CPU, host_budget=budget), "control group")
    assert str(64 << 10) in str(error)
    assert str(group_of_64_kib) in str(error)
    group_of_64_kib.write_text(str(_suggested(error)))
    with offloaded(model, replace(CPU, host_budget=budget)):
        pass


def test_available_memory_binds_only_without_a_budget(group_of_64_kib):
    group_of_64_kib.write_text("max\n")
    (group_of_64_kib.parents[4] / "proc" / "meminfo").write_text("MemAvailable: 64 kB\n")
    model = _wide(torch.float32)
    error = _assert_refused(model, CPU, "MemAvailable")
    assert "forebay.host_budget" in error.hint
    with offloaded(model, replace(CPU, host_budget=1 << 30)):
        pass


def test_initialize_touches_nothing_before_it_fits():
    """Not even the cast to the working dtype."""
    model = _wide(torch.float32)
    where, _ = _untouched(model)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "forebay": {"host_budget": "4KiB"},
    }
    with pytest.raises(BudgetError):
        forebay.initialize(model=model, config=config)
    assert _untouched(model)[0] == where
    del config["forebay"]
    model[2].requires_grad_(False)
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_failing_scheduler_gives_the_model_back():
    model = mlp()

    def _fail(_optimizer):
        raise ZeroDivisionError

    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with pytest.raises(ZeroDivisionError):
        forebay.initialize(model=model, lr_scheduler=_fail, config=config)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)


def test_closing_gives_everything_back_but_the_weights():
    model = _wide(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=CPU)[1]
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    ledger = optimizer.engine.ledger
    optimizer.close()
    gc.collect()
    rows = {(row.tier, row.role) for row in ledger.table()}
    assert rows == {(Tier.DEVICE, Role.LP_PARAMS)}
    del model, optimizer
    gc.collect()
    assert not ledger.table()
