"""Updates that read one state and write another."""

from __future__ import annotations

import numpy as np
import pytest

from unit.native_cases import Part, address

ROLES = ("master", "low", "exp_avg", "exp_avg_sq")
FORMS = [("bfloat16", "split", "none"), ("float32", "split", "none"), ("float16", "whole", "apart")]
# 4 Ki elements are copied at a time; the second segment is absent.
SEGMENTS = [(0, 5), (64, 4097), (4224, 9001)]


def _part(form, seed):
    grad, layout, out = form
    return Part(
        elements=13_300,
        grad_dtype=grad,
        layout=layout,
        out=out,
        out_dtype="float16",
        segments=SEGMENTS,
        hyper_of_segment=[0, -1, 0],
        piece_elements=3000,
        seed=seed,
    )


def _source(part):
    low = address(part.low) if part.layout == "split" else 0
    return (address(part.master), low, address(part.exp_avg), address(part.exp_avg_sq))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_the_bits_of_an_update_in_place(core, pool, form):
    own, other, same = _part(form, 1), _part(form, 2), _part(form, 1)
    before = {role: getattr(own, role).copy() for role in ROLES}
    untouched = {role: getattr(other, role).copy() for role in ROLES}
    other.grad[:] = own.grad
    assert other.update(core, pool, source=_source(own)).wait(30)
    assert same.update(core, pool).wait(30)
    for role in ROLES:
        assert np.array_equal(getattr(own, role), before[role])
        found = getattr(other, role)
        if not len(found):
            continue
        for (start, count), present in zip(SEGMENTS, (True, False, True), strict=True):
            here = slice(start, start + count)
            wanted = getattr(same, role) if present else untouched[role]
            assert np.array_equal(found[here], wanted[here]), role
    if form[2] == "apart":
        assert np.array_equal(other.weight[4224:13225], same.weight[4224:13225])


@pytest.mark.parametrize("place", [0, 2, 3])
def test_addresses_are_checked(core, pool, place):
    part = _part(FORMS[0], 1)
    source = list(_source(_part(FORMS[0], 2)))
    source[place] += 1
    with pytest.raises(ValueError, match="source"):
        part.update(core, pool, source=tuple(source))


def test_the_gradient_stays(core, pool):
    part = Part(elements=100, grad_dtype="float32", layout="whole", out="over", out_dtype="float16")
    with pytest.raises(ValueError, match="another state"):
        part.update(core, pool, source=_source(part))
