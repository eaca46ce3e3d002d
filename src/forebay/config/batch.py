"""The batch equation: samples per update = micro batch x accumulation steps x processes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forebay.config.problems import shown
from forebay.config.resolved import BatchSpec, Source
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["resolve_batch", "solve_batch"]

_TRAIN: Final = "train_batch_size"
_MICRO: Final = "train_micro_batch_size_per_gpu"
_STEPS: Final = "gradient_accumulation_steps"
_ORDER: Final = "forebay.accumulation_order"
_STAGE: Final = "zero_optimization.stage"


def solve_batch(
    *, train: int | None, micro: int | None, steps: int | None, world_size: int
) -> BatchSpec:
    """Fills in what is None, as DeepSpeed does, and checks the equation.

    With only `train` or only `micro` the accumulation steps are 1.

    Raises:
        ConfigError: No batch size is known, or no whole number solves the equation. The message
            shows the numbers as they were given.

    Example:
        >>> solve_batch(train=64, micro=4, steps=None, world_size=1).accumulation_steps
        16
    """
    if train is None and micro is None:
        raise ConfigError(
            f"no batch size is known: {_equation(train, micro, steps, world_size)}",
            hint=f"write {_MICRO}, or {_TRAIN}",
        )
    given = (train, micro, steps, world_size)
    if train is None:
        assert micro is not None
        steps = steps or 1
        train = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = _divide(train, steps * world_size, given=given)
    elif steps is None:
        steps = _divide(train, micro * world_size, given=given)
    product = micro * steps * world_size
    if train != product:
        raise ConfigError(
            f"batch sizes contradict: {_equation(*given)}, and the right side is {product}",
            hint=f"write {_TRAIN} {product}, or leave one of the three out",
        )
    return BatchSpec(
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation_steps=steps,
        world_size=world_size,
    )


def resolve_batch(lookup: Lookup) -> BatchSpec:
    """The batch sizes of a configuration, from its numbers, the facts and the equation.

    Raises:
        ConfigError: See `solve_batch`; and an "auto" that nobody answers.
    """
    facts = lookup.facts
    known: dict[str, int] = {}
    sources: dict[str, Source] = {}
    for path in (_TRAIN, _MICRO, _STEPS):
        fact = {
            _TRAIN: facts.train_batch_size,
            _MICRO: facts.micro_batch_size,
            _STEPS: facts.accumulation_steps,
        }[path]
        if path in lookup.values.given or fact is not None:
            known[path], sources[path] = lookup.answer(path)
    if _TRAIN not in known and _MICRO not in known and facts.fallback_micro_batch_size:
        known[_MICRO] = facts.fallback_micro_batch_size
        sources[_MICRO] = Source.AUTO if lookup.is_written(_MICRO) else Source.CALLER
    try:
        batch = solve_batch(
            train=known.get(_TRAIN),
            micro=known.get(_MICRO),
            steps=known.get(_STEPS),
            world_size=facts.world_size,
        )
    except ConfigError as error:
        autos = [path for path in (_TRAIN, _MICRO, _STEPS) if path in lookup.values.autos]
        if known or not autos:
            raise
        raise ConfigError(
            f'{error.message}; {", ".join(autos)} {"is" if len(autos) == 1 else "are"} "auto", '
            f"and {facts.asker} does not know",
            hint=f"write {_MICRO}, or leave it to a trainer that knows it, such as forebay train",
        ) from error
    for path, value in (
        (_TRAIN, batch.train_batch_size),
        (_MICRO, batch.micro_batch_size),
        (_STEPS, batch.accumulation_steps),
    ):
        lookup.record(path, value, sources.get(path, Source.DERIVED))
    order = lookup.take(_ORDER)
    if order == "layer" and batch.accumulation_steps == 1:
        lookup.annotate(_ORDER, "one micro-batch per update: both orders are the same")
    elif order == "layer" and facts.world_size > 1 and lookup.answer(_STAGE)[0] >= 2:
        lookup.annotate(_ORDER, "ranks add up once an update: the bits of stages 0 and 1")
    return replace(batch, order=order)


def _divide(train: int, by: int, *, given: tuple[int | None, int | None, int | None, int]) -> int:
    quotient, rest = divmod(train, by)
    if rest or quotient == 0:
        below, above = train - rest, train - rest + by
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"batch sizes contradict: {_equation(*given)}, and {by} does not divide {train}",
            hint=f"write {_TRAIN} {sizes}, or change another of the three",
        )
    return quotient


def _equation(train: int | None, micro: int | None, steps: int | None, world_size: int) -> str:
    def term(name: str, value: int | None) -> str:
        return f"{name} {'(not given)' if value is None else shown(value)}"

    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    return f"{term(_TRAIN, train)} = {term(_MICRO, micro)} x {term(_STEPS, steps)} x {processes}"
