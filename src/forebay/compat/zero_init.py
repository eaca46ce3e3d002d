"""`deepspeed.zero.Init`: a model is built, and is never whole in any process's memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from forebay.compat.flags import check_flags
from forebay.compat.inputs import DTYPES
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.errors import ConfigError, UnsupportedError
from forebay.model.construction import Construction, is_under_construction
from forebay.tiers.heap import HeapTrimmer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Init"]

_TRIM_BYTES: Final = 16 << 20


class Init(contextlib.AbstractContextManager["Init"]):
    """Inside it, models are built as without it, with the same values, and never lie in memory.

    Parameters give their memory back while others are built. When it ends they know how they come
    about, and `forebay.initialize` and `forebay.offload` make one at a time, of which each rank
    keeps its slice. Until then reading or writing one raises, small ones aside, which keep their
    memory; `GatheredParameters` gives it.
    Float32 parameters have the working dtype when it ends.

    Args:
        module: A module that was built before; its parameters get the working dtype.
        data_parallel_group: Unused: all ranks build the same.
        mem_efficient_linear: Unused; forebay changes nothing in torch.
        remote_device: "cpu" or None; other devices are refused.
        pin_memory: Unused: what the link needs is page-locked later.
        config_dict_or_path: The configuration; its precision section says the dtype.
        config: Old name of it.
        enabled: False does nothing.
        dtype: The working dtype, before the configuration's.
        mpu: Refused.
        zero_param_parallel_group: Refused, as `zero_hpz_partition_size` is.
        zero_quantized_weights: Refused.
        zero_quantized_nontrainable_weights: Refused.
        sequence_data_parallel_group: Refused.
        param_swapper: Refused: `offload_param` says where weights live.

    Raises:
        ConfigError: The configuration is refused, or given twice.
        UnsupportedError: An argument is refused.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        check_flags("zero.Init", pin_memory=pin_memory, enabled=enabled)
        _refuse_given(
            mpu=mpu,
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=sequence_data_parallel_group,
            param_swapper=param_swapper,
        )
        if config_dict_or_path is not None and config is not None:
            raise ConfigError(
                "zero.Init is given config_dict_or_path and config, two names of one argument",
                hint="give config_dict_or_path alone",
            )
        if remote_device not in (None, "cpu", "none"):
            raise UnsupportedError(
                f"zero.Init(remote_device={remote_device!r}) is not supported",
                hint='models are built on the host: remote_device="cpu"',
            )
        raw = config if config_dict_or_path is None else config_dict_or_path
        if dtype is None and raw is not None:
            facts = Facts(
                model_dtype="float32", fallback_micro_batch_size=1, asker="forebay.zero.Init"
            )
            dtype = DTYPES[resolve(raw, facts=facts).precision.dtype]
        self._dtype = dtype
        self._enabled = enabled
        self._stack = contextlib.ExitStack()
        if module is not None and enabled and dtype is not None:
            module.to(dtype)

    def __enter__(self) -> Self:
        if self._enabled and not is_under_construction():
            heap = HeapTrimmer(every_bytes=_TRIM_BYTES)
            self._stack.callback(heap.trim)
            self._stack.enter_context(Construction(dtype=self._dtype, freed=heap.freed))
            self._stack.enter_context(torch.device("cpu"))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


def _refuse_given(**arguments: object) -> None:
    """Refuse arguments that ask for something; None and False do not."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"zero.Init({name}=...) is not supported", hint=f"leave {name} out"
            )
