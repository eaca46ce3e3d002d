"""The ledger counts every byte and refuses before anything is allocated."""

from __future__ import annotations

import gc
import threading

import pytest

from forebay.errors import BudgetError
from forebay.tiers.ledger import Ledger, LedgerRow, Role, Tier


def test_counts_by_tier_and_role():
    ledger = Ledger()
    first = ledger.reserve(Tier.HOST, Role.OPTIM_STATES, 100, what="moments")
    ledger.reserve(Tier.HOST, Role.STAGING, 7, what="staging")
    ledger.reserve(Tier.DEVICE, Role.LP_PARAMS, 50, what="weights")
    assert ledger.table() == (
        LedgerRow(Tier.DEVICE, Role.LP_PARAMS, 50),
        LedgerRow(Tier.HOST, Role.OPTIM_STATES, 100),
        LedgerRow(Tier.HOST, Role.STAGING, 7),
    )
    assert ledger.bytes(Tier.HOST) == 107
    assert ledger.bytes(Tier.HOST, Role.STAGING) == 7
    first.release()
    assert ledger.bytes(Tier.HOST) == 7
    assert ledger.peak_bytes(Tier.HOST) == 107
    ledger.check()


def test_refuses_over_budget_with_both_numbers_and_a_way_out():
    ledger = Ledger({Tier.HOST: 24 << 30})
    held = ledger.reserve(Tier.HOST, Role.HP_PARAMS, 4 << 30, what="masters")
    with pytest.raises(BudgetError) as refused:
        ledger.reserve(Tier.HOST, Role.OPTIM_STATES, 41 << 30, what="optimizer state")
    text = str(refused.value)
    assert "41.0 GiB of optimizer state" in text
    assert "24.0 GiB" in text
    assert "4.0 GiB" in text
    assert text.endswith("hint: raise forebay.host_budget to 45GiB")
    assert ledger.table() == (LedgerRow(Tier.HOST, Role.HP_PARAMS, 4 << 30),)
    held.release()
    ledger.reserve(Tier.HOST, Role.OPTIM_STATES, 24 << 30, what="exactly the budget")


def test_release_is_idempotent():
    ledger = Ledger({Tier.NVME: 10})
    with ledger.reserve(Tier.NVME, Role.STAGING, 10, what="a file") as reservation:
        assert not reservation.released
    reservation.release()
    assert reservation.released
    assert ledger.bytes(Tier.NVME) == 0
    ledger.check()


def test_zero_and_negative_bytes():
    ledger = Ledger({Tier.HOST: 0})
    ledger.reserve(Tier.HOST, Role.STAGING, 0, what="nothing").release()
    with pytest.raises(ValueError, match="-1 bytes"):
        ledger.reserve(Tier.HOST, Role.STAGING, -1, what="less")
    with pytest.raises(ValueError, match="negative"):
        Ledger({Tier.HOST: -1})


def test_none_is_no_budget():
    ledger = Ledger({Tier.HOST: None})
    assert ledger.budget(Tier.HOST) is None
    ledger.reserve(Tier.HOST, Role.STAGING, 1 << 60, what="a lot")


def test_check_finds_broken_bookkeeping():
    ledger = Ledger()
    reservation = ledger.reserve(Tier.HOST, Role.STAGING, 5, what="five")
    reservation.nbytes = 6
    with pytest.raises(AssertionError, match="reservations"):
        ledger.check()


def test_threads_reserve_and_release_together():
    ledger = Ledger({Tier.HOST: 8 * 3})

    def work():
        for _ in range(500):
            ledger.reserve(Tier.HOST, Role.STAGING, 3, what="a slot").release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.bytes(Tier.HOST) == 0
    ledger.check()


def test_a_finalizer_may_release_while_the_lock_is_held():
    """The collector can run anywhere, so a release must never wait for the ledger's lock."""
    ledger = Ledger()
    reservation = ledger.reserve(Tier.HOST, Role.STAGING, 5, what="garbage")

    class Cycle:
        def __del__(self):
            reservation.release()

    cycle = Cycle()
    cycle.itself = cycle
    del cycle
    with ledger._lock:
        gc.collect()
    assert ledger.bytes(Tier.HOST) == 0
