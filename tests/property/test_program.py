"""Programs and layouts for any placement: nothing before its predecessors, every byte counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.model.layout import (
    ALIGNMENT_ELEMENTS,
    ITEM_BYTES,
    SHARDED_ALIGNMENT_ELEMENTS,
    layout_unit,
)
from forebay.model.spec import ParamSpec
from forebay.plan import (
    Accumulation,
    Lane,
    MasterLayout,
    OpKind,
    Placement,
    SixteenBitMaster,
    TriggerKind,
    UnitPlacement,
    UpdatePlace,
    build_program,
    forecast,
)
from forebay.plan.program import Turn

_SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 600)),
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
)


@st.composite
def _params(draw, max_size=5):
    shapes = draw(
        st.lists(st.tuples(_SHAPES, st.sampled_from(sorted(ITEM_BYTES))), max_size=max_size)
    )
    return [
        ParamSpec(index=i, names=(f"p{i}",), shape=shape, dtype=dtype, group=0)
        for i, (shape, dtype) in enumerate(shapes)
    ]


@st.composite
def _placements(draw):
    count = draw(st.integers(0, 5))
    units = tuple(
        UnitPlacement(
            layout=layout_unit(f"u{index}", index=index, params=draw(_params())),
            update=draw(st.sampled_from(UpdatePlace)),
        )
        for index in range(count)
    )
    accumulation = draw(st.sampled_from(Accumulation))
    backwards = 1 if accumulation is Accumulation.SINGLE else draw(st.integers(2, 9))
    placement = Placement(
        units=units,
        accumulation=accumulation,
        backwards_per_update=backwards,
        bf16_master=draw(st.sampled_from(SixteenBitMaster)),
    )
    return placement, draw(st.permutations(range(count)))


def _ancestors(program, op):
    found, waiting = set(), [*op.after]
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            waiting += program.ops[index].after
    return {program.ops[index] for index in found}


@settings(max_examples=150, deadline=None)
@given(_placements())
def test_order_of_operations(case):
    placement, order = case
    program = build_program(placement, order=order)
    assert [op.index for op in program.ops] == list(range(len(program.ops)))
    assert all(index < op.index for op in program.ops for index in op.after)
    (agree,) = (op for op in program.ops if op.kind is OpKind.AGREE)
    places = {unit.layout.index: unit.update for unit in placement.units}
    updates = [op.unit for op in program.ops if op.kind is OpKind.UPDATE]
    assert updates == list(order)  # each unit once, in the order of the next forward
    normed = {op.unit for op in _ancestors(program, agree) if op.kind is OpKind.NORM}
    assert normed == set(places)  # all gradients are known before anything is decided
    for op in program.ops:
        before = _ancestors(program, op)
        kinds = {other.kind for other in before if other.unit == op.unit}
        if op.kind is OpKind.UPDATE:
            assert agree in before
            if places[op.unit].lands:
                assert kinds & {OpKind.LAND, OpKind.LAND_FOLD}
            if places[op.unit] is UpdatePlace.NVME:
                assert OpKind.READ in kinds
            if places[op.unit] is UpdatePlace.STREAMED:
                assert OpKind.FETCH in kinds
        if op.kind in {OpKind.PUBLISH, OpKind.WRITE_BACK, OpKind.STORE}:
            assert OpKind.UPDATE in kinds
            assert agree in before
        if op.kind in {OpKind.AGREE, OpKind.UPDATE, OpKind.PUBLISH, OpKind.WRITE_BACK}:
            assert op.trigger.kind is TriggerKind.STEP


@settings(max_examples=100, deadline=None)
@given(_placements())
def test_each_unit_does_what_its_place_says_once(case):
    placement, order = case
    program = build_program(placement, order=order)
    sums_on_host = placement.accumulation is Accumulation.HOST_SUM
    for unit in placement.units:
        kinds = Counter(op.kind for op in program.ops if op.unit == unit.layout.index)
        expected = {OpKind.NORM: 1, OpKind.UPDATE: 1}
        if unit.update.lands:
            expected[OpKind.LAND_FOLD if sums_on_host else OpKind.LAND] = 1
            expected[OpKind.PUBLISH] = 1
            if unit.update is UpdatePlace.NVME:
                expected |= {OpKind.READ: 1, OpKind.STORE: 1}
        elif unit.update is UpdatePlace.STREAMED:
            expected |= {OpKind.FETCH: 1, OpKind.KEEP: 1, OpKind.WRITE_BACK: 1}
            if sums_on_host:
                expected[OpKind.LAND_FOLD] = 1
        assert kinds == expected


@settings(max_examples=100, deadline=None)
@given(_placements())
def test_traffic_is_the_table_of_the_law(case):
    """Bytes per parameter and update with k backwards, device to host and back."""
    placement, order = case
    program = build_program(placement, order=order)
    k = placement.backwards_per_update
    down = up = 0
    for unit in placement.units:
        for part in unit.layout.parts:
            item, count = ITEM_BYTES[part.dtype], part.parameter_elements
            if unit.update.lands:
                down += (
                    count
                    * {
                        Accumulation.SINGLE: item,
                        Accumulation.DEVICE_SUM: 4,
                        Accumulation.HOST_SUM: k * item,
                    }[placement.accumulation]
                )
                up += count * item
            elif unit.update is UpdatePlace.STREAMED:
                # moments, and what completes the weight to a master; padding travels too
                master = placement.master_layout(part.dtype, update=unit.update)
                extra = {MasterLayout.WEIGHT: 0, MasterLayout.SPLIT: 2, MasterLayout.WHOLE: 4}
                down += (8 + extra[master]) * part.elements
                up += (8 + extra[master]) * part.elements
                if placement.accumulation is Accumulation.HOST_SUM and k > 1:
                    # all addends but the last go down, and their sum comes up with the state
                    down += (k - 1) * item * count
                    up += 4 * part.elements
    assert (program.traffic(Lane.DOWN), program.traffic(Lane.UP)) == (down, up)
    every = [op for op in program.ops if op.turn is Turn.EVERY]
    assert all(op.kind is OpKind.LAND_FOLD for op in every)


@settings(max_examples=100, deadline=None)
@given(_placements())
def test_forecast_holds_every_byte(case):
    """Host bytes per element as law 5 says, and pages never more than one per mapping."""
    placement, _ = case
    exact = forecast(placement)
    paged = forecast(placement, device_page_bytes=4096)
    assert all(value % 4096 == 0 for value in paged.values())
    for tier in ("host", "device", "nvme"):
        total = sum(v for (at, _), v in exact.items() if at == tier)
        rounded = sum(v for (at, _), v in paged.items() if at == tier)
        parts = sum(len(unit.layout.parts) for unit in placement.units)
        assert total <= rounded <= total + 4 * 4096 * parts
    state = sum(v for (at, role), v in exact.items() if (at, role) != ("host", "staging"))
    least = 0
    for unit in placement.units:
        for part in unit.layout.parts:
            item, n = ITEM_BYTES[part.dtype], part.elements
            on_host = unit.update is not UpdatePlace.DEVICE
            single = placement.accumulation is Accumulation.SINGLE or part.dtype == "float32"
            master = placement.master_layout(part.dtype, update=unit.update)
            extra = {MasterLayout.WEIGHT: 0, MasterLayout.SPLIT: 2, MasterLayout.WHOLE: 4}[master]
            least += item * n + (12 + (item if single else 4) if on_host else 8 + extra) * n
    parts = sum(len(unit.layout.parts) for unit in placement.units)
    assert least <= state <= least + 4 * 4096 * parts


@settings(max_examples=100, deadline=None)
@given(_placements(), st.integers(1, 9), st.booleans())
def test_files_are_read_but_for_what_buffers_keep(case, count, reads_ahead):
    """12 bytes per element in whole sectors, each way; buffers spare what they end a step with."""
    placement, order = case
    buffers = replace(placement.buffers, count=count, reads_ahead=reads_ahead)
    program = build_program(replace(placement, buffers=buffers), order=order)
    pieces = [
        3 * -(-4 * part.elements // 4096) * 4096
        for unit in placement.units
        if unit.update is UpdatePlace.NVME
        for part in unit.layout.parts
        if part.elements
    ]
    read = program.traffic(Lane.READ)
    assert program.traffic(Lane.WRITE) == sum(pieces)
    if len(pieces) <= count:
        assert read == 0
    elif reads_ahead and len(pieces) < 2 * count:
        assert 0 < read < sum(pieces)
    else:
        assert read == sum(pieces)


@settings(max_examples=200, deadline=None)
@given(_params(max_size=8), st.integers(1, 9))
def test_layouts_lose_and_share_nothing(params, world_size):
    layout = layout_unit("u", index=0, params=params, world_size=world_size)
    slots = [slot for part in layout.parts for slot in part.slots]
    assert sorted(slot.index for slot in slots) == [param.index for param in params]
    by_index = {param.index: param for param in params}
    assert layout.parameter_elements == sum(param.elements for param in params)
    alignment = ALIGNMENT_ELEMENTS if world_size == 1 else SHARDED_ALIGNMENT_ELEMENTS
    for part in layout.parts:
        assert part.elements % (alignment * world_size) == 0
        end = 0
        for slot in part.slots:
            param = by_index[slot.index]
            assert (slot.shape, slot.elements) == (param.shape, param.elements)
            assert part.dtype == param.dtype
            assert slot.offset % alignment == 0
            assert slot.offset * ITEM_BYTES[part.dtype] % 512 == 0
            assert slot.offset >= end
            assert slot.offset - end < alignment
            end = slot.end
        assert end <= part.elements < end + alignment * (world_size + 1)
        shards = [part.shard(rank) for rank in range(world_size)]
        assert shards[0][0] == 0
        assert shards[-1][1] == part.elements
        assert all(a[1] == b[0] for a, b in pairwise(shards))
        assert len({stop - start for start, stop in shards}) == 1
        for slot in part.slots:
            pieces = [shard.segment(slot) for shard in shards]
            held = [piece for piece in pieces if piece.elements]
            assert sum(piece.elements for piece in held) == slot.elements
            assert [piece.start for piece in held] == [
                sum(piece.elements for piece in held[:n]) for n in range(len(held))
            ]
            for shard, piece in zip(shards, pieces, strict=True):
                assert 0 <= piece.offset <= piece.end <= shard.elements
                if piece.elements:
                    assert shard.start + piece.offset == slot.offset + piece.start


@settings(max_examples=50, deadline=None)
@given(_params(max_size=6), st.integers(2, 8))
def test_offsets_do_not_depend_on_the_number_of_shards(params, world_size):
    alone = layout_unit("u", index=0, params=params, world_size=2)
    among = layout_unit("u", index=0, params=params, world_size=world_size)
    for one, many in zip(alone.parts, among.parts, strict=True):
        assert one.slots == many.slots
        assert replace(one, elements=many.elements, world_size=world_size) == many
