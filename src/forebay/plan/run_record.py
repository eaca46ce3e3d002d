"""What a run writes for the planner: its shape and setup, what was predicted, what was measured.

The file `plan.json` in a run's folder. It holds enough to predict again with any profile, so that
`--learn` works also for runs that had none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError
from forebay.hardware.rates import DriveUse
from forebay.model.shape import Experts, Mlp, ModelShape, Norm
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.setup import Cluster, Home, Setup
from forebay.plan.step import step_forecast
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Attention, Inputs, Precision, Recompute, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.hardware.profile import Machine, Profile
    from forebay.plan.step import StepForecast

__all__ = ["RUN_RECORD", "Measured", "RunRecord", "read_record"]

RUN_RECORD = "plan.json"
_VERSION = 1
# More bytes, or seconds, than any run has.
_MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run took.

    Attributes:
        seconds: Median of an update, after the first ones.
        steps: Updates behind it.
        host_bytes: Placed on the host.
        device_bytes: Placed on the device.
        device_peak_bytes: The most that torch held there; None on the CPU.
        drives: What one process did with its files; None where it had none.
    """

    seconds: float
    steps: int
    host_bytes: int
    device_bytes: int
    device_peak_bytes: int | None = None
    drives: DriveUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        machine: Where it ran.
        shape: Its model.
        setup: How it trained.
        measured: What it took.
        predicted_seconds: What its profile said; None without one.
        streamed_units: Numbers of the units whose state visited the device; None where nobody
            said, and the best are taken.
        resident_units: Numbers of the units whose state stayed on the device beside it.
    """

    machine: Machine
    shape: ModelShape
    setup: Setup
    measured: Measured
    predicted_seconds: float | None = None
    streamed_units: tuple[int, ...] | None = None
    resident_units: tuple[int, ...] = ()

    def forecast(self, profile: Profile) -> StepForecast:
        """An update by a profile."""
        places = self.places or None
        return step_forecast(self.shape, self.setup, profile=profile, places=places)

    @property
    def places(self) -> tuple[UpdatePlace, ...]:
        """Where each unit updated, for state off the device; empty where nobody said.

        State in files counts as the host's: the host budget says which that is.
        """
        if self.streamed_units is None or self.setup.optimizer is Home.DEVICE:
            return ()
        found = [UpdatePlace.HOST] * len(self.shape.unit_elements())
        for units, place in (
            (self.streamed_units, UpdatePlace.STREAMED),
            (self.resident_units, UpdatePlace.DEVICE),
        ):
            for index in units:
                found[index] = place
        return tuple(found)

    def predict(self, profile: Profile) -> float:
        """Seconds of an update by a profile."""
        return self.forecast(profile).seconds

    def as_json(self) -> str:
        """The file's text, with bytes by tier as planned beside."""
        tiers = tier_bytes(self.shape, self.setup, places=self.places)
        values = {
            "version": _VERSION,
            "machine": asdict(self.machine),
            "shape": _plain(asdict(self.shape)),
            "setup": {
                "stage": self.setup.stage,
                "optimizer": self.setup.optimizer.value,
                "weights": self.setup.weights.value,
                "workload": _plain(asdict(self.setup.workload)),
                "devices_per_node": self.setup.cluster.devices_per_node,
                "nodes": self.setup.cluster.nodes,
                "host_budget": self.setup.host_budget,
                "weights_in_memory": self.setup.weights_in_memory,
            },
            "predicted": {
                "seconds": self.predicted_seconds,
                "host_bytes": tiers.total("host"),
                "device_bytes": tiers.total("device"),
                "device_placed_bytes": tiers.placed_on_device,
            },
            "measured": asdict(self.measured),
            "streamed_units": None if self.streamed_units is None else list(self.streamed_units),
            "resident_units": list(self.resident_units),
        }
        return json.dumps(values, indent=2) + "\n"


def read_record(folder: Path) -> RunRecord:
    """Read a run's record.

    Raises:
        ConfigError: There is none, or it is not one.
    """
    file = folder / RUN_RECORD if folder.is_dir() else folder
    hint = "forebay train writes plan.json into its --output folder after some updates"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}", hint=hint) from error
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise ConfigError(
            f"{file} is a record of version {found}, and this forebay reads version {_VERSION}",
            hint=hint,
        )
    try:
        record = _record(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no run's record: {error!r}", hint=hint) from error
    seconds = record.measured.seconds
    if not 0 < seconds < 1e6:
        raise ConfigError(f"{file}: seconds is {seconds!r}; it must be between 0 and 1,000,000")
    return record


def _record(data: dict[str, Any]) -> RunRecord:
    from forebay.hardware.profile import Machine

    shape, setup = dict(data["shape"]), data["setup"]
    shape["mlp"], shape["norm"] = Mlp(shape["mlp"]), Norm(shape["norm"])
    if shape["experts"] is not None:
        shape["experts"] = Experts(**shape["experts"])
    units, measured = data.get("streamed_units"), dict(data["measured"])
    if measured.get("drives") is not None:
        if any(not 0 <= value < _MOST for value in measured["drives"].values()):
            raise ValueError(measured["drives"])
        measured["drives"] = DriveUse(**measured["drives"])
    work = dict(setup["workload"])
    work["precision"] = Precision(work["precision"])
    work["recompute"] = Recompute(work["recompute"])
    work["inputs"] = Inputs(work.get("inputs", Inputs.DEVICE))
    work["attention"] = Attention(work["attention"])
    work["order"] = AccumulationOrder(work.get("order", AccumulationOrder.MICROBATCH))
    return RunRecord(
        machine=Machine(**data["machine"]),
        shape=ModelShape(**shape),
        setup=Setup(
            stage=int(setup["stage"]),
            optimizer=Home(setup["optimizer"]),
            weights=Home(setup["weights"]),
            workload=Workload(**work),
            cluster=Cluster(
                devices_per_node=int(setup["devices_per_node"]), nodes=int(setup["nodes"])
            ),
            host_budget=setup.get("host_budget"),
            weights_in_memory=int(setup.get("weights_in_memory", 0)),
        ),
        measured=Measured(**measured),
        predicted_seconds=data["predicted"]["seconds"],
        streamed_units=None if units is None else tuple(int(unit) for unit in units),
        resident_units=tuple(int(unit) for unit in data.get("resident_units", ())),
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }
