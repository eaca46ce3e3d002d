"""Weights in files change no bit: any size, any buffers, in evaluation, through checkpoints."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions, WeightBuffers
from forebay.engine.options import Timing
from forebay.links import FaultScript
from forebay.links.fake import FileFaultScript
from forebay.links.host_nvme import FileAccess, FileBackendKind
from forebay.plan import Lane, WeightPlace
from forebay.tiers.ledger import Role, Tier
from numerics.test_nvme import BLOCK, Skipping, Ugly, _reference
from numerics.training import Recipe, assert_same_bits, train
from unit.engine_cases import batches, loss_of

pytestmark = pytest.mark.usefixtures("deterministic")

BUFFERS = {
    "default": WeightBuffers(),
    "one": WeightBuffers(count=1, elements=1),
    "two_small": WeightBuffers(count=2, elements=BLOCK),
    "larger_than_state_s": WeightBuffers(count=3, elements=5 * BLOCK),
    "many": WeightBuffers(count=40, elements=BLOCK),
    "half_in_memory": WeightBuffers(count=2, elements=BLOCK, in_memory_elements=4 * BLOCK),
    "all_in_memory": WeightBuffers(in_memory_elements=1 << 30),
}
ACCESS = {
    "as_it_comes": FileAccess(),
    "late_threads": FileAccess(
        block_bytes=1 << 18,
        parallelism=3,
        backend=FileBackendKind.THREADS,
        fault=FileFaultScript(seed=2, max_delay_us=300, short_at=3),
    ),
    "one_sector_at_a_time": FileAccess(block_bytes=4096, queue_depth=1),
}
# The largest unit of `Ugly` takes 1.9 MB in 16 bits; each pass brings everything up anew.
ENGINES = {
    "blocks": EngineOptions(pool_bytes=1),
    "a_unit_per_parameter": EngineOptions(unit_elements=1, pool_bytes=1),
    "all_stay_between_passes": EngineOptions(),
    "synchronous": EngineOptions(timing=Timing.SYNCHRONOUS, pool_bytes=1),
    "late_links": EngineOptions(
        fault=FaultScript(seed=3, max_delay_us=500), unit_elements=500, pool_bytes=1
    ),
}


def _in_files(tmp_path, engine="blocks", buffers="two_small", access="as_it_comes"):
    nvme = NvmeOptions(
        paths=(tmp_path,),
        buffer_count=2,
        buffer_elements=2 * BLOCK,
        access=ACCESS[access],
        weights=BUFFERS[buffers],
    )
    return replace(ENGINES[engine], weights=WeightPlace.NVME, nvme=nvme)


CASES = [
    *(("blocks", buffers, "as_it_comes") for buffers in BUFFERS),
    *((engine, "two_small", "as_it_comes") for engine in ENGINES if engine != "blocks"),
    *(("blocks", "one", access) for access in ACCESS if access != "as_it_comes"),
]


@pytest.mark.parametrize(("engine", "buffers", "access"), CASES)
def test_weights_in_files_change_no_bit(engine, buffers, access, tmp_path):
    recipe = Recipe(dtype=torch.bfloat16, steps=4)
    found = train(replace(recipe, options=_in_files(tmp_path, engine, buffers, access)), build=Ugly)
    assert_same_bits(_reference(recipe), found)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["no_clip", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine(engine, buffers, dtype, clip, micro, tmp_path):
    recipe = Recipe(dtype=dtype, clip=clip, micro=micro, steps=8)
    options = _in_files(tmp_path, engine, buffers)
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options), build=Ugly))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype, tmp_path):
    recipe = Recipe(dtype=dtype, steps=4, micro=2)
    found = train(replace(recipe, options=_in_files(tmp_path)), build=Ugly)
    assert_same_bits(_reference(recipe), found)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("engine", "buffers", "access"), CASES)
def test_weights_in_files_change_no_bit_on_a_gpu(engine, buffers, access, dtype, tmp_path):
    recipe = Recipe(dtype=dtype, steps=6, micro=2, device="cuda")
    options = _in_files(tmp_path, engine, buffers, access)
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options), build=Ugly))


def _taken(model, options):
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return offload_with(model, source, options=replace(options, device="cpu"))[1]


def _steps(model, optimizer, xs):
    for x in xs:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def _data(count, dtype=torch.bfloat16):
    return [x.to(dtype) for x in batches(count, torch.float32, features=13)]


def test_bytes_are_in_files_and_counted_as_the_plan_has_them(tmp_path):
    model = Ugly(torch.bfloat16)
    optimizer = _taken(model, _in_files(tmp_path))
    engine, seen = optimizer.engine, []
    held = sum(part.elements for unit in engine.units for part in unit.parts)
    assert engine.ledger.bytes(Tier.NVME, Role.LP_PARAMS) >= 2 * held
    assert engine.ledger.bytes(Tier.HOST, Role.LP_PARAMS) == 0
    for x in _data(4):
        _steps(model, optimizer, [x])
        optimizer.synchronize()
        seen.append(engine.traffic)
    for lane in (Lane.READ, Lane.WRITE, Lane.UP):
        deltas = {b[lane] - a[lane] for a, b in itertools.pairwise(seen[1:])}
        assert deltas == {engine.current_program().traffic(lane)}
    optimizer.close()


def test_as_many_as_asked_stay_in_memory(tmp_path):
    model = Ugly(torch.bfloat16)
    optimizer = _taken(model, _in_files(tmp_path, "a_unit_per_parameter", "half_in_memory"))
    places = {unit.placement.weights for unit in optimizer.engine.units}
    assert places == {WeightPlace.HOST, WeightPlace.NVME}
    kept = sum(
        part.elements
        for unit in optimizer.engine.units
        if unit.placement.weights is WeightPlace.HOST
        for part in unit.parts
    )
    assert 0 < kept <= 4 * BLOCK
    optimizer.close()


def _assert_same_in_files(build, in_files, inputs):
    """Training gives the bits of state in memory; one unit and one piece hold all layers."""
    found = []
    for options in (EngineOptions(), in_files):
        model = build().to(inputs[0].dtype)
        optimizer = _taken(model, replace(options, unit_elements=1 << 20))
        _steps(model, optimizer, inputs)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_layer_without_a_gradient_keeps_its_weights(tmp_path):
    """Its part of a piece is not new, and what lies beside it is."""
    _assert_same_in_files(Skipping, _in_files(tmp_path), batches(9, features=16))


def test_layers_without_a_gradient_in_16_bits(tmp_path):
    inputs = [x.to(torch.bfloat16) for x in batches(9, features=16)]
    _assert_same_in_files(Skipping, _in_files(tmp_path), inputs)


class _ShortLast(nn.Module):
    """A long weight, and behind it, in the last and shorter piece, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(16, 20_000, bias=False)
        self.unused = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x))


