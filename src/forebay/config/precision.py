"""Which dtype trains, and what guards it: `bf16`, `fp16`, `data_types`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from forebay.config.lookup import unresolved
from forebay.config.resolved import LossScaleSpec, PrecisionSpec, Source
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.config.lookup import Lookup
    from forebay.config.resolved import Dtype

__all__ = ["check_accumulation_dtype", "resolve_precision"]

_SECTIONS: Final[Mapping[str, Dtype]] = {"bf16": "bfloat16", "fp16": "float16"}
_DTYPES: Final[Mapping[str, Dtype]] = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
_SCALE_KEYS: Final = (
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)
# 1 / (scale x ranks) must stay a normal float32, with room for the ranks.
_MAX_POWER: Final = 100


def resolve_precision(lookup: Lookup) -> PrecisionSpec:
    """Dtype, loss scale and finiteness check.

    Raises:
        ConfigError: An "auto" that nobody answers, a section that contradicts the model or
            `data_types.param_dtype`, a loss scale that is no power of two, or a check turned off
            that this dtype always has.
    """
    dtype, source = _dtype(lookup)
    lookup.use_dtype(dtype)
    for section, sections_dtype in _SECTIONS.items():
        path = f"{section}.enabled"
        given = Source.GIVEN if path in lookup.values.given else source
        given = Source.AUTO if path in lookup.values.autos else given
        note = ""
        if given is Source.CALLER and dtype == sections_dtype:
            note = "neither bf16 nor fp16 is switched: the model keeps its dtype"
        lookup.record(path, dtype == sections_dtype, given, note=note)
    _check_param_dtype(lookup, dtype)
    checks = _checks_overflow(lookup, dtype=dtype)
    if dtype == "float16":
        return PrecisionSpec(dtype=dtype, loss_scale=_loss_scale(lookup))
    lookup.moot(list(_SCALE_KEYS), note=f"changes nothing: {dtype} needs no loss scale")
    return PrecisionSpec(dtype=dtype, check_grad_overflow=checks)


def _checks_overflow(lookup: Lookup, *, dtype: Dtype) -> bool:
    path = "bf16.check_grad_overflow"
    if dtype == "bfloat16":
        return bool(lookup.take(path))
    if lookup.values.given.get(path) is False:
        raise ConfigError(
            f"config key {path} is false, and weights are {dtype}, whose gradients are always "
            "checked",
            hint=f'delete {path}, or write "bf16": {{"enabled": true}}'
            + (" in place of fp16" if lookup.values.given.get("fp16.enabled") else ""),
        )
    lookup.moot([path], note=f"changes nothing: {dtype} gradients are always checked")
    return True


def check_accumulation_dtype(lookup: Lookup, *, dtype: Dtype, accumulation_steps: int) -> None:
    """Checks that gradients add up in fp32, or that there is nothing to add.

    Raises:
        ConfigError: Another dtype would change the sum.
    """
    path = "data_types.grad_accum_dtype"
    value, source = lookup.answer(path)
    note = ""
    if value is not None and _DTYPES[value] != "float32":
        if _DTYPES[value] != dtype or accumulation_steps > 1:
            raise ConfigError(
                f'config key {path} = "{value}" is not supported yet: with '
                f"gradient_accumulation_steps {accumulation_steps} and {dtype} weights gradients "
                f"add up in fp32",
                hint='write "fp32", or leave the key out',
            )
        note = "one backward per update: its gradient keeps its own dtype; sums are fp32"
    lookup.record(path, value or "fp32", source, note=note)


def _dtype(lookup: Lookup) -> tuple[Dtype, Source]:
    """The working dtype, and where it comes from unless a section names it."""
    given, facts = lookup.values.given, lookup.facts
    for section, dtype in _SECTIONS.items():
        if given.get(f"{section}.enabled"):
            return dtype, Source.DEFAULT
    model = facts.model_dtype
    if model is None:
        for section in _SECTIONS:
            if f"{section}.enabled" in lookup.values.autos:
                raise unresolved(f"{section}.enabled", facts)
        return "float32", Source.DEFAULT
    if model not in _DTYPES:
        raise ConfigError(
            f"{facts.asker} says that the model is {model}; it must be float32, bfloat16 or float16"
        )
    dtype = _DTYPES[model]
    for section, sections_dtype in _SECTIONS.items():
        if dtype == sections_dtype and given.get(f"{section}.enabled") is False:
            raise ConfigError(
                f"config key {section}.enabled is false, and the model is {dtype}",
                hint=f'write "{section}": {{"enabled": true}}, or load the model in float32',
            )
    return dtype, Source.CALLER if dtype != "float32" else Source.DEFAULT


def _check_param_dtype(lookup: Lookup, dtype: Dtype) -> None:
    path = "data_types.param_dtype"
    value = lookup.values.given.get(path)
    if value is not None and _DTYPES[value] != dtype:
        raise ConfigError(
            f'config key {path} is "{value}", and bf16, fp16 and the model say {dtype}',
            hint=f"delete {path}",
        )
    if lookup.is_written(path):
        lookup.record(path, value or dtype, lookup.answer(path)[1])


def _loss_scale(lookup: Lookup) -> LossScaleSpec:
    static, power, window, hysteresis, consecutive, low = (
        lookup.take(path) for path in _SCALE_KEYS
    )
    _power_of_two("fp16.min_loss_scale", low)
    if static:
        _power_of_two("fp16.loss_scale", static)
    elif not low <= 2.0 ** min(power, 1023) <= 2.0**_MAX_POWER:
        raise ConfigError(
            f"config key fp16.initial_scale_power is {power}; the first scale must lie between "
            f"fp16.min_loss_scale {low:g} and 2**{_MAX_POWER}",
            hint="write 16",
        )
    return LossScaleSpec(
        static=static or None,
        initial_scale_power=power,
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_scale=low,
    )


def _power_of_two(path: str, value: float) -> None:
    exponent = round(math.log2(value))
    if value != 2.0 ** min(exponent, 1023) or abs(exponent) > _MAX_POWER:
        near = 2.0 ** max(-_MAX_POWER, min(_MAX_POWER, exponent))
        raise ConfigError(
            f"config key {path} is {value:g}; a loss scale is a power of two, so that it changes "
            f"no bit of a gradient",
            hint=f"write {near:g}",
        )
