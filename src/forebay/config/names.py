"""Names of optimizers and schedules: what runs here, what does later, what is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from forebay.config.keys import NOT_YET
from forebay.config.problems import Problem, shown
from forebay.config.suggest import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OPTIMIZERS", "SCHEDULERS", "type_problem"]

# Optimizer names are read in any case, as DeepSpeed does: lower case -> class of torch.optim.
OPTIMIZERS: Final[Mapping[str, Literal["Adam", "AdamW"]]] = {"adam": "Adam", "adamw": "AdamW"}
SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")

# Known to DeepSpeed, by its own names or as classes of torch.optim.
_OTHER_OPTIMIZERS: Final = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "ASGD",
    "Lamb",
    "LBFGS",
    "Lion",
    "MuAdam",
    "MuAdamW",
    "Muon",
    "MuSGD",
    "NAdam",
    "OneBitAdam",
    "OneBitLamb",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
    "ZeroOneAdam",
)
_OTHER_SCHEDULERS: Final = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiplicativeLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "StepLR",
)


def type_problem(section: str, name: str) -> Problem | None:
    """What is wrong with the `type` of a section, or None.

    Args:
        section: "optimizer" or "scheduler".
        name: The type as written.
    """
    if section == "optimizer":
        return _problem(
            f"optimizer.type = {shown(name)}",
            name.lower(),
            here=OPTIMIZERS,
            later={known.lower(): known for known in _OTHER_OPTIMIZERS},
        )
    return _problem(
        f"scheduler.type = {shown(name)}",
        name,
        here={known: known for known in SCHEDULERS},
        later={known: known for known in _OTHER_SCHEDULERS},
    )


def _problem(
    what: str, name: str, *, here: Mapping[str, str], later: Mapping[str, str]
) -> Problem | None:
    if name in here:
        return None
    supported = f"write one of {', '.join(here.values())}"
    if name in later:
        section = what.partition(".")[0]
        if section == "scheduler":
            supported += ", or hand a scheduler of torch to initialize()"
        return Problem(f"config key {what} is {NOT_YET}", supported)
    near = [here[known] for known in nearest(name, here)]
    if not near and (known := nearest(name, later)):
        near = [f"{later[known[0]]}, which is {NOT_YET}"]
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return Problem(f"config key {what} is not known", f"{question}{supported}")
