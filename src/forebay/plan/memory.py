"""Bytes that a placement takes, by tier and role: the same numbers that the engine reserves.

Source of the figures: law 5 of the design (14 bytes of host memory per trainable parameter for
16-bit weights and one backward per update, 16 with fp32 sums) and the parts' padded lengths. The
forecast is exact: every mapping is rounded up to pages, as the arenas are.
"""

from __future__ import annotations

import mmap
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.exchange_memory import exchange_bytes
from forebay.plan.file_pieces import held_pieces, pieces
from forebay.plan.placement import Accumulation, MasterLayout, UpdatePlace, WeightPlace
from forebay.plan.policy_bytes import policy_bytes
from forebay.plan.records import (
    SECTOR_BYTES,
    SUM_ELEMENTS,
    records_bytes,
    sum_bytes,
    weight_form,
)

if TYPE_CHECKING:
    from forebay.model.layout import PartLayout
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = [
    "RING_SLOTS",
    "SCRATCH_BYTES",
    "backlog_bytes",
    "buffer_bytes",
    "forecast",
    "leaving_bytes",
    "part_bytes",
    "piece_bytes",
    "ring_bytes",
    "weight_buffer_bytes",
    "weight_staging_bytes",
]

# One slot is filled while another is added and a third waits; one more hides jitter.
RING_SLOTS = 4
# 16 MiB slots keep a link within a few percent of its bandwidth.
_RING_BYTES = RING_SLOTS * (16 << 20)

# Through which state in files is read and written outside of updates: 16 blocks of a checksum, and
# a sector on either side.
SCRATCH_BYTES = 16 * 4 * SUM_ELEMENTS + 2 * SECTOR_BYTES
_BACKLOG_BYTES = 1 << 30


