"""State in files changes no bit: any tensor size, any buffers, both backends, all of it late."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.engine.options import SumPlace, Timing
from forebay.links import FaultScript
from forebay.links.fake import FileFaultScript
from forebay.links.host_nvme import FileAccess, FileBackendKind
from forebay.plan import Lane, UpdatePlace, WeightPlace
from forebay.tiers.ledger import Tier
from numerics.training import Recipe, assert_same_bits, reference, small_model, train
from unit.engine_cases import batches, loss_of

pytestmark = pytest.mark.usefixtures("deterministic")

BLOCK = 64 * 1024
# Around a sector of fp32, around a checksum's block, and what has no size at all.
SMALL = [(), (0,), (1,), (3, 0), (1023,), (1024,), (1025,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,)]
SIZES = [*SMALL, (7 * BLOCK + 3,)]


class Ugly(nn.Module):
    """The small model, and one parameter of every size."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = small_model(dtype)
        generator = torch.Generator().manual_seed(3)
        self.more = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each parameter's own gradient, of its own size."""
        out = self.net(x)
        for index, param in enumerate(self.more):
            out = out + torch.tanh(param * (index + 1)).sum() * x.mean() * 1e-3
        return out


@functools.cache
def _reference(recipe: Recipe):
    return reference(recipe, build=Ugly)


ACCESS = {
    "as_it_comes": FileAccess(),
    "threads": FileAccess(backend=FileBackendKind.THREADS),
    "one_sector_at_a_time": FileAccess(block_bytes=4096, queue_depth=1),
    "single_and_in_turns": FileAccess(block_bytes=8192, single_submit=True, overlap_events=False),
    "late_and_short": FileAccess(
        block_bytes=65536, fault=FileFaultScript(seed=1, max_delay_us=300, short_at=7)
    ),
    "late_threads": FileAccess(
        block_bytes=1 << 18,
        parallelism=3,
        backend=FileBackendKind.THREADS,
        fault=FileFaultScript(seed=2, max_delay_us=300, short_at=3),
    ),
}
BUFFERS = {
    "default": NvmeOptions(paths=()),
    "one": NvmeOptions(paths=(), buffer_count=1, buffer_elements=1),
    "two_small": NvmeOptions(paths=(), buffer_count=2, buffer_elements=BLOCK),
    "odd": NvmeOptions(paths=(), buffer_count=3, buffer_elements=2 * BLOCK + 12345),
    "some_held": NvmeOptions(paths=(), buffer_count=9, buffer_elements=BLOCK),
    "many": NvmeOptions(paths=(), buffer_count=40, buffer_elements=BLOCK),
    "in_turns": NvmeOptions(
        paths=(), buffer_count=2, buffer_elements=BLOCK, reads_ahead=False, writes_behind=False
    ),
    "reads_in_turns": NvmeOptions(paths=(), buffer_elements=BLOCK, reads_ahead=False),
}
ENGINES = {
    "blocks": EngineOptions(),
    "one_unit": EngineOptions(unit_elements=1 << 30),
    "a_unit_per_parameter": EngineOptions(unit_elements=1),
    "synchronous": EngineOptions(timing=Timing.SYNCHRONOUS),
    "late_links": EngineOptions(fault=FaultScript(seed=3, max_delay_us=500), unit_elements=500),
    "some_in_memory": EngineOptions(host_budget=8 << 20, unit_elements=1),
    "weights_on_the_host": EngineOptions(weights=WeightPlace.HOST),
    "weights_in_files": EngineOptions(weights=WeightPlace.NVME),
}


def _in_files(tmp_path, engine="blocks", buffers="default", access="as_it_comes", paths=1):
    folders = tuple(tmp_path / str(index) for index in range(paths))
    for folder in folders:
        folder.mkdir(exist_ok=True)
    nvme = replace(BUFFERS[buffers], paths=folders, access=ACCESS[access])
    return replace(ENGINES[engine], nvme=nvme)


def _check(recipe, options):
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options), build=Ugly))


CASES = [
    *((engine, "two_small", "as_it_comes") for engine in ENGINES),
    *(("blocks", buffers, "as_it_comes") for buffers in BUFFERS),
    *(("blocks", "two_small", access) for access in ACCESS),
]


@pytest.mark.parametrize(("engine", "buffers", "access"), CASES)
def test_files_change_no_bit(engine, buffers, access, tmp_path):
    recipe = Recipe(dtype=torch.bfloat16, steps=5)
    _check(recipe, _in_files(tmp_path, engine, buffers, access))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("engine", "buffers"),
    [("blocks", "two_small"), ("blocks", "in_turns"), ("weights_on_the_host", "two_small")],
)
def test_other_dtypes(engine, buffers, dtype, tmp_path):
    _check(Recipe(dtype=dtype, steps=5), _in_files(tmp_path, engine, buffers))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("engine", "buffers", "access"), CASES)
