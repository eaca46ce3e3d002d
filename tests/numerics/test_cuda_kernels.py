"""The Triton kernels give the bits of the torch reference and of the native core.

On a GPU they run as compiled. Without one, `TRITON_INTERPRET=1` runs the same source on CPU
tensors (numpy executes each operation), which checks everything but the compiler.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from forebay import native
from forebay.optim.flat_state import FlatState, native_hypers, native_part
from forebay.optim.master import split
from forebay.optim.reference import AdamState
from forebay.optim.reference import update_ as reference_update_
from forebay.optim.rule import AdamRule, WeightDecay
from forebay.optim.squares import BLOCK, square_blocks, square_sum, tree_sum

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
triton_math = pytest.importorskip("forebay.optim.triton_math")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
gpu_only = pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
# numpy warns of the overflows that these tests provoke.
pytestmark = (
    [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else [pytest.mark.cuda]
)

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
HYPERS = [
    AdamRule(WeightDecay.DECOUPLED).capture(GROUP, 3),
    AdamRule(WeightDecay.L2).capture(GROUP, 1),
    AdamRule(WeightDecay.L2).capture({**GROUP, "weight_decay": 0.0, "eps": 1e-12}, 700),
]
SCALE = 0.37109375
# 0-dim, tails on both sides of a block, one gradient missing (see `absent`), an empty parameter.
ELEMENTS = [1, 1023, 1024, 1025, 199, 0, 4096, 2500]
SUM_SIZES = [0, 1, 199, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 70_001]


def any_bits(elements: int, seed: int) -> torch.Tensor:
    """Half of it ordinary numbers, half any bit pattern: subnormals, infinities, NaN, -0."""
    source = np.random.default_rng(seed)
    wild = source.integers(0, 2**32, elements, dtype=np.uint32).view(np.float32)
    tame = source.standard_normal(elements, dtype=np.float32)
    return torch.from_numpy(np.where(source.random(elements) < 0.5, tame, wild))


def assert_same_bits(left: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """Equal bits, except that any NaN equals any other."""
    left, right = left.cpu(), right.cpu()
    whole = torch.int32 if left.itemsize == 4 else torch.int16
    differ = left.view(whole) != right.view(whole)
    if left.is_floating_point():
        differ &= ~(left.isnan() & right.isnan())
    places = differ.nonzero().flatten()
    assert not len(places), f"{what}: {len(places)} differ, first {places[:3].tolist()}"


def assert_same_state(left: FlatState, right: FlatState) -> None:
    for name in ("high", "exp_avg", "exp_avg_sq", "out"):
        if getattr(left, name) is not None:
            assert_same_bits(getattr(left, name), getattr(right, name), name)
    if left.low is not None:
        # What completes a NaN is outside the law.
        keep = ~left.high.cpu().isnan()
        assert_same_bits(left.low.cpu()[keep], right.low.cpu()[keep], "low")


def state_of(elements, *, layout: str, out: torch.dtype | None, seed: int = 1) -> FlatState:
    """A part whose parameters start at multiples of 128 elements, with any bits inside."""
    segments, total = [], 0
    for count in elements:
        segments.append((total, count))
        total += -(-count // 128) * 128
    master = any_bits(total, seed)
    high, low = split(master) if layout == "split" else (master, None)
    return FlatState(
        high=high,
        low=low,
        exp_avg=any_bits(total, seed + 1),
        exp_avg_sq=any_bits(total, seed + 2).abs(),
        out=None if out is None else torch.zeros(total, dtype=out),
        segments=tuple(segments),
    )


def copy_of(state: FlatState, device: torch.device) -> FlatState:
    tensors = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "segments"}
    return replace(
        state,
        **{
            name: None if tensor is None else tensor.to(device, copy=True)
            for name, tensor in tensors.items()
        },
    )


def by_reference(state: FlatState, grads, hyper_of_segment) -> None:
    for (start, count), grad, hyper in zip(state.segments, grads, hyper_of_segment, strict=True):
        if grad is None or hyper < 0:
            continue
        at = slice(start, start + count)
        reference_update_(
            AdamState(
                master=state.high[at],
                low=None if state.low is None else state.low[at],
                exp_avg=state.exp_avg[at],
                exp_avg_sq=state.exp_avg_sq[at],
            ),
            grad=grad,
            scale=SCALE,
            hyper=HYPERS[hyper],
            out=None if state.out is None else state.out[at],
        )


def by_native(state: FlatState, grad: torch.Tensor, hyper_of_segment) -> None:
    core = native.core()
    pool = core.Pool(2, [])
    name = str(grad.dtype).removeprefix("torch.")
    part = native_part(core, state, grad=grad.data_ptr(), grad_dtype=name)
    numbers = native_hypers(core, HYPERS)
    pool.update(part, numbers, list(hyper_of_segment), SCALE, 1 << 20, None, []).wait()
    pool.close()


def by_triton(state: FlatState, grads, hyper_of_segment, *, scale=SCALE) -> None:
    triton_math.update_(
        state, grads=grads, hypers=HYPERS, hyper_of_segment=hyper_of_segment, scale=scale
    )


def gradients(elements, dtype: torch.dtype, *, seed: int = 40) -> list[torch.Tensor]:
    return [any_bits(count, seed + i).to(dtype) for i, count in enumerate(elements)]


def moved(grads):
    return [None if grad is None else grad.to(DEVICE) for grad in grads]


@pytest.mark.parametrize("dtype", FORMATS)
def test_square_sums_equal_the_tree(dtype):
    tensors = [any_bits(size, size).to(dtype).nan_to_num(0, 0, 0) for size in SUM_SIZES]
    sums = triton_math.square_sums([tensor.to(DEVICE) for tensor in tensors])
    assert sums.tolist() == [float(square_sum(tensor)) for tensor in tensors]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", SUM_SIZES)
def test_block_sums_are_the_lowest_of_the_tree(size, dtype):
    values = any_bits(size, size).to(dtype).nan_to_num(0, 0, 0)
    assert torch.equal(triton_math.block_sums(values.to(DEVICE)).cpu(), square_blocks(values))
    unaligned = values.to(DEVICE)[1:]
    assert torch.equal(triton_math.block_sums(unaligned).cpu(), square_blocks(values[1:]))


def test_square_sums_of_mixed_dtypes_and_unaligned_views():
    whole = torch.randn(9001, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    half = whole.to(torch.bfloat16)
    tensors = [whole[1:], half[3:5000], whole, whole[::2], whole[5], half[7:8]]
    sums = triton_math.square_sums(tensors)
    assert sums.tolist() == [float(square_sum(tensor.cpu())) for tensor in tensors]


def test_more_tensors_than_a_table_holds():
    whole = torch.randn(1500 * 8, generator=torch.Generator().manual_seed(2))
    count = 20 if INTERPRETED else 1500
    monkey_rows = 7 if INTERPRETED else triton_math.MAX_ROWS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_math, "MAX_ROWS", monkey_rows)
        sums = triton_math.square_sums(list(whole.to(DEVICE).view(-1, 8)[:count]))
    assert sums.tolist() == [float(square_sum(row)) for row in whole.view(-1, 8)[:count]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_shows_in_its_tensor_alone(bad):
    tensors = [torch.ones(5000), torch.ones(5000), torch.ones(3)]
    tensors[1][4999] = bad
    sums = triton_math.square_sums([tensor.to(DEVICE) for tensor in tensors]).tolist()
    assert [bool(np.isfinite(value)) for value in sums] == [True, False, True]


@gpu_only
def test_three_levels_of_the_tree():
    """More than 4096 blocks: a large embedding beside a bias."""
    large = torch.randn(BLOCK * BLOCK + 5, generator=torch.Generator().manual_seed(3))
    small = large[:7].clone()
    sums = triton_math.square_sums([small.to(DEVICE), large.to(DEVICE)])
    assert sums.tolist() == [float(square_sum(small)), float(square_sum(large))]


@gpu_only
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_torch_definition_gives_the_same_bits_on_the_device(dtype):
    values = any_bits(70_001, 5).to(dtype)
    assert float(square_sum(values.nan_to_num(0, 0, 0).to(DEVICE))) == float(
        square_sum(values.nan_to_num(0, 0, 0))
    )
    sums = torch.randn(5000, dtype=torch.float64)
    assert float(tree_sum(sums.to(DEVICE))) == float(tree_sum(sums))
    host = state_of([70_001], layout="split", out=None)
    device = copy_of(host, DEVICE)
    by_reference(host, [values], [1])
    by_reference(device, [values.to(DEVICE)], [1])
    assert_same_state(device, host)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("layout", "out"),
    [("whole", None), ("split", None), *[("whole", dtype) for dtype in FORMATS]],
)
def test_update_equals_reference_and_native(layout, out, dtype):
    host = state_of(ELEMENTS, layout=layout, out=out)
    by_core, device = copy_of(host, torch.device("cpu")), copy_of(host, DEVICE)
    grads = gradients(ELEMENTS, dtype)
    hyper_of_segment = [0, 1, 2, -1, 0, 1, 2, 1]
    flat = torch.zeros(host.exp_avg.numel(), dtype=dtype)
    for (start, count), grad in zip(host.segments, grads, strict=True):
        flat[start : start + count] = grad
    by_reference(host, grads, hyper_of_segment)
    by_native(by_core, flat, hyper_of_segment)
    by_triton(device, moved(grads), hyper_of_segment)
    assert_same_state(by_core, host)
    assert_same_state(device, host)


def test_gradients_of_mixed_dtypes_strides_and_alignment():
    host = state_of([64, 65, 60], layout="split", out=None)
    device = copy_of(host, DEVICE)
    base = any_bits(200, 9)
    grads = [
        base[:64].to(torch.float16),
        base[1:66],
        base[:120].view(60, 2).to(torch.bfloat16)[:, 1],
    ]
    by_reference(host, grads, [0, 1, 2])
    by_triton(device, [grads[0].to(DEVICE), base.to(DEVICE)[1:66], grads[2].to(DEVICE)], [0, 1, 2])
    assert_same_state(device, host)


def test_absent_segments_keep_every_bit():
    host = state_of([100, 100, 100], layout="whole", out=torch.float16)
    device = copy_of(host, DEVICE)
    grads = gradients([100, 100, 100], torch.float32)
    by_triton(device, [None, grads[1].to(DEVICE), None], [0, -1, 0])
    for name in ("high", "exp_avg", "exp_avg_sq", "out"):
        left, right = getattr(device, name).cpu(), getattr(host, name)
        assert left.view(torch.uint8).equal(right.view(torch.uint8))


def test_the_scale_may_stay_on_the_device():
    first = state_of([1000], layout="whole", out=torch.bfloat16)
    device, second = copy_of(first, DEVICE), copy_of(first, DEVICE)
    grad = gradients([1000], torch.float32)[0].to(DEVICE)
    by_triton(device, [grad], [0])
    by_triton(second, [grad], [0], scale=torch.tensor(SCALE, device=DEVICE))
    assert_same_state(second, device)


def test_new_weights_may_go_over_a_gradient_of_their_dtype():
    first = state_of([3000], layout="whole", out=torch.bfloat16)
    device = copy_of(first, DEVICE)
    grad = gradients([3000], torch.bfloat16)[0]
    over = torch.zeros_like(device.out)
    over[:3000] = grad.to(DEVICE)
    by_reference(first, [grad], [0])
    by_triton(replace(device, out=over), [over[:3000]], [0])
    assert_same_bits(over[:3000], first.out[:3000], "out")


def test_a_gradient_of_another_size_is_refused():
    state = copy_of(state_of([10], layout="whole", out=None), DEVICE)
    with pytest.raises(ValueError, match="9 elements, its segment 10"):
        by_triton(state, [torch.zeros(9, device=DEVICE)], [0])


def test_device_math_reads_all_sums_at_once_and_the_last_wins():
    math = triton_math.TritonMath(DEVICE)
    assert math.read() == {}
    math.square_sums([], [])
    math.square_sums([4, 2], [torch.full((3,), 2.0, device=DEVICE), torch.ones(5, device=DEVICE)])
    math.square_sums([4], [torch.full((2,), 3.0, device=DEVICE)])
    assert math.read() == {4: 18.0, 2: 5.0}
    assert math.read() == {}


def test_updates_use_the_numbers_that_they_are_given():
    """Tables stay on the device between the updates of one step, and of that step alone."""
    math = triton_math.TritonMath(DEVICE)
    elements = [700, 300]
    grads = gradients(elements, torch.bfloat16)
    for hypers in (HYPERS, tuple(reversed(HYPERS)), HYPERS):
        for scale in (SCALE, SCALE / 2):
            first = copy_of(state_of(elements, layout="split", out=None), DEVICE)
            second = copy_of(first, DEVICE)
            for _ in range(2):
                terms = {"hypers": hypers, "hyper_of_segment": [0, 1], "scale": scale}
                math.update(first, grads=moved(grads), **terms)
                triton_math.update_(second, grads=moved(grads), **terms)
            assert_same_state(first, second)


@gpu_only
def test_nothing_but_read_waits_for_the_device():
    math = triton_math.TritonMath(DEVICE)
    state = copy_of(state_of([5000, 70_001], layout="split", out=None), DEVICE)
    grads = moved(gradients([5000, 70_001], torch.bfloat16))
    scale = torch.tensor(SCALE, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        math.square_sums([0, 1], grads)
        math.update(state, grads=grads, hypers=HYPERS, hyper_of_segment=[0, 1], scale=scale)
        math.update(state, grads=grads, hypers=HYPERS, hyper_of_segment=[0, 1], scale=SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(math.read()) == 2


@gpu_only
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("layout", "out"), [("whole", torch.bfloat16), ("split", None)])
def test_ten_million_values_over_five_steps(layout, out, dtype):
    elements = [10_000_003]
    host = state_of(elements, layout=layout, out=out)
    device = copy_of(host, DEVICE)
    for step in range(5):
        grad = any_bits(host.exp_avg.numel(), 100 + step).to(dtype)
        by_native(host, grad, [step % 3])
        by_triton(device, [grad[: elements[0]].to(DEVICE)], [step % 3])
        assert_same_state(device, host)
