"""The fused update against one rounded operation at a time, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from unit.native_cases import SIZES, Numbers, Part, address, canonical, check_update, narrow

DTYPES = ["float32", "bfloat16", "float16"]
MODES = {
    "decoupled": Numbers(),
    "l2": Numbers(decay_mode="l2", decay=0.125),
    "none": Numbers(decay_mode="none", decay=123.0),
}
# (grad dtype, layout, where the weight goes, its dtype)
FORMS = [
    *((g, "whole", "apart", o) for g, o in itertools.product(DTYPES, DTYPES)),
    *((g, "split", "none", "bfloat16") for g in DTYPES),
    *((g, "whole", "none", "float32") for g in DTYPES),
    ("float32", "whole", "over", "float32"),
    ("float32", "whole", "over", "bfloat16"),
    ("float32", "whole", "over", "float16"),
    ("bfloat16", "whole", "over", "bfloat16"),
    ("float16", "whole", "over", "float16"),
    ("bfloat16", "whole", "over", "float16"),
]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_every_form_gives_the_reference_bits(core, pool, form, mode):
    grad, layout, out, out_dtype = form
    for seed, elements in enumerate(SIZES):
        part = Part(
            elements=elements,
            grad_dtype=grad,
            layout=layout,
            out=out,
            out_dtype=out_dtype,
            numbers=[MODES[mode]],
            seed=seed,
            piece_elements=3000,
            special=True,
        )
        check_update(core, pool, part)


@pytest.mark.parametrize("piece", [1, 3, 63, 64, 65, 1000, 1 << 30])
@pytest.mark.parametrize("form", FORMS[9::3], ids="-".join)
def test_piece_size_changes_no_bit(core, pool, piece, form):
    grad, layout, out, out_dtype = form
    part = Part(
        elements=1999,
        grad_dtype=grad,
        layout=layout,
        out=out,
        out_dtype=out_dtype,
        piece_elements=piece,
    )
    check_update(core, pool, part)
    again = part.update(core, pool)
    assert again.pieces == -(-1999 // piece)
    assert again.wait(30)  # the pool writes into the part's arrays until then


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5, 15])
def test_alignment_changes_no_bit(core, pool, shift):
    for layout in ("whole", "split"):
        out = "apart" if layout == "whole" else "none"
        check_update(
            core,
            pool,
            Part(elements=5003, grad_dtype="bfloat16", layout=layout, out=out, shift=shift),
        )


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_thread_count_changes_no_bit(native, threads):
    pool = native.Pool(threads, [])
    digests = set()
    for _ in range(5):
        part = Part(elements=400_003, grad_dtype="bfloat16", out="over", piece_elements=70_000)
        check_update(native, pool, part)
        digests.add(part.digest())
    pool.close()
    assert digests == {_digest_by_one_thread(native)}


def _digest_by_one_thread(native):
    pool = native.Pool(1, [])
    part = Part(elements=400_003, grad_dtype="bfloat16", out="over", piece_elements=70_000)
    assert part.update(native, pool).wait(30)
    pool.close()
    return part.digest()


def test_segments_groups_gaps_and_absent_ones(core, pool):
    """Padding between segments and absent segments keep every bit."""
    part = Part(
        elements=10_000,
        grad_dtype="float16",
        out="apart",
        out_dtype="float16",
        segments=[(0, 1), (128, 0), (128, 3000), (4096, 4097), (9000, 1000)],
        hyper_of_segment=[1, 0, -1, 0, 1],
        numbers=[Numbers(), Numbers(decay_mode="l2", decay=0.5, step_size=0.25)],
        piece_elements=777,
    )
    check_update(core, pool, part)


def test_segments_may_come_in_any_order(core, pool):
    part = Part(
        elements=300,
        segments=[(200, 100), (0, 50), (100, 50)],
        hyper_of_segment=[0, 1, 0],
        numbers=[Numbers(), Numbers(decay_mode="none")],
        piece_elements=64,
    )
    check_update(core, pool, part)


@pytest.mark.parametrize("layout", ["whole", "split"])
def test_each_segment_may_bring_its_own_gradient(core, pool, layout):
    options = {"elements": 5000, "segments": [(0, 1000), (1024, 3000)], "layout": layout}
    wanted = Part(**options, piece_elements=999)
    part = Part(**options, piece_elements=999)
    apart = [part.grad[o : o + n].copy() for o, n in part.segments]
    part.grad[:] = 0
    assert wanted.update(core, pool).wait(30)
    assert part.update(core, pool, grads=[address(g) for g in apart]).wait(30)
    assert np.array_equal(canonical(part.master_values()), canonical(wanted.master_values()))


def test_whole_and_split_masters_agree(core, pool):
    """Masters, moments and weights are the same bits over several steps, ties included."""
    whole = Part(elements=9999, out="apart", special=True)
    split = Part(elements=9999, layout="split", special=True)
    for _ in range(5):
        assert whole.update(core, pool).wait(30)
        assert split.update(core, pool).wait(30)
        assert np.array_equal(canonical(whole.master), canonical(split.master_values()))
        finite = ~np.isnan(whole.master)
        assert np.array_equal(whole.weight[finite], split.master[finite])
    assert np.array_equal(canonical(whole.exp_avg), canonical(split.exp_avg))
    assert np.array_equal(canonical(whole.exp_avg_sq), canonical(split.exp_avg_sq))


def test_subnormals_survive_a_flushing_thread(native):
    """Workers keep subnormals although the thread that made them flushes to zero."""
    import torch

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        pool = native.Pool(2, [])
    finally:
        torch.set_flush_denormal(False)
    part = Part(elements=1000)
    part.exp_avg[:] = 1e-41
    part.grad[:] = narrow(np.full(1000, 1e-42, np.float32), "float32")
    check_update(native, pool, part)
    assert (part.exp_avg != 0).all()
    pool.close()


def test_pieces_without_present_elements_are_done(core, pool):
    part = Part(elements=1000, segments=[(500, 10)], piece_elements=100)
    ticket = part.update(core, pool)
    assert ticket.wait(30)
    assert (ticket.pieces, ticket.pieces_done) == (10, 10)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"segments": [(0, 1001)]}, "1001"),
        ({"segments": [(0, 600), (500, 10)]}, "500"),
        ({"hyper_of_segment": [1]}, "hyper 1 of 1"),
        ({"hyper_of_segment": [0, 0]}, "2 entries for 1"),
        ({"piece_elements": 0}, "piece_elements"),
        ({"grad_dtype": "bfloat16", "out": "over", "out_dtype": "float32"}, "4"),
        ({"layout": "split", "out": "apart"}, "out must be 0"),
        ({"grad_dtype": "float64"}, "float64"),
    ],
)
def test_bad_requests_are_refused_before_a_bit_changes(core, pool, change, text):
    if change.get("grad_dtype") == "float64":
        with pytest.raises(ValueError, match=text):
            core.convert(4, "float64", 4, "float32", 1)
        return
    part = Part(**{"elements": 1000, **change})
    before = part.digest()
    with pytest.raises(ValueError, match=text):
        part.update(core, pool)
    assert part.digest() == before


def test_misaligned_addresses_are_refused(core, pool):
    part = Part(elements=10)
    state = core.PartState(
        *(address(part.grad) + 1, "float32", "whole", address(part.master), 0),
        *(address(part.exp_avg), address(part.exp_avg_sq), 0, "float32", [(0, 10)], 10),
    )
    with pytest.raises(ValueError, match="multiple of 4"):
        pool.update(state, [Numbers().hyper(core)], [0], 1.0, 10)