def _rounded(nbytes: int, page_bytes: int) -> int:
    return -(-nbytes // page_bytes) * page_bytes


def part_bytes(
    part: PartLayout,
    *,
    placement: Placement,
    update: UpdatePlace,
    weights: WeightPlace = WeightPlace.DEVICE,
    device_page_bytes: int = 1,
) -> dict[tuple[str, str], int]:
    """Bytes of one part by (tier, role), with the names of `Tier` and `Role` values.

    Args:
        part: The part.
        placement: The model's placement.
        update: Where the part's unit updates.
        weights: Where its weights live; those on the host are the high half of a split master
            or the fp32 master itself, and have a place of their own beside a whole one.
        device_page_bytes: What each device allocation is rounded up to: the page size where the
            device is the host.
    """
    item, n = ITEM_BYTES[part.dtype], placement.sharding.state(part).elements
    master = placement.master_layout(part.dtype, update=update)
    page = mmap.PAGESIZE

    def _on_device(nbytes: int) -> int:
        return _rounded(nbytes, device_page_bytes)

    sizes: dict[tuple[str, str], int] = {}
    if weights is WeightPlace.DEVICE:
        sizes["device", "lp_params"] = _on_device(item * part.elements)
    elif weights is WeightPlace.RANKS:
        sizes["device", "lp_params"] = _on_device(item * n)
    elif weights is WeightPlace.NVME:
        form = weight_form(part.dtype)
        sizes["nvme", "lp_params"] = records_bytes(
            n, piece_elements=placement.buffers.piece_elements, form=form
        )
        sizes["host", "staging"] = _rounded(sum_bytes(n, form), page)
    elif master is MasterLayout.WHOLE or update is UpdatePlace.NVME:
        sizes["host", "lp_params"] = _rounded(item * n, page)
    if update is not UpdatePlace.DEVICE:
        if update is UpdatePlace.NVME:
            total = _file_bytes(n, placement)
            sizes["nvme", "hp_params"] = total // 3
            sizes["nvme", "optim_states"] = total // 3 * 2
            sums = sizes.get(("host", "staging"), 0)
            sizes["host", "staging"] = sums + _rounded(sum_bytes(n), page)
        else:
            sizes["host", "hp_params"] = _rounded(4 * n, page)
            sizes["host", "optim_states"] = _rounded(8 * n, page)
        if placement.sends_addends or part.dtype == "float32":
            sizes["host", "lp_grads"] = _rounded(item * n, page)
        else:
            sizes["host", "contiguous_grad_buffer"] = _rounded(SUM_ITEM_BYTES * n, page)
    else:
        extra = {MasterLayout.WEIGHT: 0, MasterLayout.SPLIT: 2, MasterLayout.WHOLE: 4}[master]
        sizes["device", "hp_params"] = _on_device(extra * n)
        sizes["device", "optim_states"] = 2 * _on_device(4 * n)
    more = policy_bytes(part, sizes=sizes, placement=placement, update=update, weights=weights)
    for key, value in more.items():
        sizes[key] = sizes.get(key, 0) + value
    return {key: value for key, value in sizes.items() if value}


def forecast(placement: Placement, *, device_page_bytes: int = 1) -> dict[tuple[str, str], int]:
    """Bytes of the whole placement by (tier, role).

    The ring that sums on the host pass through is in it; state that visits the device is not,
    since it takes only what activations leave free.
    """
    total: dict[tuple[str, str], int] = {}
    for unit in placement.units:
        for part in unit.layout.parts:
            sizes = part_bytes(
                part,
                placement=placement,
                update=unit.update,
                weights=unit.weights,
                device_page_bytes=device_page_bytes,
            )
            for key, value in sizes.items():
                total[key] = total.get(key, 0) + value
    held = _held_file_bytes(placement)
    if held:
        total["nvme", "hp_params"] -= held // 3
        total["nvme", "optim_states"] -= held // 3 * 2
    for unit in placement.frozen:
        here = unit.weights is WeightPlace.RANKS
        key = ("device" if here else "host", "lp_params")
        page = device_page_bytes if here else mmap.PAGESIZE
        for part in unit.layout.parts:
            held = placement.sharding.state(part).elements
            total[key] = total.get(key, 0) + _rounded(ITEM_BYTES[part.dtype] * held, page)
    if placement.pool_bytes:
        key = ("device", "lp_params")
        total[key] = total.get(key, 0) + placement.pool_bytes
    between = exchange_bytes(placement)
    if between:
        total["device", "staging"] = total.get(("device", "staging"), 0) + between
    staging = total.get(("host", "staging"), 0)
    sums = any(unit.update is not UpdatePlace.DEVICE for unit in placement.units)
    if sums and placement.accumulation is Accumulation.HOST_SUM:
        staging += _rounded(ring_bytes(placement), mmap.PAGESIZE)
    if any(unit.update is UpdatePlace.NVME for unit in placement.units):
        staging += placement.buffers.count * buffer_bytes(placement)
        staging += sum(
            piece_bytes(elements, part.dtype)
            for part, elements in islice(pieces(placement), placement.buffers.held)
        )
        staging += SCRATCH_BYTES
    staging += weight_staging_bytes(placement)
    if staging:
        total["host", "staging"] = staging
    return total


def _file_bytes(elements: int, placement: Placement) -> int:
    return records_bytes(elements, piece_elements=placement.buffers.piece_elements)


def _held_file_bytes(placement: Placement) -> int:
    """What pieces that buffers hold would take in files."""
    if not placement.buffers.held:
        return 0
    held, most = held_pieces(placement), placement.buffers.piece_elements
    return sum(
        _file_bytes(min(count * most, placement.sharding.state(part).elements), placement)
        for unit in placement.units
        for part, count in zip(unit.layout.parts, held[unit.layout.index], strict=True)
    )


def piece_bytes(elements: int, dtype: str) -> int:
    """Host bytes that a piece of state takes: its record, and the new weights behind it.

    Args:
        elements: Of the piece.
        dtype: Of the weights; those in fp32 are the master itself.
    """
    new = 0 if dtype == "float32" else ITEM_BYTES[dtype]
    record = records_bytes(elements, piece_elements=max(1, elements))
    return _rounded(record + new * elements, mmap.PAGESIZE)


def buffer_bytes(placement: Placement) -> int:
    """Bytes of one buffer: the largest piece."""
    most = placement.buffers.piece_elements
    return max(
        (
            piece_bytes(min(most, placement.sharding.state(part).elements), part.dtype)
            for unit in placement.units
            for part in (unit.layout.parts if unit.update is UpdatePlace.NVME else ())
        ),
        default=0,
    )


def weight_buffer_bytes(placement: Placement) -> int:
    """Bytes of one buffer for weights in files: the largest piece of them."""
    most = min(placement.weight_buffers.piece_elements, placement.buffers.piece_elements)
    sizes = [
        ITEM_BYTES[part.dtype] * min(most, placement.sharding.state(part).elements)
        for unit in placement.units
        for part in (unit.layout.parts if unit.weights is WeightPlace.NVME else ())
    ]
    return _rounded(max(sizes, default=0), mmap.PAGESIZE)


def weight_staging_bytes(placement: Placement) -> int:
    """Host bytes of all buffers for weights in files."""
    return placement.weight_buffers.count * weight_buffer_bytes(placement)


def ring_bytes(placement: Placement) -> int:
    """Bytes of the ring that gradients pass through on their way to sums on the host."""
    largest = max((p.elements for unit in placement.units for p in unit.layout.parts), default=0)
    return min(_RING_BYTES, max(mmap.PAGESIZE * RING_SLOTS, 8 * largest))


def backlog_bytes(placement: Placement) -> int:
    """Gradient bytes that may wait on the device for the link before backward waits for it.

    Two neighbours keep the link busy while the next gradient is computed. Beyond that a sixteenth
    of all, at most 1 GiB, evens out units of unequal size.
    """
    leaves = [unit for unit in placement.units if unit.update is not UpdatePlace.DEVICE]
    sizes = [leaving_bytes(unit, placement) for unit in leaves]
    neighbours = [one + other for one, other in pairwise(sizes)]
    return max([*neighbours, *sizes[:1], min(sum(sizes) // 16, _BACKLOG_BYTES)])


def leaving_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Device bytes of a unit's gradient that goes to the host: this rank's slice of it."""
    wide = placement.accumulation is Accumulation.DEVICE_SUM or placement.sharding.size > 1
    return sum(
        (SUM_ITEM_BYTES if wide else ITEM_BYTES[part.dtype])
        * placement.sharding.state(part).elements
        for part in unit.layout.parts
    )
