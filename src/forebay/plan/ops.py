"""The vocabulary of programs: operations, the lanes they run on, and what starts them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["UPDATING", "Lane", "Op", "OpKind", "Trigger", "TriggerKind", "Turn"]


class Lane(Enum):
    """The queue that executes an operation."""

    COMPUTE = "compute"
    DOWN = "down"
    UP = "up"
    HOST = "host"
    RANKS = "ranks"
    READ = "read"
    """From files to host memory."""
    WRITE = "write"
    """From host memory to files."""


class OpKind(Enum):
    """What an operation does."""

    REDUCE = "reduce"
    """Exchange a unit's gradient over the ranks and add up this rank's slice in rank order."""
    NORM = "norm"
    """Sum the squares of a unit's final gradient where it lives."""
    LAND = "land"
    """Bring a unit's gradient to the host."""
    LAND_FOLD = "land_fold"
    """Bring one backward's addends to the host and add them to the fp32 sums."""
    AGREE = "agree"
    """Norm, finiteness and presence, once for the whole model and all ranks."""
    UPDATE = "update"
    """Update a unit's masters, moments and weights."""
    IMPORTANT = "important"
    """Update a unit's important columns, whose state is on the device."""
    GATHER_REST = "gather_rest"
    """Add a unit's landed gradient to what is gathered of its rest until an interval ends."""
    PUBLISH = "publish"
    """Bring a unit's new weights to the device."""
    GATHER = "gather"
    """Collect a unit's new weights from the ranks that updated them."""
    FETCH = "fetch"
    """Bring a streamed unit's state to the device, when there is room."""
    KEEP = "keep"
    """Keep a streamed unit's gradient on the device, or land it when its state found no room."""
    ACTIVATION = "activation"
    """Move a block's input to the host or back; no part of a program, since shapes are the data's:
    the simulator is told them (`plan.input_moves`)."""
    LOAD = "load"
    """Bring a unit's weights, which live on the host, to the device for a pass."""
    READ_WEIGHTS = "read_weights"
    """Bring a unit's weights from files to host memory for a pass; they are loaded from there."""
    WRITE_BACK = "write_back"
    """Send a streamed unit's updated state home (or publish, when the host updated it)."""
    GATHER_WEIGHTS = "gather_weights"
    """Collect a unit's weights for a pass from the ranks, each of which holds a slice."""
    READ = "read"
    """Bring a unit's state from files into buffers: ahead of the update as far as they go."""
    STORE = "store"
    """Write a unit's updated state, and its weights if they are in files, each piece once it is
    updated."""


# The operations of the update itself, in whatever turn they begin.
UPDATING = frozenset({OpKind.UPDATE, OpKind.PUBLISH, OpKind.WRITE_BACK, OpKind.GATHER})


class TriggerKind(Enum):
    """What starts an operation."""

    GRADIENT = "gradient"
    """A unit's gradient of the present backward is complete."""
    FORWARD_USE = "forward_use"
    """A forward is about to use a unit whose weights live on the host, as far as the order is
    known; a hint, by which the pool's policy loads ahead."""
    BACKWARD_USE = "backward_use"
    """A backward is."""
    BACKWARD = "backward"
    """The window's last backward begins."""
    STEP = "step"
    """The optimizer's step."""


class Turn(Enum):
    """In which backward of a window a gradient operation runs."""

    EVERY = "every"
    EARLIER = "earlier"
    """Every one but the last."""
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A kind and, for unit triggers, the unit's index."""

    kind: TriggerKind
    unit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        kind: What it does.
        lane: Where it runs.
        trigger: What starts it.
        unit: Its unit's index; None for the agreement.
        nbytes: Bytes that it moves over its link when all gradients are present.
        after: Indices of its predecessors.
        after_last: Indices of its predecessors in the window before.
        turn: In which backward of the window.
        every: Of so many windows it is done in the last one alone.
        index: Its number in the program; the builder gives it.
    """

    kind: OpKind
    lane: Lane
    trigger: Trigger
    unit: int | None = None
    nbytes: int = 0
    after: tuple[int, ...] = ()
    after_last: tuple[int, ...] = ()
    turn: Turn = Turn.LAST
    every: int = 1
    index: int = -1
