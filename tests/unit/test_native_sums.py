"""Checked updates: a sum for every block of state, compared before it is changed, renewed after."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from unit.native_cases import Numbers, Part, address


def _sums(core, part):
    block = core.SUM_ELEMENTS
    sums = []
    for begin in range(0, part.elements, block):
        count = min(block, part.elements - begin)

        def one(role, seed=0, begin=begin, count=count):
            return core.crc32c(address(role) + begin * role.itemsize, count * role.itemsize, seed)

        master = one(part.master)
        sums.append(one(part.low, master) if part.layout == "split" else master)
        sums += [one(part.exp_avg), one(part.exp_avg_sq)]
    return np.array(sums, dtype=np.uint32)


@pytest.fixture
def pool(core):
    pool = core.Pool(2, [])
    yield pool
    pool.close()


@pytest.mark.parametrize("layout", ["whole", "split"])
@pytest.mark.parametrize("out", ["none", "over"])
@pytest.mark.parametrize("elements", [1, 65536, 140_001])
def test_sums_follow_the_state_and_change_no_bit(core, pool, layout, out, elements):
    if layout == "split" and out == "over":
        pytest.skip("a split master is its own weight")
    # absent segments, and segments that begin inside a block
    cuts = sorted({0, elements // 3, elements // 2, elements})
    segments = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    chosen = [-1 if i == 1 else 0 for i in range(len(segments))]
    options = {
        "elements": elements,
        "layout": layout,
        "out": out,
        "segments": segments,
        "hyper_of_segment": chosen,
        "numbers": [Numbers()],
        "piece_elements": 2 * core.SUM_ELEMENTS,
    }
    plain, checked = Part(**options), Part(**options)
    sums = _sums(core, checked)
    assert plain.update(core, pool).wait(30)
    assert checked.update(core, pool, sums=address(sums)).wait(30)
    assert checked.digest() == plain.digest()
    assert np.array_equal(sums, _sums(core, checked))


@pytest.mark.parametrize("role", ["master", "low", "exp_avg", "exp_avg_sq"])
def test_one_flipped_bit_stops_the_update_and_names_the_segment(core, pool, role):
    block = core.SUM_ELEMENTS
    part = Part(
        elements=3 * block,
        layout="split",
        segments=[(0, block), (2 * block + 5, 100)],
        piece_elements=3 * block,
    )
    sums = _sums(core, part)
    getattr(part, role).view(np.uint8)[-3] ^= 1
    before = (part.exp_avg[2 * block :].copy(), part.master[2 * block :].copy())
    ticket = part.update(core, pool, sums=address(sums), names=["first", "second"])
    named = "master" if role == "low" else role
    with pytest.raises(RuntimeError, match=f"{named} of second is not what was written: its CRC"):
        ticket.wait(30)
    assert np.array_equal(before[0], part.exp_avg[2 * block :])
    assert np.array_equal(before[1], part.master[2 * block :])


def test_what_cannot_be_checked_is_refused(core, pool):
    part = Part(elements=200_000, piece_elements=1000)
    sums = _sums(core, part)
    with pytest.raises(ValueError, match="must be a multiple of the 65536 elements"):
        part.update(core, pool, sums=address(sums))
    part.piece_elements = core.SUM_ELEMENTS
    with pytest.raises(ValueError, match="sums"):
        part.update(core, pool, sums=address(sums) + 1)
    with pytest.raises(ValueError, match="names has 2 entries for 1 segments"):
        part.update(core, pool, sums=address(sums), names=["a", "b"])
