"""Page-locking in the background: late, refused, given back at any moment, never in the way."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from forebay.accelerators.cpu import CpuAccelerator
from forebay.engine import EngineOptions, offload_with
from forebay.errors import ForebayWarning
from forebay.plan import SixteenBitMaster, UpdatePlace
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role, Tier
from forebay.tiers.page_locking import PageLocking
from unit.engine_cases import adamw, batches, loss_of, mlp, offloaded, run, same, weights

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.timeout(60)


def arena_of(nbytes, *, locking, ledger=None):
    return HostArena(
        nbytes,
        ledger=ledger or Ledger(),
        role=Role.OPTIM_STATES,
        what="moments",
        page_locking=locking,
    )


class Locker:
    """A copy engine's page locking, recorded; refuses past a limit, and waits for a gate."""

    def __init__(self, limit=None, *, closed=False):
        self.limit = limit
        self.held = {}
        self.asked = 0
        self.threads = set()
        self.entered = threading.Event()
        self.gate = threading.Event()
        if not closed:
            self.gate.set()

    def register_host(self, address, nbytes, /):
        self.asked += 1
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(30)
        if self.limit is not None and sum(self.held.values()) + nbytes > self.limit:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.held
        self.held[address] = nbytes

    def unregister_host(self, address, /):
        del self.held[address]


def test_pages_are_locked_at_exact_size_and_unlocked():
    locker = Locker()
    locking = PageLocking(locker)
    arena = arena_of(3 * PAGE - 5, locking=locking)
    assert locking.wait(10)
    assert arena.locked
    assert locker.held == {arena.address: 3 * PAGE}
    assert locking.locked_bytes == 3 * PAGE
    arena.close()
    assert not arena.locked
    assert (locker.held, locking.locked_bytes) == ({}, 0)
    assert threading.get_ident() not in locker.threads


def test_part_of_an_arena():
    locker = Locker()
    locking = PageLocking(locker)
    arena = arena_of(5 * PAGE, locking=None)
    arena.lock(locking, nbytes=PAGE + 1)
    empty = arena_of(PAGE, locking=None)
    empty.lock(locking, nbytes=0)
    assert locking.wait(10)
    assert locker.held == {arena.address: 2 * PAGE}
    assert not empty.locked


def test_nobody_waits_for_it():
    locker = Locker(closed=True)
    locking = PageLocking(locker)
    arenas = [arena_of(PAGE, locking=locking) for _ in range(3)]
    assert locker.entered.wait(10)
    assert not any(arena.locked for arena in arenas)
    assert not locking.wait(0.01)
    assert locking.waiting_bytes == 2 * PAGE
    for arena in arenas:  # memory is used meanwhile
        arena.tensor(torch.uint8, offset_bytes=0, elements=PAGE).fill_(1)
    locker.gate.set()
    assert locking.wait(10)
    assert all(arena.locked for arena in arenas)
    assert locking.waiting_bytes == 0


def test_closing_what_waits_and_what_is_being_locked():
    """What waits is forgotten; what the driver is at stays mapped until it has been unlocked."""
    ledger, locker = Ledger(), Locker(closed=True)
    locking = PageLocking(locker)
    first, second = (arena_of(PAGE, ledger=ledger, locking=locking) for _ in range(2))
    assert locker.entered.wait(10)
    for arena in (first, second):
        arena.close()
    del first, second, arena
    gc.collect()
    assert ledger.bytes(Tier.HOST) == PAGE
    locker.gate.set()
    assert locking.wait(10)
    assert (locker.asked, locker.held, locking.locked_bytes) == (1, {}, 0)
    assert ledger.bytes(Tier.HOST) == 0


def test_creating_and_dropping_leaves_nothing():
    ledger, locker = Ledger(), Locker()
    locking = PageLocking(locker)
    for _ in range(50):
        arena_of(PAGE, ledger=ledger, locking=locking)
    gc.collect()
    assert locking.wait(10)
    assert (ledger.bytes(Tier.HOST), locker.held, locking.locked_bytes) == (0, {}, 0)


def test_refusal_falls_back_and_is_said_once_by_the_caller():
    """The driver calls it "out of memory"; the message names host memory and the bytes."""
    locking = PageLocking(Locker(limit=PAGE))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        locking.report()
        arenas = [arena_of(2 * PAGE, locking=locking) for _ in range(3)]
        assert locking.wait(10)
        assert not caught
        locking.report()
        locking.report()
    (warning,) = caught
    assert warning.category is ForebayWarning
    assert f"({2 * PAGE} bytes) of host memory" in str(warning.message)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(warning.message)
    assert not any(arena.locked for arena in arenas)
    assert locking.pageable_bytes == 6 * PAGE
    arenas[0].tensor(torch.uint8, offset_bytes=0, elements=2 * PAGE).fill_(1)


def test_the_rest_is_locked_after_a_refusal():
    locker = Locker(limit=PAGE)
    locking = PageLocking(locker)
    large, small = arena_of(2 * PAGE, locking=locking), arena_of(PAGE, locking=locking)
    assert locking.wait(10)
    assert (large.locked, small.locked) == (False, True)