@pytest.mark.parametrize("count", [1, 2])
def test_old_weights_come_into_a_buffer_once_the_piece_before_has_left_it(count, tmp_path):
    """They come behind a shorter record, where the one before still has its state."""
    options = _in_files(tmp_path, access="late_threads")
    nvme = replace(options.nvme, buffer_count=count, buffer_elements=BLOCK)
    inputs = [x.to(torch.bfloat16) for x in batches(4, features=16)]
    _assert_same_in_files(_ShortLast, replace(options, nvme=nvme), inputs)


def _pair(tmp_path, engine="blocks"):
    """(model, optimizer) on the device, and in files."""
    models = [Ugly(torch.bfloat16) for _ in range(2)]
    chosen = (EngineOptions(), _in_files(tmp_path, engine))
    return [(model, _taken(model, options)) for model, options in zip(models, chosen, strict=True)]


def test_evaluation_between_steps(tmp_path):
    outputs = []
    for model, optimizer in _pair(tmp_path):
        found = []
        for x in _data(3):
            _steps(model, optimizer, [x])
            model.eval()
            with torch.no_grad():
                found += [model(x), model(x + 1)]
            model.train()
        outputs.append(found)
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_what_a_user_writes_is_kept(tmp_path):
    """Through the device's copy, through `p.data`, through a state dict."""
    states = []
    for model, optimizer in _pair(tmp_path):
        first, second, third = _data(3)
        _steps(model, optimizer, [first])
        optimizer.synchronize()
        with torch.no_grad():
            model.net[0].weight.mul_(0.5)
        model.net[2].weight.data = torch.full_like(model.net[2].weight, 0.25)
        _steps(model, optimizer, [second])
        state = {name: value * 0.9 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        _steps(model, optimizer, [third])
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_copy_and_a_closed_model_have_the_weights(tmp_path):
    values = []
    for model, optimizer in _pair(tmp_path):
        _steps(model, optimizer, _data(2))
        twin = copy.deepcopy(model)
        optimizer.close()
        values += [[p.detach().clone() for p in one.parameters()] for one in (twin, model)]
    for other in values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values[0], other, strict=True))


class Turning(torch.nn.Module):
    """Its layers run forwards and backwards by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(5))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The other way round each time."""
        self.turn += 1
        for layer in list(self.layers)[:: 1 if self.turn % 2 else -1]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("engine", ["blocks", "late_links"])
def test_the_order_of_modules_may_change(engine, tmp_path):
    found = []
    for options in (EngineOptions(), _in_files(tmp_path, engine, access="late_threads")):
        model = Turning()
        optimizer = _taken(model, replace(options, unit_elements=1))
        _steps(model, optimizer, batches(6, features=16))
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
