"""`offload_states` and `reload_states` under DeepSpeed's names: device memory between phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from forebay.compat.flags import check_flags
from forebay.config.suggest import nearest
from forebay.engine.state_moves import HostPages, MoveTiming
from forebay.errors import ConfigError, UnsupportedError
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from forebay.engine.engine import Engine

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "StateOffload", "StatesMoved"]

_Choice = TypeVar("_Choice", bound=Enum)


class OffloadDeviceEnum(StrEnum):
    """Where state may go."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What may leave the device."""

    optim_states = "optim_states"
    """First and second moments."""
    hp_params = "hp_params"
    """What fp32 masters have beside the working weights."""
    lp_params = "lp_params"
    """Working weights."""
    lp_grads = "lp_grads"
    """Gradients of an open window, of one backward each."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Sums of several backwards (or ranks) in an open window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesMoved:
    """What one call moved; DeepSpeed's returns nothing.

    Attributes:
        moved_bytes: What travelled between device and host.
        device_bytes: Device memory that is free again after `offload_states`, in use again after
            `reload_states`: by torch's count on a GPU, else by the ledger, which has no gradients.
            None while copies run.
    """

    moved_bytes: int
    device_bytes: int | None


class StateOffload:
    """The two methods of one engine.

    Args:
        core: The engine that does the work.
    """

    def __init__(self, core: Engine) -> None:
        self._core = core

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> StatesMoved:
        """Bring state to host memory and give its device memory back to the driver.

        Any part, any number of times, also inside a window; what is away already stays there.
        Host buffers are kept for the next time. Until `reload_states`, `step()`, checkpoints and
        `state_dict` raise `StateAwayError`; forward and backward go on as long as `lp_params` are
        here (a forward of weights that are away raises).

        Args:
            include: What to move; None moves all.
            device: "cpu".
            pin_memory: Whether the host's buffers are page-locked.
            non_blocking: Return while copies run; `synchronize()` then frees the memory.

        Raises:
            ConfigError: A state or device that does not exist, or a flag that is no bool.
            UnsupportedError: device "nvme".
            BudgetError: The host budget does not hold it; nothing has moved.
        """
        check_flags("offload_states", pin_memory=pin_memory, non_blocking=non_blocking)
        if device == OffloadDeviceEnum.nvme:
            raise UnsupportedError(
                'offload_states(device="nvme") cannot be honoured: state moves to host memory, the '
                'valid value is "cpu"',
                hint="for state on a drive, write offload_optimizer.device: nvme",
            )
        _one_of([OffloadDeviceEnum.cpu], device, key="device")
        names = OffloadStateTypeEnum if include is None else include
        if isinstance(names, str) or not isinstance(names, Iterable):
            names = [names]
        chosen = [_one_of(list(OffloadStateTypeEnum), name, key="include") for name in names]
        before, timing = self._device_bytes(), _timing(non_blocking)
        moved = self._core.moves.offload(
            {Role(name.value) for name in chosen},
            pages=HostPages.LOCKED if pin_memory else HostPages.PAGEABLE,
            timing=timing,
        )
        freed = None if timing is MoveTiming.ENQUEUE else before - self._device_bytes()
        return StatesMoved(moved_bytes=moved, device_bytes=freed)

    def reload_states(self, non_blocking: bool = False) -> StatesMoved:
        """Bring back all that `offload_states` moved, the same bits; nothing away is legal.

        Args:
            non_blocking: Return while copies run; what computes next waits for them.

        Raises:
            BudgetError: The device has no room any more; everything stays on the host.
            ConfigError: The flag is no bool.
        """
        check_flags("reload_states", non_blocking=non_blocking)
        before, timing = self._device_bytes(), _timing(non_blocking)
        moved = self._core.moves.reload(timing=timing)
        taken = None if timing is MoveTiming.ENQUEUE else self._device_bytes() - before
        return StatesMoved(moved_bytes=moved, device_bytes=taken)

    def _device_bytes(self) -> int:
        device = self._core.accelerator.device
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device)
        return self._core.ledger.bytes(Tier.DEVICE)


def _timing(non_blocking: bool) -> MoveTiming:
    return MoveTiming.ENQUEUE if non_blocking else MoveTiming.WAIT


def _one_of(members: list[_Choice], given: Any, *, key: str) -> _Choice:
    name = given.value if isinstance(given, Enum) else given
    valid = [member.value for member in members]
    if name in valid:
        return members[valid.index(name)]
    close = nearest(str(name), valid)
    verb = "valid is" if len(valid) == 1 else "valid are"
    raise ConfigError(
        f"offload_states({key}=...) names {name!r}; {verb} {', '.join(valid)}",
        hint=f"write {' or '.join(repr(one) for one in close or valid)}",
    )
