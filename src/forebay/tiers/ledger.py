"""The ledger: every byte that forebay places, by tier and role, against a budget.

It counts and refuses; it allocates nothing. Whoever allocates reserves first, so a placement
that does not fit fails before any memory is touched. Activations, workspaces and the CUDA
context belong to the user and to torch: they are measured elsewhere and never counted here as
ours.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from forebay.errors import BudgetError
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["Ledger", "LedgerRow", "Reservation", "Role", "Tier"]


class Tier(Enum):
    """A kind of memory, nearest to the arithmetic first."""

    DEVICE = "device"
    """The accelerator's memory (on `cpu`: a budgeted arena in host memory)."""
    HOST = "host"
    """Main memory of the machine."""
    NVME = "nvme"
    """Files on a fast disk."""


class Role(Enum):
    """What bytes are in training; the first five are those of `OffloadStateTypeEnum`."""

    LP_PARAMS = "lp_params"
    """Working weights, in the dtype that the model computes in."""
    LP_GRADS = "lp_grads"
    """Gradients in the dtype in which they leave backward."""
    HP_PARAMS = "hp_params"
    """fp32 masters, or the low 16 bits that complete a bf16 weight to one."""
    OPTIM_STATES = "optim_states"
    """First and second moments."""
    CONTIGUOUS_GRAD_BUFFER = "contiguous_grad_buffer"
    """fp32 sums of several backwards."""
    ACTIVATIONS = "activations"
    """Saved activations that forebay itself moved."""
    STAGING = "staging"
    """Buffers that bytes pass through on their way."""


class LedgerRow(NamedTuple):
    """Bytes reserved for one role on one tier."""

    tier: Tier
    role: Role
    nbytes: int


