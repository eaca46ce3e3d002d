"""Links: pieces, order, pacing, sums through a ring; with copies late, reordered and broken."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from unit.native_cases import Part, address, canonical, narrow, random_state, to_bf16, widen


@pytest.fixture(params=["plain", "scripted"])
def link(core, request):
    """A link of either core; the scripted one delays and reorders."""
    engine = core.MemcpyEngine()
    if request.param == "scripted":
        engine = core.ScriptedEngine(engine, 7, 500)
    link = core.Link(engine, [0], 2, -1, "test")
    yield link
    link.close()


def _plan(core, target, source, piece_bytes):
    plan = core.CopyPlan(piece_bytes)
    plan.append(address(target), address(source), source.nbytes)
    return plan


@pytest.mark.parametrize("nbytes", [0, 1, 67, 4095, 4096, 4097, 100_003])
def test_a_copy_brings_every_byte(core, link, nbytes):
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    plan = _plan(core, target, source, 4096)
    assert (plan.pieces, plan.nbytes) == (-(-nbytes // 4096), nbytes)
    ticket = link.copy(plan)
    assert ticket.wait(30)
    assert ticket.wait_issued(30)
    assert (ticket.done, ticket.failed) == (True, False)
    assert ticket.pieces == ticket.pieces_done == ticket.pieces_issued == plan.pieces
    assert np.array_equal(source, target)


def test_pieces_tell_when_they_were_copied(core, link):
    source = np.zeros(5000, dtype=np.uint8)
    begun = time.monotonic_ns()
    target = np.zeros_like(source)
    ticket = link.copy(_plan(core, target, source, 1000))
    assert ticket.wait(30)
    times = ticket.times()
    assert len(times) == 5
    assert begun <= times[0][0]
    assert all(begin <= end <= time.monotonic_ns() for begin, end in times)
    assert times == sorted(times)
    assert core.Ticket.completed().times() == []


def test_plans_pack_split_and_place(core, link):
    source = np.arange(1000, dtype=np.uint8)
    target = np.zeros_like(source)
    plan = core.CopyPlan(100)
    for begin in range(0, 300, 30):
        plan.append(address(target) + begin, address(source) + begin, 30)
    assert plan.pieces == 3
    plan.append(address(target) + 300, address(source) + 300, 250)
    assert (plan.pieces, plan.nbytes) == (6, 550)
    plan.add(8, address(target) + 550, address(source) + 550, 450)
    assert (plan.pieces, plan.nbytes) == (9, 1000)
    assert link.copy(plan).wait(30)
    assert np.array_equal(source, target)


def test_a_plan_serves_many_copies(core, link):
    source = np.zeros(1000, dtype=np.uint8)
    target = np.zeros_like(source)
    plan = _plan(core, target, source, 300)
    for value in range(5):
        source[:] = value
        assert link.copy(plan).wait(30)
        assert (target == value).all()


def test_weights_follow_their_update_piece_by_piece(native):
    """Every copied piece holds the new weights, although updates and copies end in any order."""
    pool = native.Pool(3, [])
    engine = native.ScriptedEngine(native.MemcpyEngine(), 3, 300)
    link = native.Link(engine, shuffle_seed=5)
    for seed in range(5):
        part = Part(
            elements=50_000,
            grad_dtype="float32",
            out="over",
            piece_elements=1000,
            seed=seed,
            segments=[(0, 20_000), (25_000, 25_000)],
        )
        p, _, _, present = part.expected()
        device = np.zeros(part.elements, np.uint16)
        plan = native.CopyPlan(1 << 30)
        for piece in range(50):
            source = address(part.grad) + piece * 1000 * 4
            plan.add(piece, address(device) + piece * 2000, source, 2000)
        update = part.update(native, pool)
        assert link.copy(plan, piecewise=update).wait(30)
        assert np.array_equal(device[present], to_bf16(p)[present])
    link.close()
    pool.close()


def test_gradients_arrive_before_their_update(native):
    """`after` orders work between links and pools."""
    pool = native.Pool(2, [])
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 11, 2000))
    part = Part(elements=20_000, piece_elements=4000)
    p = part.expected()[0]
    gradient = part.grad.copy()
    part.grad[:] = np.nan
    landed = link.copy(_plan(native, part.grad, gradient, 8000))
    assert part.update(native, pool, after=[landed]).wait(30)
    assert np.array_equal(canonical(part.master), canonical(p))
    link.close()
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_pass_through_a_small_ring(core, link, dtype):
    pool = core.Pool(2, [])
    elements = 30_011
    ring_memory = np.zeros(3 * 1024, np.uint32)
    ring = core.StagingRing(address(ring_memory), 4096, 3)
    sums = np.full(elements, np.nan, np.float32)
    addends = [narrow(random_state(elements, seed)[3], dtype) for seed in range(4)]
    ticket = None
    for index, values in enumerate(addends):
        cut = 12_345
        spans = [
            (address(sums), address(values), cut),
            (address(sums[cut:]), address(values[cut:]), elements - cut),
        ]
        after = [ticket] if ticket else []
        ticket = link.copy_fold(pool, spans, dtype, index == 0, ring, 0, after, 0)
    assert ticket.wait(60)
    assert ticket.pieces == ticket.pieces_done == -(-elements // (4096 // values.itemsize))
    wanted = widen(addends[0], dtype)
    for values in addends[1:]:
        wanted = wanted + widen(values, dtype)
    assert np.array_equal(canonical(sums), canonical(wanted))
    assert ring.slots_free == 3
    pool.close()


def test_links_may_share_a_ring_of_one_slot(native):
    pool = native.Pool(1, [])
    memory = np.zeros(256, np.float32)
    ring = native.StagingRing(address(memory), 1024, 1)
    links = [
        native.Link(native.ScriptedEngine(native.MemcpyEngine(), seed, 200)) for seed in range(3)
    ]
    sources = [np.full(10_000, seed + 1, np.float32) for seed in range(3)]
    sums = [np.zeros(10_000, np.float32) for _ in links]
    tickets = [
        link.copy_fold(pool, [(address(s), address(v), v.size)], "float32", True, ring)
        for link, s, v in zip(links, sums, sources, strict=True)
    ]
    for ticket, total, source in zip(tickets, sums, sources, strict=True):
        assert ticket.wait(30)
        assert np.array_equal(total, source)
    for closing in (*links, pool):
        closing.close()


def test_priority_decides_at_every_piece(native):
    """A late urgent copy passes a bulk one after the pieces in flight, not behind its hundreds."""
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 1, 4000), max_in_flight=2)
    source = np.ones(400_000, np.uint8)
    bulk_target, urgent_target = np.zeros_like(source), np.zeros(10, np.uint8)
    bulk = link.copy(_plan(native, bulk_target, source, 1000), priority=10)
    while not bulk.pieces_done:
        time.sleep(0.001)
    urgent = link.copy(_plan(native, urgent_target, source[:10], 1000), priority=0)
    assert urgent.wait(30)
    assert bulk.pieces_issued < 200
    link.close()


def test_at_most_two_pieces_are_in_flight(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 1, 1000), max_in_flight=2)
    source = np.ones(50_000, np.uint8)
    target = np.zeros_like(source)
    ticket = link.copy(_plan(native, target, source, 1000))
    while not ticket.done:
        # Read in this order: more may be done by the second read, never less.
        issued = ticket.pieces_issued
        assert issued - ticket.pieces_done <= 2
        time.sleep(0.0005)
    link.close()


@pytest.mark.parametrize("shuffle_seed", [0, 1, 2])
def test_reordered_jobs_bring_the_same_bytes(native, shuffle_seed):
    engine = native.ScriptedEngine(native.MemcpyEngine(), shuffle_seed, 300)
    link = native.Link(engine, max_in_flight=3, shuffle_seed=shuffle_seed)
    sources = [np.full(5000, i, np.uint8) for i in range(10)]
    targets = [np.zeros_like(s) for s in sources]
    tickets = [link.copy(_plan(native, t, s, 700)) for s, t in zip(sources, targets, strict=True)]
    assert all(ticket.wait(30) for ticket in tickets)
    assert np.array_equal(np.stack(sources), np.stack(targets))
    link.close()


EVENT = 0x10  # the scripted engine takes any handle


def test_one_link_serves_what_is_ready_while_another_awaits_its_event(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 4, 400_000), awaits_events=True)
    source = np.arange(1000, dtype=np.uint8)
    late, early = np.zeros_like(source), np.zeros_like(source)
    waits = link.copy(_plan(native, late, source, 1000), 0, event=EVENT)
    ready = link.copy(_plan(native, early, source, 1000), 1)
    assert ready.wait_issued(0.05), "it stood behind a copy that waits for computation"
    assert waits.wait(30)
    assert ready.wait(30)
    assert np.array_equal(late, source)
    assert np.array_equal(early, source)
    link.close()


def test_closing_does_not_wait_for_an_event(native):
    engine = native.ScriptedEngine(native.MemcpyEngine(), 4, 30_000_000)
    link = native.Link(engine, awaits_events=True)
    source, target = np.ones(10, np.uint8), np.zeros(10, np.uint8)
    ticket = link.copy(_plan(native, target, source, 10), event=EVENT)
    assert not ticket.wait_issued(0.05)
    link.close()
    assert ticket.failed
    assert not target.any()


def test_too_short_a_predecessor_is_refused(native):
    pool = native.Pool(1, [])
    gate = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 0, 50_000))
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
    slow = gate.copy(_plan(native, target, source, 500))
    link = native.Link(native.MemcpyEngine())
    with pytest.raises(ValueError, match=r"3 pieces.*2"):
        link.copy(_plan(native, target, source, 400), piecewise=slow)
    for closing in (gate, link, pool):
        closing.close()


def test_many_callers_may_use_one_link(native):
    link = native.Link(native.MemcpyEngine())
    source = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    targets = [np.zeros_like(source) for _ in range(8)]

    def work(target: np.ndarray) -> None:
        for _ in range(20):
            assert link.copy(_plan(native, target, source, 9000)).wait(30)

    threads = [threading.Thread(target=work, args=(t,)) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(source, t) for t in targets)
    link.close()


def test_waiting_costs_nothing(native):
    """Idle pools and links, and a caller that waits, sleep in the kernel."""
    pool = native.Pool(2, [])
    link = native.Link(native.MemcpyEngine())
    slow = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 5, 1_000_000))
    source, target = np.ones(10, np.uint8), np.zeros(10, np.uint8)
    begin = time.process_time()
    ticket = slow.copy(_plan(native, target, source, 10))
    ticket.wait(1.0)
    time.sleep(0.3)
    assert time.process_time() - begin < 0.1
    for closing in (link, slow, pool):
        closing.close()
