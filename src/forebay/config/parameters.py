"""Resolution of `offload_param`: where the working weights live, and how many are up at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from forebay.config.loads import LoadSpec, resolve_loads
from forebay.config.problems import shown
from forebay.config.rows import Source
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["Parameters", "resolve_parameters"]

_ZERO: Final = "zero_optimization"
_PARAM: Final = f"{_ZERO}.offload_param"
_FILES: Final = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
_STAYS: Final = "no parameter is offloaded, or sharded over ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Where working weights live; see `ZeroSpec`."""

    tier: Literal["device", "host", "nvme"]
    loads: LoadSpec


def resolve_parameters(lookup: Lookup, *, state: str, pin_memory: bool) -> Parameters:
    """Answers the keys of `offload_param`, but for those of files.

    Args:
        lookup: The configuration.
        state: Where optimizer state lives: "none", "cpu" or "nvme".
        pin_memory: Whether what the host holds is page-locked.

    Raises:
        ConfigError: Weights are to leave the device and state is to stay there, or only one of the
            two is to be page-locked.
    """
    old = lookup.values.given.get(f"{_ZERO}.cpu_offload_param")
    if old is None:
        device = lookup.take(f"{_PARAM}.device") or "none"
    else:
        device = "cpu" if lookup.take(f"{_ZERO}.cpu_offload_param") else "none"
        note = "from the old form, cpu_offload_param"
        lookup.record(f"{_PARAM}.device", device, Source.DERIVED, note=note)
    is_in_files = device == "nvme" and state == "nvme"
    if not is_in_files:
        note = "changes nothing: it acts with device nvme only"
        if device == "nvme":
            note = "changes nothing: optimizer state is in host memory, and so are the weights"
            lookup.annotate(
                f"{_PARAM}.device",
                "as cpu: optimizer state is in host memory, and so are the weights; with "
                "offload_optimizer.device nvme they are in files",
            )
        lookup.moot([f"{_PARAM}.{name}" for name in _FILES], note=note)
    if device == "none":
        lookup.moot([f"{_PARAM}.pin_memory"], note=f"changes nothing: {_STAYS}")
        is_sharded = lookup.answer(f"{_ZERO}.stage")[0] == 3 and lookup.facts.world_size > 1
        loads = resolve_loads(lookup, moot="" if is_sharded else _STAYS)
        return Parameters(tier="device", loads=loads)
    if state == "none":
        beside = '{"device": "cpu"}'
        if device == "nvme":
            beside = '{"device": "nvme", "nvme_path": "/folder/on/a/local/drive"}'
        raise ConfigError(
            f"config key {_PARAM}.device = {device} needs optimizer state off the device too: it "
            "takes six times the bytes of the weights",
            hint=f'write "offload_optimizer": {beside} beside it',
        )
    if lookup.is_written(f"{_PARAM}.pin_memory"):
        pinned = lookup.take(f"{_PARAM}.pin_memory")
        if pinned != pin_memory:
            raise ConfigError(
                f"config key {_PARAM}.pin_memory is {shown(pinned)}, and "
                f"{_ZERO}.offload_optimizer.pin_memory is {shown(pin_memory)}",
                hint="write the same for both: one policy locks all that is copied",
            )
    else:
        lookup.record(f"{_PARAM}.pin_memory", pin_memory, Source.DERIVED)
    loads = resolve_loads(lookup)
    return Parameters(tier="nvme" if is_in_files else "host", loads=loads)