def test_the_program_ends_without_waiting_for_the_rest():
    code = """
import time
from forebay.tiers.page_locking import PageLocking
class Slow:
    def register_host(self, address, nbytes, /): time.sleep(0.2)
    def unregister_host(self, address, /): pass
locking = PageLocking(Slow())
locks = [locking.lock(4096 * i, nbytes=4096, what="x", keep=None) for i in range(1, 500)]
"""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert time.monotonic() - begin < 20  # all of it would take 100 s


def _train(options, locker=None, *, gate_after=None):
    model = mlp(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=options)[1]
    locking = None
    if locker is not None:
        locking = optimizer.engine.page_locking = PageLocking(locker)
        for unit in optimizer.engine.units:
            for part in unit.parts:
                for arena in (*part._state.arenas, part.landing.arena):
                    arena.lock(locking, nbytes=arena.nbytes)
    losses = run(model, optimizer, steps=2)
    if gate_after is not None:
        gate_after.gate.set()
    losses += run(model, optimizer, steps=2)
    result = weights(model)
    optimizer.close()
    if locking is not None:
        assert locking.wait(10)
        assert (locker.held, locking.locked_bytes) == ({}, 0)
    return losses, result


@pytest.mark.parametrize("update", [UpdatePlace.HOST, UpdatePlace.STREAMED])
def test_training_while_it_is_under_way(update):
    """Steps before, during and after give the same bits, and closing in the middle is safe."""
    options = EngineOptions(device="cpu", update=update)
    plain = _train(options)
    slow = Locker(closed=True)
    late = _train(options, slow, gate_after=slow)
    assert late[0] == plain[0]
    assert same(late[1], plain[1])
    refusing = Locker(limit=0)
    with pytest.warns(ForebayWarning, match="page-locking"):
        refused = _train(options, refusing)
    assert same(refused[1], plain[1])


def test_an_engine_closed_while_locking_runs():
    locker = Locker(closed=True)
    timer = threading.Timer(0.3, locker.gate.set)
    timer.start()
    _train(EngineOptions(device="cpu"), locker)
    timer.join()
    assert locker.asked < 6  # the one under way; the rest was forgotten


def _locked_bytes(master, update):
    from forebay.engine import build
    from forebay.model.inspect import inspect_model

    locking = PageLocking(Locker())
    model = mlp(torch.bfloat16)
    placement = build.place(
        inspect_model(model, groups=adamw(model).param_groups),
        options=EngineOptions(bf16_master=master, update=update),
        device=torch.device("cpu"),
    )
    memory = build.PartMemory(accelerator=CpuAccelerator(), ledger=Ledger(), page_locking=locking)
    units = build.build_units(
        inspect_model(model, groups=adamw(model).param_groups), placement=placement, memory=memory
    )
    assert locking.wait(10)
    elements = sum(part.layout.elements for unit in units for part in unit.parts)
    locked = locking.locked_bytes
    for unit in units:
        for part in unit.parts:
            part.close()
    return locked, elements


@pytest.mark.parametrize(
    ("master", "update", "crossing"),
    [
        (SixteenBitMaster.SPLIT, UpdatePlace.HOST, 2 + 2),  # gradient down, weight up
        (SixteenBitMaster.WHOLE, UpdatePlace.HOST, 2),  # the weight lies where the gradient was
        (SixteenBitMaster.SPLIT, UpdatePlace.STREAMED, 2 + 4 + 8),
        (SixteenBitMaster.WHOLE, UpdatePlace.STREAMED, 2 + 4 + 8),
        (SixteenBitMaster.SPLIT, UpdatePlace.DEVICE, 0),
    ],
)
def test_only_what_crosses_the_link_is_locked(master, update, crossing):
    locked, elements = _locked_bytes(master, update)
    # each of at most six arenas is rounded up to pages
    assert crossing * elements <= locked <= crossing * elements + 6 * PAGE * (crossing > 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_training_begins_before_memory_is_locked():
    """The first steps copy from and to pageable memory, later ones locked: the same bits."""

    def _steps(model, optimizer):
        losses = []
        for x in batches(2, torch.bfloat16, 1024):
            loss = loss_of(model, x.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def _run(page_lock):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).bfloat16()
        options = EngineOptions(device="cuda", update=UpdatePlace.HOST, page_lock=page_lock)
        optimizer = offload_with(model, adamw(model), options=options)[1]
        locking = optimizer.engine.page_locking
        losses = _steps(model, optimizer)
        if locking is not None:
            assert locking.wait(60)
            # gradients down and new weights up: 2 + 2 bytes of each parameter
            elements = sum(p.layout.elements for u in optimizer.engine.units for p in u.parts)
            assert locking.locked_bytes >= 4 * elements
        losses += _steps(model, optimizer)
        result = {name: value.cpu() for name, value in weights(model).items()}
        optimizer.close()
        assert locking is None or locking.locked_bytes == 0
        return losses, result

    plain, locked = _run(page_lock=False), _run(page_lock=True)
    assert locked[0] == plain[0]
    assert same(locked[1], plain[1])


def test_where_nothing_needs_locked_pages_there_is_nothing_to_wait_for():
    with offloaded(mlp()) as optimizer:
        locking = optimizer.engine.page_locking
        assert locking.wait(0.0)
        locking.report()
    assert locking.lock(PAGE, nbytes=PAGE, what="an example", keep=None) is None
    assert (locking.locked_bytes, locking.pageable_bytes, locking.waiting_bytes) == (0, 0, 0)
