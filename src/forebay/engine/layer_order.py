"""All micro-batches of a window through one block at a time, with the bits of one after the other.

Segments are numbered from the model's begin: 0 up to the first block's call, `i` from the `i`-th
call to the next one, the last one to the loss. For the window it is one backward in which every
parameter fires once for each micro-batch. See docs/decisions/0010.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.engine.crossings import Crossings
from forebay.engine.doors import door_behind
from forebay.engine.held_addends import HeldAddends
from forebay.engine.segments import SegmentUses, find_uses
from forebay.engine.turns import Turns
from forebay.errors import UnsupportedError
from forebay.model.stack import find_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from forebay.engine.engine import Engine

__all__ = ["LayerOrder"]

_log = logging.getLogger("forebay")

_INSTEAD = 'set forebay.accumulation_order: "microbatch"'


class LayerOrder:
    """Runs windows in layer order.

    Args:
        engine: Whose model and window.

    Raises:
        UnsupportedError: The model has no stack of blocks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._blocks = find_stack(engine.module)
        if not self._blocks:
            raise UnsupportedError(
                'accumulation_order "layer" needs a stack of blocks: an nn.ModuleList or '
                "nn.Sequential of at least two modules with parameters",
                hint=_INSTEAD,
            )
        self._seen: dict[int, set[int]] | None = None
        _say_what_differs(engine.module)

    def backward(self, losses: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Forward and backward of a window; `step()` may follow.

        Args:
            losses: For each micro-batch, what computes its share of the loss, a scalar.

        Returns:
            The shares, without their graphs.

        Raises:
            UnsupportedError: The model's forward cannot be cut between its blocks.
            GradientError: A backward of this window raised.
        """
        run = _Run(self._engine, self._blocks, count=len(losses))
        window = self._engine.collector.window
        try:
            with (
                self._engine.hooks.one_pass.by_turns(),
                self._engine.streaming.residency.one_pass.by_turns(),
                _called(self._blocks, run.arrive),
            ):
                functions = [run.watched(number, loss) for number, loss in enumerate(losses)]
                shares = run.turns.run(functions, done=lambda m, loss: self._finish(run, m, loss))
            run.check_ends()
            for segment in range(run.last - 1, -1, -1):
                for number in range(len(losses)):
                    run.backward(segment, number)
                run.release(segment)
            run.close()
        except BaseException as error:
            window.abandon_open(f"a window in layer order raised {type(error).__name__}")
            raise
        finally:
            self._engine.collector.held = None
        return [share.detach() for share in shares]

    def _finish(self, run: _Run, number: int, loss: torch.Tensor) -> None:
        """A forward has ended: its last segment goes back at once, so that logits are one's own."""
        if number == 0:
            if self._seen is None:
                self._seen = run.leaves_by_segment(loss)
            run.open(find_uses(self._engine, run.called, seen=self._seen))
        run.finish(number, loss)
        if number == run.count - 1:
            run.release(run.last)


def _say_what_differs(root: nn.Module) -> None:
    drops = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    if drops:
        _log.warning(
            "accumulation_order layer: micro-batches draw by turns, so dropout (%s%s) drops others "
            "than in microbatch order",
            drops[0],
            ", ..." if len(drops) > 1 else "",
        )


class _Run:
    """One window."""

    def __init__(self, engine: Engine, blocks: Sequence[nn.Module], *, count: int) -> None:
        self._engine = engine
        self._blocks = blocks
        self.count = count
        self.turns: Turns[torch.Tensor] = Turns(engine.accelerator)
        self.called: list[nn.Module] = []
        self._crossings = [Crossings() for _ in range(count)]
        self._span: contextlib.ExitStack = contextlib.ExitStack()
        self.held = HeldAddends({}, deliver=engine.collector.deliver)
        self._uses = SegmentUses(shared={}, shown={}, units={})

    @property
    def last(self) -> int:
        """The number of the last segment."""
        return len(self.called)

    def arrive(self, block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward calls a block."""
        number = None if torch._C._current_graph_task_id() >= 0 else self.turns.number
        if number is None:
            return call(*args, **kwargs)
        if not torch.is_grad_enabled():
            _refuse_reentrant()
            return call(*args, **kwargs)
        crossings = self._crossings[number]
        self._check_same(block, number=number, place=crossings.segment)
        self.turns.pause()
        crossings.begin_segment()
        args, kwargs = crossings.through((args, kwargs))
        with crossings.inside_block():
            return call(*args, **kwargs)

    def watched(self, number: int, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A micro-batch's forward, whose tensors pass through doors between segments."""

        def _loss() -> torch.Tensor:
            with self._crossings[number].watching():
                return loss()

        return _loss

    def _check_same(self, block: nn.Module, *, number: int, place: int) -> None:
        if number == 0:
            self.called.append(block)
        elif place >= len(self.called) or self.called[place] is not block:
            raise UnsupportedError(
                f"micro-batch {number} calls other blocks than the first one (call {place}), and "
                "in layer order all of them pass the same",
                hint=_INSTEAD,
            )

    def check_ends(self) -> None:
        """Refuse micro-batches that called fewer blocks."""
        for number, crossings in enumerate(self._crossings):
            if crossings.segment != self.last:
                raise UnsupportedError(
                    f"micro-batch {number} calls {crossings.segment} blocks and the first one "
                    f"{self.last}; in layer order all of them pass the same",
                    hint=_INSTEAD,
                )

    def leaves_by_segment(self, loss: torch.Tensor) -> dict[int, set[int]]:
        """For each leaf's id, the segments of the first micro-batch whose graph reaches it.

        Raises:
            UnsupportedError: A segment's graph reaches into an earlier one.
        """
        found: dict[int, set[int]] = {}
        first = self._crossings[0]
        for segment, doors in enumerate(first.doors):
            nodes = [door.node for door in doors]
            if segment == self.last:
                nodes.append(loss.grad_fn)
            for leaf in self._leaves(nodes, begin=first.begins[segment]):
                found.setdefault(leaf, set()).add(segment)
        return found

    def _leaves(self, nodes: Sequence[Any], *, begin: int) -> set[int]:
        pending = [node for node in nodes if node is not None]
        seen, leaves = set(pending), set()
        while pending:
            node = pending.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.add(id(leaf))
                continue
            if door_behind(node) is not None:
                continue
            if node._sequence_nr() < begin:
                raise UnsupportedError(
                    "a tensor with a gradient passes over a block and is read where nobody sees it "
                    "(inside a later block that is not called with it, or by a function of its own "
                    "autograd)",
                    hint="call the block with the tensor, or " + _INSTEAD,
                )
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    pending.append(source)
        return leaves

    def open(self, uses: SegmentUses) -> None:
        """The window's backward begins."""
        self._uses = uses
        self.held = HeldAddends(uses.shared, deliver=self._engine.collector.deliver)
        self._engine.collector.held = self.held
        self._engine.hooks.end_pass()
        self._span.enter_context(self._engine.collector.window.spanning())

    def close(self) -> None:
        """The window's backward has ended."""
        self._span.close()

    def release(self, segment: int) -> None:
        """All micro-batches have gone back through a segment: what is complete may leave."""
        self.held.release(segment)
        self._engine.collector.complete(self._uses.units.get(segment, ()))

    def finish(self, number: int, loss: torch.Tensor) -> None:
        """Backward of the last segment of one micro-batch."""
        self._back([loss], segment=self.last, number=number)

    def backward(self, segment: int, number: int) -> None:
        """Backward of one segment of one micro-batch, after the one behind it."""
        doors = self._crossings[number].doors
        leaving, doors[segment] = doors[segment], []
        roots = [root for door in leaving if (root := door.root()) is not None]
        if roots:
            self._back(roots, segment=segment, number=number)

    def _back(self, roots: Sequence[torch.Tensor], *, segment: int, number: int) -> None:
        self.held.segment, self.held.micro_batch = segment, number
        earlier = self._crossings[number].doors[:segment]
        # What this segment uses of earlier ones, with what later ones have brought for it.
        used = [door for doors in earlier for door in doors if segment in door.users]
        taken = [found for door in used if (found := door.take()) is not None]
        resumed = self.held.resume(self._uses.shown.get(segment, ()))
        handle = roots[0].register_hook(self._note_task)
        try:
            torch.autograd.backward(
                [  # type: ignore[arg-type]
                    *roots,
                    *(edge for edge, _ in taken),
                    *(record.param for record, _ in resumed),
                ],
                [*(None for _ in roots), *(gradient for _, gradient in (*taken, *resumed))],
            )
        finally:
            handle.remove()

    def _note_task(self, _grad: torch.Tensor) -> None:
        self.held.task = torch._C._current_graph_task_id()


@contextlib.contextmanager
def _called(blocks: Sequence[nn.Module], arrive: Callable[..., Any]) -> Iterator[None]:
    """Inside it, calls of the blocks go through `arrive`; hooks, names and identity stay."""
    before = [(block, type(block)) for block in blocks]
    for block, kind in before:
        block.__class__ = _stopping(kind, arrive)
    try:
        yield
    finally:
        for block, kind in before:
            block.__class__ = kind


class _Stopping:
    """Comes first among the bases of a block's class during a window."""

    arrive: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        """Say nothing to the block's own class, which may register or change what derives of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        return type(self).arrive(self, call, args, kwargs)


def _stopping(kind: type[nn.Module], arrive: Callable[..., Any]) -> type[nn.Module]:
    inside = {"arrive": staticmethod(arrive), "__module__": kind.__module__}
    return type(kind.__name__, (_Stopping, kind), inside)


def _refuse_reentrant() -> None:
    """Refuse a block that is called inside a reentrant checkpoint, where the graph has no seam."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            raise UnsupportedError(
                "a block is called inside a reentrant checkpoint, where its graph cannot be cut",
                hint="checkpoint with use_reentrant=False, or inside the block's forward, or "
                + _INSTEAD,
            )
        frame = frame.f_back
