"""Seconds of one update of a setup on a machine, and what bounds them.

Where the engine's own program describes a setup (`tiers.in_engine`) that program is interpreted by
`plan.simulate`, as one rank of the cluster runs it. Everything else: by `plan.rank_step`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.plan.activations import moved_inputs
from forebay.plan.compute import compute_seconds
from forebay.plan.loads import Uses
from forebay.plan.memory import backlog_bytes
from forebay.plan.merged import Merged
from forebay.plan.placement import Accumulation, UpdatePlace, WeightPlace
from forebay.plan.program import build_program
from forebay.plan.rank_step import RankRates, RankUnit, simulate_rank
from forebay.plan.search import search_places
from forebay.plan.setup import Home
from forebay.plan.simulate import ComputeSeconds, Simulation, simulate
from forebay.plan.solve import DeviceRoom, Rates, choose_places, visit_bytes
from forebay.plan.tiers import accumulation_of, in_engine, placement_of
from forebay.plan.timeline import Row
from forebay.plan.visit_room import visit_room

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape
    from forebay.plan.setup import Setup
    from forebay.plan.timeline import Timeline

__all__ = ["StepForecast", "rank_rates", "rank_units", "step_forecast"]

# Micro-batches of a window that are simulated; each more takes what the last of them takes.
_BACKWARDS = 3
# Units of another system's simulation; blocks are merged down to so many.
_UNITS = 16
# Blocks of the engine's that are simulated one by one; of deeper models so many groups.
_BLOCKS, _GROUPS = 48, 20
# Units that are simulated in all while places are looked for: about a quarter of a second.
_TRIED_UNITS = 500
_LEAST_TRIALS = 4
# Above this share of the step, computation is what bounds it.
_COMPUTE_BOUND = 0.95
# A network between nodes of which nothing is known: nine tenths of 100 Gb/s.
_PLAIN_NETWORK = 0.9 * 12.5e9

_BOUNDS = {
    "compute": "computation",
    "ranks": "collectives between ranks",
    "up": "the link to the device",
    "down": "the link to the host",
    "host": "the update on the host",
    "read": "reading from drives",
    "write": "writing to drives",
}
_ROWS = {
    Row.COMPUTE: "compute",
    Row.DEVICE_UPDATE: "compute",
    Row.UP: "up",
    Row.DOWN: "down",
    Row.HOST_UPDATE: "host",
    Row.RANKS: "ranks",
    Row.READ: "read",
    Row.WRITE: "write",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """What one update takes.

    Attributes:
        seconds: From one update to the next.
        compute_seconds: Of them, forwards and backwards alone.
        bound: What the rest waits for, in words; "computation" where there is hardly any rest.
        busy: Seconds of each lane.
        timeline: The windows that were simulated.
        places: Where each unit updates; empty but for state on the host of a device of its own.
    """

    seconds: float
    compute_seconds: float
    bound: str
    busy: Mapping[str, float]
    timeline: Timeline
    places: tuple[UpdatePlace, ...] = ()


def rank_rates(profile: Profile, setup: Setup) -> RankRates:
    """One rank's share of its node."""
    local = setup.cluster.devices_per_node
    node, network, drives = profile.node, profile.network, profile.corrected_drives
    rates = profile.rates()
    uplinks = min(local, node.uplinks if node else local)
    links = uplinks / local
    # where nothing was measured between ranks, they meet over their links through the host
    inside = network.inside if network else rates.link_up
    seconds_per_byte = (setup.ranks - 1) / setup.ranks / inside
    if setup.cluster.nodes > 1:
        across = (network.across if network else None) or _PLAIN_NETWORK
        nodes = setup.cluster.nodes
        # Devices that share each layer gather only their part of it, all at the same time.
        groups = setup.workload.tensor_parallel
        seconds_per_byte = max(seconds_per_byte, groups * (nodes - 1) / nodes / across)
    return RankRates(
        up=rates.link_up * links,
        down=rates.link_down * links,
        host_memory=rates.host_memory / local,
        update=(rates.update or rates.host_memory) / local,
        device_update=rates.device_memory,
        read=drives.read / local if drives else 1.0,
        write=drives.write / local if drives else 1.0,
        files=drives.both / local if drives and drives.both else None,
        gather=1 / seconds_per_byte if seconds_per_byte else float("inf"),
        latency_seconds=network.latency_seconds if network and setup.ranks > 1 else 0.0,
    )


