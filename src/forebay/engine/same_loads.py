"""Weights that a state dict brings as they are: loading them changes nothing, not even a master.

torch copies them into the parameters all the same, which looks like a write of the user's, and a
written weight is its master: the bits that masters have beyond their weights would be gone, and
weights that are older than their masters would stay. So what is coming is compared just before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.engine.masters import is_written

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forebay.engine.record import ParamRecord

__all__ = ["SameLoads", "is_same"]

# What is compared at once is on both sides of the link: 2 or 4 MiB.
_CHUNK_ELEMENTS: Final = 1 << 20
_BITS: Final = {2: torch.int16, 4: torch.int32}


class SameLoads:
    """Tells copies that change no bit from the user's writes.

    Calls: `note` when a module is about to be loaded and its weights are where torch will copy
    into them, `confirm` when it was.
    """

    def __init__(self) -> None:
        # The version that a weight will have if nobody but torch touches it.
        self._expected: dict[ParamRecord, int] = {}

    def note(
        self, records: Iterable[tuple[str, ParamRecord]], state: Mapping[str, Any], prefix: str
    ) -> None:
        """Look at what is coming.

        Args:
            records: A module's own weights, by their names in it.
            state: The state dict, which nothing changes.
            prefix: The module's prefix in it.
        """
        for name, record in records:
            version = record.param._version
            agrees = version == record.version and not is_written(record)
            # or it is tied to a weight of a module around this one, which is being loaded too
            agrees = self._expected.pop(record, None) == version or agrees
            if agrees and is_same(record.param.data, state.get(prefix + name)):
                self._expected[record] = version + 1

    def confirm(self, records: Iterable[tuple[str, ParamRecord]]) -> None:
        """Masters agree with these weights if they did before `note`, and these were the same."""
        for _, record in records:
            if self._expected.pop(record, None) == record.param._version:
                record.version = record.param._version


def is_same(here: torch.Tensor, coming: object) -> bool:
    """Whether copying into a tensor leaves every bit of it."""
    if not isinstance(coming, torch.Tensor) or coming.shape != here.shape or coming.is_meta:
        return False
    own, other = here.reshape(-1), coming.detach().reshape(-1)
    bits = _BITS[here.element_size()]
    for start in range(0, own.numel(), _CHUNK_ELEMENTS):
        piece = own[start : start + _CHUNK_ELEMENTS]
        value = other[start : start + _CHUNK_ELEMENTS].to(own.device, own.dtype)
        if not torch.equal(piece.view(bits), value.view(bits)):
            return False
    return True
