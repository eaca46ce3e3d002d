"""From what a person types to a question: model, machine and batch, every number checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.hardware.catalog import CATALOG, machine_named
from forebay.hardware.profile import read_profile
from forebay.plan.model_config import from_counts, read_shape
from forebay.plan.setup import Cluster
from forebay.plan.ways import Question
from forebay.plan.workload import OPTIMIZERS, Precision, Recompute, Workload
from forebay.units_of_measure import format_bytes, parse_bytes

if TYPE_CHECKING:
    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape

__all__ = ["Asked", "question_of"]

# Micro-batches beyond this gain nothing: products are wide enough long before.
_MOST_MICRO_BATCH = 64
_MOST_NODES = 100_000
_MOST_DEVICES = 1024
_MOST_DRIVES = 1024
_LEAST_HOST_BYTES, _MOST_HOST_BYTES = 1 << 30, 1 << 50
_COUNT = re.compile(r"([0-9.]+(?:[eE]\+?[0-9]+)?) ?([kKmMbBtT]?)")
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed; None where nothing was.

    Attributes:
        model: A folder, a `config.json`, or a parameter count such as "7e9" or "13B".
        machine: A catalogued machine.
        profile: A measured profile's file.
        devices: Devices of each node.
        nodes: Nodes.
        host_memory: What each node has, as "64GiB"; None for what the machine has.
        drives: How many each node has, each like the machine's; None for as many.
        batch: Sequences per update on all devices.
        micro_batch: Sequences of one pass on one device.
        sequence: Tokens of a sequence.
        precision: Name of a `Precision`; None for bf16 where the device has it, else fp16.
        optimizer: Name in `OPTIMIZERS`.
        recompute: Name of a `Recompute`.
        hidden: Hidden size, beside a parameter count.
        layers: Layers, beside a parameter count.
        vocab: Vocabulary, beside a parameter count.
    """

    model: str | None
    machine: str | None = None
    profile: Path | None = None
    devices: int | None = None
    nodes: int = 1
    host_memory: str | None = None
    drives: int | None = None
    batch: int | None = None
    micro_batch: int | None = None
    sequence: int = 2048
    precision: str | None = None
    optimizer: str = "adamw"
    recompute: str = "blocks"
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None


def question_of(asked: Asked) -> Question:
    """Check what was asked.

    Raises:
        ConfigError: One line with the field and its range.
    """
    profile = _changed(_profile(asked), asked)
    node = profile.node
    assert node is not None
    has_devices = node.devices
    devices = has_devices if asked.devices is None else asked.devices
    devices = _whole(devices, "--devices", most=_MOST_DEVICES)
    nodes = _whole(asked.nodes, "--nodes", most=_MOST_NODES)
    if devices != node.devices:
        profile = replace(profile, node=replace(node, devices=devices))
    cluster = Cluster(devices_per_node=devices, nodes=nodes)
    sequence = _whole(asked.sequence, "--sequence", most=1 << 24)
    share, free = _share(asked, cluster)
    return Question(
        shape=_shape(asked),
        profile=profile,
        cluster=cluster,
        workload=Workload(
            micro_batch=share if asked.micro_batch is None else asked.micro_batch,
            accumulation=1 if asked.micro_batch is None else share // asked.micro_batch,
            sequence=sequence,
            precision=_precision(asked, profile),
            optimizer=_one_of(asked.optimizer, "--optimizer", tuple(OPTIMIZERS)),
            recompute=Recompute(
                _one_of(asked.recompute, "--recompute", tuple(one.value for one in Recompute))
            ),
        ),
        free_micro_batch=free,
        has_devices=has_devices,
        names_units=asked.model is not None and _COUNT.fullmatch(asked.model) is None,
    )


def _share(asked: Asked, cluster: Cluster) -> tuple[int, int | None]:
    """Sequences of each device in an update, and the largest micro-batch to try."""
    micro = asked.micro_batch
    if micro is not None:
        micro = _whole(micro, "--micro-batch", most=1 << 20)
    if asked.batch is None:
        return (micro, None) if micro is not None else (8, _MOST_MICRO_BATCH)
    batch = _whole(asked.batch, "--batch", most=1 << 30)
    unit = cluster.devices * (micro or 1)
    if batch % unit:
        lower, upper = batch // unit * unit, (batch // unit + 1) * unit
        what = f"{cluster.devices} devices"
        if micro:
            what += f" with micro-batches of {micro}"
        nearest = f"nearest are {lower} and {upper}" if lower else f"smallest is {upper}"
        raise ConfigError(
            f"--batch is {batch}; on {what} it must be a multiple of {unit}",
            hint=f"the {nearest}",
        )
    return batch // cluster.devices, None if micro is not None else _MOST_MICRO_BATCH