def test_files_change_no_bit_on_a_gpu(engine, buffers, access, dtype, micro, tmp_path):
    if engine == "some_in_memory" and micro > 1:
        pytest.skip("its budget is for one backward")
    options = _in_files(tmp_path, engine, buffers, access)
    if engine == "some_in_memory" and dtype is torch.float32:  # its gradients are wider
        options = replace(options, host_budget=9_500_000)
    _check(Recipe(dtype=dtype, steps=6, micro=micro, device="cuda"), options)


@pytest.mark.parametrize("sums", ["learned", "host", "device"])
def test_several_backwards_per_update(sums, tmp_path):
    options = _in_files(tmp_path, "blocks", "two_small", paths=3)
    if sums != "learned":
        options = replace(options, backwards=3, sum_place=SumPlace(sums))
    _check(Recipe(dtype=torch.bfloat16, micro=3, steps=4), options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_every_access_with_every_buffers(buffers, access, dtype, tmp_path):
    _check(Recipe(dtype=dtype), _in_files(tmp_path, "blocks", buffers, access, paths=2))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["no_clip", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_with_every_buffers(engine, buffers, dtype, clip, micro, tmp_path):
    if engine == "some_in_memory" and buffers not in {"one", "two_small", "in_turns"}:
        pytest.skip("its budget has no room for more buffers")
    options = _in_files(tmp_path, engine, buffers)
    if engine == "some_in_memory" and micro > 1:  # fp32 sums, and what they pass through
        options = replace(options, host_budget=13_000_000, backwards=micro)
    elif engine == "some_in_memory" and dtype is torch.float32:  # its gradients are wider
        options = replace(options, host_budget=9_500_000)
    _check(Recipe(dtype=dtype, clip=clip, micro=micro), options)


def test_some_units_are_in_memory_and_some_in_files(tmp_path):
    """Else `some_in_memory` above would show nothing."""
    options = replace(_in_files(tmp_path, "some_in_memory", "two_small"), device="cpu")
    model = Ugly(torch.bfloat16)
    source = torch.optim.AdamW(model.parameters())
    _, optimizer = offload_with(model, source, options=options)
    places = {unit.placement.update for unit in optimizer.engine.units}
    assert places == {UpdatePlace.HOST, UpdatePlace.NVME}
    assert optimizer.engine.ledger.bytes(Tier.HOST) <= 8 << 20
    optimizer.close()


@pytest.mark.parametrize("reads_ahead", [True, False])
@pytest.mark.parametrize("count", [1, 7, 9, 13, 14])
def test_counted_bytes_are_the_plan_s(count, reads_ahead, tmp_path):
    nvme = NvmeOptions(
        paths=(tmp_path,), buffer_count=count, buffer_elements=BLOCK, reads_ahead=reads_ahead
    )
    model = Ugly(torch.float32)
    _, optimizer = offload_with(
        model, torch.optim.AdamW(model.parameters()), options=EngineOptions(device="cpu", nvme=nvme)
    )
    engine, seen = optimizer.engine, []
    for x in batches(4, torch.float32, features=13):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        seen.append(engine.traffic)
    pieces = sum(len(p.files.records) for unit in engine.units for p in unit.parts if p.files)
    assert pieces == 14
    for lane in (Lane.READ, Lane.WRITE):
        deltas = {b[lane] - a[lane] for a, b in itertools.pairwise(seen[1:])}
        assert deltas == {engine.current_program().traffic(lane)}
    optimizer.close()


class Skipping(nn.Module):
    """Every forward leaves another layer out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each fourth turn leaves out none."""
        for index, layer in enumerate(self.layers):
            if index != self.turn % 4:
                x = torch.tanh(layer(x))
        self.turn += 1
        return x


def test_a_layer_without_a_gradient_keeps_its_weights_on_the_host(tmp_path):
    """Its part was never written when the next forward brings it up."""
    found = []
    for options in (
        EngineOptions(device="cpu"),
        EngineOptions(
            device="cpu",
            update=UpdatePlace.NVME,
            weights=WeightPlace.HOST,
            nvme=NvmeOptions(paths=(tmp_path,)),
        ),
    ):
        model = Skipping()
        _, optimizer = offload_with(model, torch.optim.AdamW(model.parameters()), options=options)
        for x in batches(9, features=16):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