def rank_units(shape: ModelShape, setup: Setup, *, compute: ComputeSeconds) -> tuple[RankUnit, ...]:
    """The model's units as one rank sees them, neighbouring blocks merged."""
    work, ranks = setup.workload, setup.ranks
    item = work.precision.item_bytes
    elements = shape.unit_elements()
    per_group = max(1, round(shape.layers / _UNITS))
    groups: list[list[int]] = []
    for place in range(len(elements)):
        block = 0 < place <= shape.layers
        joins = block and groups and groups[-1][0] > 0 and len(groups[-1]) < per_group
        if joins:
            groups[-1].append(place)
        else:
            groups.append([place])
    single = accumulation_of(setup) is Accumulation.SINGLE
    master = 2 if work.state.sixteen_bit_master else 4
    state = master + work.state.moments
    traffic = setup.habits.update_traffic or 2 * (item + state) - item + (0 if single else 2)
    if setup.optimizer is Home.DEVICE:
        traffic = 2 * (work.precision.master_bytes + work.state.moments) + 3 * item
    moved = setup.habits.state_traffic
    share = ranks if setup.stage >= 1 else 1
    units = []
    for group in groups:
        count = sum(elements[i] for i in group) / work.tensor_parallel
        units.append(
            RankUnit(
                name=f"unit {group[0]}",
                forward=sum(compute.forward[i] for i in group),
                backward=sum(compute.backward[i] for i in group),
                weights=item * count,
                gradients=item * count,
                own_weights=item * count / share,
                own_gradients=item * count / share,
                update=traffic * count / share,
                state_read=(state if moved is None else moved / 2) * count / share,
                state_written=(state if moved is None else moved / 2) * count / share,
            )
        )
    return tuple(units)


def step_forecast(
    shape: ModelShape,
    setup: Setup,
    *,
    profile: Profile,
    places: Sequence[UpdatePlace] | None = None,
) -> StepForecast:
    """Predict a step.

    Args:
        shape: The model.
        setup: How it trains.
        profile: The machine.
        places: Where each unit updates, for state on the host; None for the best that is found.

    Raises:
        ConfigError: The device has no rate for the precision.
    """
    alike = _that_matters(profile, setup)
    return _step_forecast(shape, setup, alike, None if places is None else tuple(places))


def _that_matters(profile: Profile, setup: Setup) -> Profile:
    """The profile without what no second depends on: advice asks what more memory would bring."""
    node, drives = profile.node, profile.drives
    if node is not None:
        node = replace(node, device_bytes=0, host_bytes=0)
    if Home.NVME not in (setup.optimizer, setup.weights):
        drives = None
    elif drives is not None:
        drives = replace(drives, count=1, capacity_bytes=0)
    return replace(profile, node=node, drives=drives)


@functools.lru_cache(maxsize=64)
def _step_forecast(
    shape: ModelShape,
    setup: Setup,
    profile: Profile,
    places: tuple[UpdatePlace, ...] | None,
) -> StepForecast:
    compute = compute_seconds(shape, workload=setup.workload, profile=profile)
    passes = setup.workload.accumulation * (sum(compute.forward) + sum(compute.backward))
    if in_engine(setup):
        engine = _Engine(shape, setup, profile=profile, compute=compute)
        visits = setup.optimizer is Home.HOST and profile.machine.device != "cpu"
        if places is None and visits:
            places = engine.best_places()
        return engine.forecast(tuple(places or ()))
    units = rank_units(shape, setup, compute=compute)
    found = simulate_rank(units, setup=setup, rates=rank_rates(profile, setup))
    return StepForecast(
        seconds=found.seconds,
        compute_seconds=passes,
        bound=_bound(found.seconds, passes, found.busy),
        busy=found.busy,
        timeline=found.timeline,
    )


