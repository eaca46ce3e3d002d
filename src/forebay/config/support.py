"""What forebay can act on: contradictions between keys, then keys and values that it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from forebay.config.keys import NOT_YET, Key, Status
from forebay.config.names import type_problem
from forebay.config.problems import Problem, raise_any, shown
from forebay.config.tables import TABLE
from forebay.config.update import update_problems
from forebay.config.zenflow import zenflow_problems

if TYPE_CHECKING:
    from forebay.config.schema import Values

__all__ = ["refuse"]

_ZERO: Final = "zero_optimization"
_PARAM: Final = f"{_ZERO}.offload_param.device"
_OPTIMIZER: Final = f"{_ZERO}.offload_optimizer"


def refuse(values: Values) -> None:
    """Refuses what contradicts itself, then what is not supported.

    Raises:
        ConfigError: With every key of the first sort that occurs, the reason, and what to write.
    """
    raise_any(_contradictions(values))
    problems = _types(values)
    problems += [
        _refusal(TABLE[path], name=values.name(path), value="{...}")
        for path in _refused_sections(values)
    ]
    inside = tuple(f"{path}." for path in _refused_sections(values))
    problems += [
        _refusal(TABLE[path], name=values.name(path), value=shown(value))
        for path, value in values.given.items()
        if not TABLE[path].passes(value) and not path.startswith(inside)
    ]
    raise_any(problems)


def _contradictions(values: Values) -> list[Problem]:
    given = values.given
    stage = given.get(f"{_ZERO}.stage", 0)
    problems = []
    for path, off in ((_PARAM, (None, "none")), (f"{_ZERO}.cpu_offload_param", (False,))):
        if given.get(path, off[0]) not in off and stage < 3:
            problems.append(
                Problem(
                    f"config key {path} = {shown(given[path])} needs zero_optimization.stage 3, "
                    f"and the stage is {stage}",
                    f"write stage 3, or delete {path.removesuffix('.device')}",
                )
            )
    for new, old in ((_OPTIMIZER, "cpu_offload"), (_PARAM[:-7], "cpu_offload_param")):
        if new in values.sections and f"{_ZERO}.{old}" in given:
            problems.append(
                Problem(
                    f"config key {_ZERO}.{old} is the old name of {new}, and both are given",
                    f"delete {_ZERO}.{old}",
                )
            )
    if given.get(f"{_OPTIMIZER}.device") == "nvme" and not given.get(f"{_OPTIMIZER}.nvme_path"):
        problems.append(
            Problem(
                f'config key {_OPTIMIZER}.device = "nvme" needs {_OPTIMIZER}.nvme_path',
                'write "nvme_path": "/folder/on/a/local/drive"',
            )
        )
    problems += update_problems(values)
    problems += zenflow_problems(values)
    if given.get("bf16.enabled") and given.get("fp16.enabled"):
        problems.append(
            Problem(
                f"config keys {values.name('bf16.enabled')} and fp16.enabled are both true",
                "turn one of them off",
            )
        )
    return problems


def _types(values: Values) -> list[Problem]:
    problems = []
    for section in ("optimizer", "scheduler"):
        name = values.given.get(f"{section}.type")
        if name is not None:
            problem = type_problem(section, name)
            problems += [problem] if problem else []
        elif section in values.sections:
            problems.append(
                Problem(
                    f"config key {section}.type is missing",
                    f"write its type, or delete {section}",
                )
            )
    return problems


def _refused_sections(values: Values) -> list[str]:
    return [
        key.path
        for key in TABLE
        if key.is_section and key.status is Status.REFUSED and key.path in values.sections
    ]


def _refusal(key: Key, *, name: str, value: str) -> Problem:
    reason = key.reason
    said = f"is {reason}" if reason.startswith(NOT_YET) else f"is refused: {reason}"
    return Problem(f"config key {name} = {value} {said}", key.instead or _instead(key, name))


def _instead(key: Key, name: str) -> str:
    if key.kind is None:
        return f"delete {name}"
    passing = [value for value in key.accepts or () if value is not None]
    if not passing:
        return f"delete {name}"
    return f"write {' or '.join(json.dumps(value) for value in passing)}, or delete {name}"
