"""CRC-32C in both cores: published values, seeds, and agreement at ugly sizes and addresses."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from unit.native_cases import address

# RFC 3720 (iSCSI), appendix B.4; the first is the catalogue's check value.
_PUBLISHED = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]

# Around words, the native core's stripes (3 * 256, 3 * 4096) and the fallback's stretches (512).
_SIZES = [1, 7, 8, 9, 511, 512, 513, 767, 768, 769, 1536, 4095, 12288, 12289, 13056, 40000]


def _bytes_at(data: bytes, shift: int = 0) -> np.ndarray:
    return np.frombuffer(bytes(shift) + data + b"\x55", np.uint8)[shift:].copy()


@pytest.mark.parametrize(("data", "value"), _PUBLISHED)
def test_it_has_the_published_values(core, data, value):
    assert core.crc32c(address(_bytes_at(data)), len(data)) == value


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_both_cores_agree(native, shift):
    fallback = importlib.import_module("forebay._fallback")
    noise = np.random.default_rng(7).integers(0, 256, max(_SIZES) + shift, np.uint8)[shift:]
    for size in _SIZES:
        for seed in (0, 0x01234567, 0xFFFFFFFF):
            found = native.crc32c(address(noise), size, seed)
            assert fallback.crc32c(address(noise), size, seed) == found, (size, seed)


def test_it_goes_on_from_a_seed(core):
    noise = np.random.default_rng(8).integers(0, 256, 30_000, np.uint8)
    whole = core.crc32c(address(noise), noise.size)
    for cut in (1, 8, 777, 12_288, 29_999):
        head = core.crc32c(address(noise), cut)
        assert core.crc32c(address(noise[cut:]), noise.size - cut, head) == whole


def test_one_flipped_bit_changes_it(core):
    noise = np.random.default_rng(9).integers(0, 256, 20_000, np.uint8)
    whole = core.crc32c(address(noise), noise.size)
    for at in (0, 4096, 12_287, 12_288, 19_999):
        noise[at] ^= 4
        assert core.crc32c(address(noise), noise.size) != whole
        noise[at] ^= 4


def test_no_address_is_refused_unless_there_are_no_bytes(core):
    assert core.crc32c(0, 0, 5) == 5
    with pytest.raises(ValueError, match="address of bytes is 0"):
        core.crc32c(0, 1)