def _profile(asked: Asked) -> Profile:
    if asked.machine is not None and asked.profile is not None:
        raise ConfigError(
            f"--machine {asked.machine} and --profile {asked.profile} are two machines",
            hint="leave one of them out",
        )
    if asked.machine is None and asked.profile is None:
        raise ConfigError(
            "a plan needs a machine: give --machine or --profile",
            hint=f"catalogued machines: {', '.join(CATALOG)}; measure this one with: forebay "
            "probe --output FILE",
        )
    if asked.machine is not None:
        return machine_named(asked.machine)
    assert asked.profile is not None
    profile = read_profile(asked.profile)
    if profile.node is None:
        raise ConfigError(
            f"profile {asked.profile} has no node: capacities of the machine are missing",
            hint="measure it again with: forebay probe --output FILE",
        )
    return profile


def _changed(profile: Profile, asked: Asked) -> Profile:
    """The machine with what somebody's own has more or less of."""
    node, drives = profile.node, profile.drives
    assert node is not None
    if asked.host_memory is not None:
        host_bytes = parse_bytes(asked.host_memory)
        if not _LEAST_HOST_BYTES <= host_bytes <= _MOST_HOST_BYTES:
            raise ConfigError(
                f"--host-memory is {format_bytes(host_bytes)}; it must be from "
                f"{format_bytes(_LEAST_HOST_BYTES)} to {format_bytes(_MOST_HOST_BYTES)}"
            )
        profile = replace(profile, node=replace(node, host_bytes=host_bytes))
    if asked.drives is None:
        return profile
    if not 0 <= asked.drives <= _MOST_DRIVES:
        raise ConfigError(
            f"--drives is {asked.drives}; it must be a whole number from 0 to {_MOST_DRIVES:,}"
        )
    if asked.drives == 0:
        return replace(profile, drives=None)
    if drives is None:
        raise ConfigError(
            f"--drives is {asked.drives}, and the profile knows of no drive",
            hint="measure one with: forebay probe --drive FOLDER --output FILE",
        )
    return replace(profile, drives=drives.as_many(asked.drives))


def _shape(asked: Asked) -> ModelShape:
    if asked.model is None:
        raise ConfigError(
            "a plan needs a model",
            hint="give a folder with a config.json, or a parameter count such as 7e9 or 13B",
        )
    match = _COUNT.fullmatch(asked.model)
    if match is None:
        given = [
            f"--{name}"
            for name in ("hidden", "layers", "vocab")
            if getattr(asked, name) is not None
        ]
        if given:
            raise ConfigError(f"{given[0]} goes with a parameter count, not with {asked.model}")
        path = Path(asked.model)
        if not path.exists():
            raise ConfigError(
                f"{asked.model} is neither a file or folder nor a parameter count",
                hint="give a folder with a config.json, or a count such as 7e9 or 13B",
            )
        return read_shape(path)
    try:
        count = float(match.group(1)) * _SUFFIXES[match.group(2).lower()]
    except ValueError:
        raise ConfigError(f"parameters: {asked.model!r} is not a number") from None
    if not math.isfinite(count):
        raise ConfigError(f"parameters is {asked.model}, which is more than any machine can hold")
    return from_counts(round(count), hidden=asked.hidden, layers=asked.layers, vocab=asked.vocab)


def _precision(asked: Asked, profile: Profile) -> Precision:
    known = {rate.dtype for rate in profile.matrix}
    if asked.precision is None:
        best = (one for one in Precision if one.dtype in known)
        return next(best, Precision.BF16)
    names = tuple(one.value for one in Precision)
    return Precision(_one_of(asked.precision, "--precision", names))


def _one_of(value: str, what: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise ConfigError(f"{what} is {value!r}; it must be one of {', '.join(names)}")
    return value


def _whole(value: int, what: str, *, most: int) -> int:
    if not 1 <= value <= most:
        raise ConfigError(f"{what} is {value}; it must be a whole number from 1 to {most:,}")
    return value
