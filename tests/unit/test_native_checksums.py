"""Checksums of blocks as work of the pool, in both cores."""

from __future__ import annotations

import numpy as np
import pytest

from unit.native_cases import address

_BLOCK = 1000


def _noise(nbytes):
    return np.random.default_rng(5).integers(0, 256, nbytes + 1, np.uint8)


def _sums(nbytes):
    return np.full(-(-nbytes // _BLOCK) + 1, 7, np.uint32)


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 5500])
def test_each_block_has_its_own(core, pool, nbytes):
    noise, sums = _noise(nbytes), _sums(nbytes)
    pool.checksums("store", address(noise), nbytes, _BLOCK, address(sums)).wait()
    expected = [
        core.crc32c(address(noise[at:]), min(_BLOCK, nbytes - at))
        for at in range(0, nbytes, _BLOCK)
    ]
    assert [*sums] == [*expected, 7]
    pool.checksums("compare", address(noise), nbytes, _BLOCK, address(sums)).wait()


def test_a_difference_fails_the_ticket_and_names_the_block(pool):
    noise, sums = _noise(5500), _sums(5500)
    names = [f"block {index}" for index in range(6)]
    pool.checksums("store", address(noise), 5500, _BLOCK, address(sums)).wait()
    noise[4321] ^= 1
    ticket = pool.checksums("compare", address(noise), 5500, _BLOCK, address(sums), names)
    with pytest.raises(RuntimeError, match="block 4 is not what was written: its CRC-32C is"):
        ticket.wait()
    dependent = pool.checksums("store", address(noise), 5500, _BLOCK, address(sums), [], [ticket])
    with pytest.raises(RuntimeError, match="block 4"):
        dependent.wait()


def test_what_makes_no_sense_is_refused(pool):
    with pytest.raises(ValueError, match="unknown action 'guess'"):
        pool.checksums("guess", 0, 0, _BLOCK, 0)
    with pytest.raises(ValueError, match="at least 1 byte"):
        pool.checksums("store", 0, 0, 0, 0)
