"""What scripts use of `deepspeed.zero`: windows on parameters, external parameters."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import distributed, nn

from forebay.compat.flags import check_flags
from forebay.engine.collector import hook_of
from forebay.engine.watched import WatchedParameters
from forebay.engine.whole_state import take_from_rank
from forebay.errors import ConfigError, UnsupportedError
from forebay.model.external import mark_external, unmark_external
from forebay.model.unbuilt import UnbuiltWeight, build_in_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay.engine.engine import Engine

__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_Model = TypeVar("_Model")


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Inside it, parameters are on the device and readable; what is written into them stays.

    A parameter that `Init` has left without memory gets it for good, on every rank.

    Args:
        params: A parameter, several, or a module whose parameters are meant.
        modifier_rank: The rank whose writes all ranks take over; None says that all of them
            write the same, or none does.
        fwd_module: A module whose forward will read the parameters; declared as
            `register_external_parameter` does.
        enabled: False does nothing.

    Raises:
        BudgetError: They do not fit on the device together; gather fewer at a time.

    Example:
        >>> with forebay.zero.GatheredParameters(model.head.weight):  # doctest: +SKIP
        ...     nn.init.normal_(model.head.weight)
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        check_flags("zero.GatheredParameters", enabled=enabled)
        if isinstance(params, nn.Module):
            chosen = list(params.parameters())
        elif isinstance(params, torch.Tensor):
            chosen = [cast("nn.Parameter", params)]
        else:
            chosen = list(params)
        self._frozen = _frozen_of(params) if isinstance(params, nn.Module) and enabled else []
        self._params: list[nn.Parameter] = chosen if enabled else []
        self._modifier = modifier_rank
        self._stack = contextlib.ExitStack()
        # The engine of one of them.
        self._engine: Engine | None = None
        if fwd_module is not None and enabled:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        for param in self._params:
            if isinstance(param, UnbuiltWeight):
                build_in_place(param)
        with contextlib.ExitStack() as stack:
            found = [hook_of(param) for param in self._params]
            by_engine = {id(hook.engine): hook.engine for hook in found if hook is not None}
            self._engine = next(iter(by_engine.values()), None)
            for engine in by_engine.values():
                records = [h.record for h in found if h is not None and h.engine is engine]
                engine.quiesce("a window on parameters")
                stack.enter_context(engine.streaming.window(records))
            for watched, param in self._frozen:
                stack.enter_context(watched.showing(param, self._modifier))
            _refuse_away(self._params)
            self._stack = stack.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        if self._modifier is not None and exc_info[0] is None:
            # those that come and go are taken over where they are shown
            shown = {id(param) for _, param in self._frozen}
            for param in (one for one in self._params if id(one) not in shown):
                hook = hook_of(param)
                # nothing on a frozen parameter says whose it is; every rank has it whole
                engine = self._engine if hook is None else hook.engine
                if engine is not None:
                    take_from_rank(engine, param, rank=self._modifier)
                elif distributed.is_available() and distributed.is_initialized():
                    self._spread(param.data, self._modifier)
        self._stack.close()

    def _spread(self, value: torch.Tensor, rank: int) -> None:
        """Give all ranks one's value; before `initialize` it lies on the host."""
        group = None
        if value.device.type == "cpu" and "cpu:" not in distributed.get_backend_config():
            # NCCL knows no tensors on the host; every rank comes here for the same ones.
            group = distributed.new_group(backend="gloo")
        distributed.broadcast(value, src=rank, group=group)
        if group is not None:
            distributed.destroy_process_group(group)


def _frozen_of(module: nn.Module) -> list[tuple[WatchedParameters, nn.Parameter]]:
    """Frozen parameters of a module that come and go, with who brings them."""
    return [
        (owner._parameters, param)
        for owner in module.modules()
        if isinstance(owner._parameters, WatchedParameters)
        for param in owner._parameters.values()
        if param is not None and hook_of(param) is None
    ]


def _refuse_away(params: Iterable[nn.Parameter]) -> None:
    """Nothing on a frozen parameter says whose it is; its module does."""
    for param in params:
        if hook_of(param) is None and param.numel() > 1 and not any(param.stride()):
            raise UnsupportedError(
                f"a frozen parameter of shape {tuple(param.shape)} is not on the device, and only "
                "its module can bring it",
                hint="GatheredParameters(module), or read it as module.weight",
            )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module's forward reads a parameter that it does not own.

    Needed only where it is not read as `owner.weight` (that is noticed): a parameter kept in a
    list or a closure.

    Args:
        module: Whose forward reads it.
        parameter: A parameter of the same model; before or after forebay took it over.
    """
    mark_external(module, parameter)
    hook = hook_of(parameter)
    if hook is not None:
        hook.engine.streaming.declare(module, parameter)


@contextlib.contextmanager
def unwrap_model_for_generation(model: _Model) -> Iterator[_Model]:
    """Inside it all weights are on the device, so that many forwards bring none of them.

    Args:
        model: The model, or the engine over it; it is what the block gets.

    Raises:
        BudgetError: They do not fit on the device together.
    """
    inner = getattr(model, "module", None)
    module = model if isinstance(model, nn.Module) else inner
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"unwrap_model_for_generation is given a {type(model).__name__}",
            hint="pass the model, or the engine that initialize returned",
        )
    with GatheredParameters(module):
        yield model


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take such a declaration back, for engines that are still to come."""
    unmark_external(module, parameter)
