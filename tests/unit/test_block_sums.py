"""Sums of squares of blocks on the host: the values may go before the sums are read."""

from __future__ import annotations

import weakref

import torch

from forebay.optim.block_sums import BlockSums


def test_values_that_were_summed_are_let_go_while_others_begin(core, pool):
    sums = BlockSums(core, pool)
    gone = []
    for number in range(6):
        values = torch.full((4096 * 3,), float(number))
        gone.append(weakref.ref(values.untyped_storage()))
        sums.begin(number, values)
        del values
        sums._begun[number].wait()
    assert [ref() is None for ref in gone[:-1]] == [True] * 5
    read = sums.read()
    assert [float(read[n].sum()) for n in range(6)] == [n * n * 4096 * 3 for n in range(6)]
    assert gone[-1]() is None