class _Engine:
    """The engine's program of a setup on a clock, with units in one place or another."""

    def __init__(
        self, shape: ModelShape, setup: Setup, *, profile: Profile, compute: ComputeSeconds
    ) -> None:
        self._shape = shape
        self._setup = setup
        self._rates = _engine_rates(profile, setup)
        self._corrected = profile.corrections.activations
        units = len(compute.forward)
        self._merged = Merged.at_most(_GROUPS if units - 2 > _BLOCKS else units, units=units)
        self._compute = ComputeSeconds(
            forward=self._merged.sums(compute.forward),
            backward=self._merged.sums(compute.backward),
            inputs=self._merged.sums(moved_inputs(shape, setup.workload).by_unit(units)),
        )

    def best_places(self) -> tuple[UpdatePlace, ...]:
        """Where units are best updated: what the simulator says, from the solver's answer on."""
        shape, setup, backwards = self._shape, self._setup, self._setup.workload.accumulation
        spec = self._merged.spec(shape.spec(setup.workload.precision.dtype))
        waiting = backlog_bytes(placement_of(shape, setup))
        room = visit_room(shape, setup, waiting=waiting, corrected=self._corrected)
        weights = WeightPlace(setup.weights.value)
        sizes = [visit_bytes(one, backwards=backwards, weights=weights) for one in spec.units]

        def fits(places: tuple[UpdatePlace, ...]) -> bool:
            pairs = zip(sizes, places, strict=True)
            return sum(size for size, place in pairs if place is UpdatePlace.STREAMED) <= room

        start = choose_places(
            spec,
            rates=self._rates,
            room=DeviceRoom(visit_bytes=room),
            backwards=backwards,
            weights=weights,
        )
        found = search_places(
            start,
            score=lambda places: self._run(self._simulated(backwards), places).step_seconds,
            fits=fits,
            trials=max(_LEAST_TRIALS, _TRIED_UNITS // len(sizes)),
        )
        return tuple(self._merged.spread(found))

    def forecast(self, places: tuple[UpdatePlace, ...]) -> StepForecast:
        """The step with these places; all where the optimizer's state lives when there are none."""
        wanted = self._setup.workload.accumulation
        passes = sum(self._compute.forward) + sum(self._compute.backward)
        few = tuple(self._merged.first_of(places)) if places else ()
        simulated = self._simulated(wanted)
        found = self._run(simulated, few)
        seconds = found.step_seconds
        if wanted > simulated:
            one_more = seconds - self._run(_BACKWARDS - 1, few).step_seconds
            seconds += (wanted - _BACKWARDS) * max(one_more, passes)
        busy = _busy(found.timeline)
        return StepForecast(
            seconds=seconds,
            compute_seconds=wanted * passes,
            bound=_bound(seconds, wanted * passes, busy),
            busy=busy,
            timeline=found.timeline,
            places=places,
        )

    def _simulated(self, wanted: int) -> int:
        """Micro-batches that are simulated; those that make one backward are, all of them."""
        return wanted if self._setup.workload.backwards == 1 else min(wanted, _BACKWARDS)

    def _run(self, backwards: int, places: tuple[UpdatePlace, ...]) -> Simulation:
        work = replace(self._setup.workload, accumulation=backwards)
        setup = replace(self._setup, workload=work)
        placement = placement_of(self._shape, setup, places=places or None, merged=self._merged)
        order = range(len(placement.units))
        uses = Uses.expected(placement, order=order, again=order[: self._shape.tied])
        return simulate(
            build_program(placement, order=order, uses=uses),
            placement=placement,
            rates=self._rates,
            compute=self._compute,
            order=order,
        )


def _engine_rates(profile: Profile, setup: Setup) -> Rates:
    """One rank's share of its node, as the simulator wants it."""
    if setup.cluster.devices == 1:
        return profile.rates()
    mine = rank_rates(profile, setup)
    return Rates(
        host_memory=mine.host_memory,
        link_up=mine.up,
        link_down=mine.down,
        update=mine.update,
        device_memory=mine.device_update,
        file_read=mine.read,
        file_write=mine.write,
        file_both=mine.files,
        ranks=mine.gather,
        collective_seconds=mine.latency_seconds,
    )


def _busy(timeline: Timeline) -> dict[str, float]:
    found: dict[str, float] = {}
    windows = 3
    for row, lane in _ROWS.items():
        found[lane] = found.get(lane, 0.0) + timeline.busy_seconds(row) / windows
    return found


def _bound(seconds: float, passes: float, busy: Mapping[str, float]) -> str:
    if passes >= _COMPUTE_BOUND * seconds:
        return _BOUNDS["compute"]
    others: Sequence[str] = [lane for lane in busy if lane in _BOUNDS and lane != "compute"]
    longest = max(others, key=lambda lane: busy[lane], default="compute")
    return _BOUNDS[longest] if busy.get(longest) else _BOUNDS["compute"]