class Reservation:
    """Bytes taken from a budget until `release`.

    Made by `Ledger.reserve` alone. A context manager; releasing twice is harmless.

    Attributes:
        tier: Where the bytes lie.
        role: What they are in training.
        nbytes: How many.
        what: A short noun phrase for messages, such as "first moments of 30 units".
    """

    __slots__ = ("_ledger", "nbytes", "role", "tier", "what")

    def __init__(self, ledger: Ledger, *, tier: Tier, role: Role, nbytes: int, what: str) -> None:
        self._ledger: Ledger | None = ledger
        self.tier = tier
        self.role = role
        self.nbytes = nbytes
        self.what = what

    @property
    def released(self) -> bool:
        """Whether the bytes were given back."""
        return self._ledger is None

    def release(self) -> None:
        """Give the bytes back to the budget (thread-safe, idempotent, legal in a finalizer)."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.give_back(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return (
            f"Reservation({self.tier.value}/{self.role.value}: {self.nbytes} bytes"
            f" of {self.what}, {state})"
        )


class Ledger:
    """Bytes by tier and role, with a budget for each tier.

    Thread-safe: reservations are taken and released from any thread.

    Args:
        budgets: Upper bound in bytes for a tier; a tier that is absent or None has no bound.

    Example:
        >>> ledger = Ledger({Tier.HOST: 1 << 20})
        >>> moments = ledger.reserve(Tier.HOST, Role.OPTIM_STATES, 4096, what="moments")
        >>> ledger.bytes(Tier.HOST)
        4096
        >>> moments.release()
        >>> ledger.bytes(Tier.HOST)
        0
    """

    def __init__(self, budgets: Mapping[Tier, int | None] | None = None) -> None:
        self._budgets = {
            tier: value for tier, value in (budgets or {}).items() if value is not None
        }
        for tier, value in self._budgets.items():
            if value < 0:
                raise ValueError(f"the {tier.value} budget is negative: {value} bytes")
        self._lock = threading.Lock()
        self._live: dict[int, Reservation] = {}
        self._bytes: dict[tuple[Tier, Role], int] = {}
        self._peak: dict[Tier, int] = {}
        # Finalizers release too, and the garbage collector may run one while this thread holds
        # the lock. So a release only appends here, which is atomic, and whoever takes the lock
        # next settles it.
        self._returned: deque[Reservation] = deque()

    def budget(self, tier: Tier) -> int | None:
        """The bound of a tier in bytes, None when it has none."""
        return self._budgets.get(tier)

    def reserve(self, tier: Tier, role: Role, nbytes: int, *, what: str) -> Reservation:
        """Take bytes from a tier's budget; call it before allocating.

        Args:
            tier: Where the bytes will lie.
            role: What they are in training.
            nbytes: How many, as they will really be taken (after page rounding).
            what: A short noun phrase for messages.

        Returns:
            The reservation, to be released when the memory is.

        Raises:
            BudgetError: The tier's budget does not hold them. Nothing was reserved.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes for {what}")
        reservation = Reservation(self, tier=tier, role=role, nbytes=nbytes, what=what)
        with self._lock:
            self._settle()
            held = self._tier_bytes(tier)
            budget = self._budgets.get(tier)
            if budget is not None and held + nbytes > budget:
                raise _over_budget(tier, nbytes=nbytes, held=held, budget=budget, what=what)
            self._live[id(reservation)] = reservation
            self._bytes[tier, role] = self._bytes.get((tier, role), 0) + nbytes
            self._peak[tier] = max(self._peak.get(tier, 0), held + nbytes)
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        """Take a reservation back; call `Reservation.release` instead."""
        self._returned.append(reservation)

    def bytes(self, tier: Tier, role: Role | None = None) -> int:
        """Bytes reserved on a tier now, for one role or for all."""
        with self._lock:
            self._settle()
            if role is None:
                return self._tier_bytes(tier)
            return self._bytes.get((tier, role), 0)

    def peak_bytes(self, tier: Tier) -> int:
        """The most bytes that were ever reserved on a tier at once."""
        with self._lock:
            self._settle()
            return self._peak.get(tier, 0)

    def table(self) -> tuple[LedgerRow, ...]:
        """What is reserved now: one row for each tier and role that holds bytes."""
        with self._lock:
            self._settle()
            return tuple(
                LedgerRow(tier, role, self._bytes[tier, role])
                for tier in Tier
                for role in Role
                if self._bytes.get((tier, role), 0)
            )

    def reservations(self) -> tuple[Reservation, ...]:
        """The reservations that are held now, oldest first."""
        with self._lock:
            self._settle()
            return tuple(self._live.values())

    def check(self) -> None:
        """Verify conservation: counters equal live reservations, and no budget is exceeded.

        Raises:
            AssertionError: forebay's own bookkeeping is broken.
        """
        with self._lock:
            self._settle()
            summed: dict[tuple[Tier, Role], int] = {}
            for held in self._live.values():
                key = (held.tier, held.role)
                summed[key] = summed.get(key, 0) + held.nbytes
            counted = {key: value for key, value in self._bytes.items() if value}
            summed = {key: value for key, value in summed.items() if value}
            if counted != summed:
                raise AssertionError(f"the ledger counts {counted}, its reservations {summed}")
            for tier, budget in self._budgets.items():
                if self._tier_bytes(tier) > budget:
                    raise AssertionError(
                        f"{self._tier_bytes(tier)} bytes on {tier.value}, budget {budget}"
                    )

    def _tier_bytes(self, tier: Tier) -> int:
        return sum(value for (at, _), value in self._bytes.items() if at is tier)

    def _settle(self) -> None:
        """Subtract what was given back since; the lock is held."""
        while self._returned:
            reservation = self._returned.popleft()
            if self._live.pop(id(reservation), None) is not None:
                self._bytes[reservation.tier, reservation.role] -= reservation.nbytes


_BUDGET_KEYS = {
    Tier.DEVICE: "forebay.device_budget",
    Tier.HOST: "forebay.host_budget",
    Tier.NVME: "forebay.nvme_budget",
}


def _over_budget(tier: Tier, *, nbytes: int, held: int, budget: int, what: str) -> BudgetError:
    needed = held + nbytes
    return BudgetError(
        f"cannot place {format_bytes(nbytes)} of {what} on the {tier.value} tier: its budget is "
        f"{format_bytes(budget)}, of which {format_bytes(held)} are taken",
        hint=f"raise {_BUDGET_KEYS[tier]} to {budget_text(needed)}",
    )
