"""Whole windows at once: what `accumulation_order: "layer"` needs, and a shorter loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from forebay.compat.flags import check_flags
from forebay.engine.layer_order import LayerOrder
from forebay.errors import ConfigError, UnsupportedError
from forebay.plan.placement import AccumulationOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.compat.batches import MicroBatches
    from forebay.compat.steps import MicroSteps
    from forebay.engine.engine import Engine

__all__ = ["Windows"]


class Windows:
    """Runs windows of micro-batches.

    Args:
        core: The engine that does the work.
        steps: The course of a window.
        batches: How many micro-batches one has, and in which order they pass the model.

    Raises:
        UnsupportedError: Layer order is asked for, and the model has no stack of blocks.
    """

    def __init__(self, core: Engine, *, steps: MicroSteps, batches: MicroBatches) -> None:
        self._core = core
        self._steps = steps
        self._batches = batches
        self._layers: LayerOrder | None = None
        if batches.order is AccumulationOrder.LAYER:
            self._layers = LayerOrder(core)

    def backward_window(
        self,
        batches: Sequence[Any],
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        scale_wrt_gas: bool = True,
    ) -> list[torch.Tensor]:
        """Forward and backward of a window's micro-batches; then call `step()` once.

        Args:
            batches: The micro-batches, as many as an update has.
            loss: From a micro-batch to its loss, a scalar; it calls the engine. None takes the
                model's own, with the micro-batch as its arguments, on the engine's device.
            scale_wrt_gas: As in `backward`.

        Returns:
            The losses, without their graphs.

        Raises:
            ConfigError: They are not as many as an update has.
            GradientError: A window is open already, or a backward of this one raised.
        """
        check_flags("backward_window", scale_wrt_gas=scale_wrt_gas)
        wanted = self._batches.per_update
        if len(batches) != wanted:
            raise ConfigError(
                f"a window of {len(batches)} micro-batches was given, and an update has {wanted}",
                hint="see gradient_accumulation_steps; train_batch() takes what is left at the end",
            )
        return self._backward(batches, loss=loss or self._own_loss, divide=scale_wrt_gas)

    def train_batch(
        self, data_iter: Iterator[Any], loss: Callable[[Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One update: a window's micro-batches from an iterator, backward and step.

        At the end of the data a window may have fewer; it is averaged over those that it has.

        Args:
            data_iter: Gives micro-batches; it is left where the window ends.
            loss: See `backward_window`.

        Returns:
            The mean of the micro-batches' losses, without a graph.

        Raises:
            StopIteration: There is no micro-batch left.
            UnsupportedError: It is no iterator.
        """
        if not isinstance(data_iter, Iterator):
            raise UnsupportedError(
                f"train_batch takes an iterator, not a {type(data_iter).__name__}, which would "
                "begin anew with each update",
                hint="it = iter(loader), once an epoch, then train_batch(it)",
            )
        batches = list(islice(data_iter, self._batches.per_update))
        if not batches:
            raise StopIteration
        losses = self._backward(batches, loss=loss or self._own_loss, divide=True)
        if len(batches) == self._batches.per_update:
            self._steps.step(None)
        else:
            self._steps.flush()
        return torch.stack([one.float() for one in losses]).mean()

    def _backward(
        self, batches: Sequence[Any], *, loss: Callable[[Any], torch.Tensor], divide: bool
    ) -> list[torch.Tensor]:
        self._batches.refuse_open("the order of micro-batches")
        functions = [partial(loss, batch) for batch in batches]
        if self._layers is not None:
            return self._steps.backward_together(functions, self._layers.backward, divide=divide)
        losses = []
        for number, function in enumerate(functions, start=1):
            value = function()
            self._steps.backward(value, retain_graph=False, divide=divide)
            losses.append(value.detach())
            del value
            if number < len(functions):
                self._steps.step(None)
        return losses

    def _own_loss(self, batch: Any) -> torch.Tensor:
        """The loss that the model itself computes."""
        device = self._core.accelerator.device

        def _there(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        batch = tree_map(_there, batch)
        if isinstance(batch, Mapping):
            found = self._core.module(**batch)
        elif isinstance(batch, list | tuple):
            found = self._core.module(*batch)
        else:
            found = self._core.module(batch)
        if isinstance(found, Mapping) and "loss" in found:
            found = found["loss"]
        elif isinstance(found, tuple) and found:
            found = found[0]
        found = getattr(found, "loss", found)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise UnsupportedError(
                f"the model returns no loss (but a {type(found).__name__})",
                hint="pass loss=..., a function from a micro-batch to its loss",
            )
        return found
