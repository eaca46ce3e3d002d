"""A plan in words: one sentence first, then the table, then the reasons; and the same as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.plan.advice import margins, offload_worth
from forebay.plan.choose import Verdict
from forebay.plan.compute import issue_share, model_flops
from forebay.plan.nearest import nearest_changes
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.ready import not_built, ready_config
from forebay.plan.residents import host_share
from forebay.plan.setup import Home
from forebay.plan.words import ROLES, TIERS, in_words, meanings
from forebay.plan.workload import Precision, Recompute
from forebay.units_of_measure import format_bytes, format_seconds, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.plan.choose import Candidate, Choice

__all__ = ["as_dict", "as_text", "config_of", "sentence", "warnings_of"]

# Below so many cores for each device an update on the host is slow whatever its memory.
_FEW_CORES = 4
# Of the passes; below this a larger batch gains little.
_WAITS = 0.25
# A drive's rated life: about one full write a day for five years.
_DRIVE_WRITES = 1825


def tokens_per_second(choice: Choice, one: Candidate) -> float:
    """Of all devices together."""
    cluster = choice.question.cluster
    devices = cluster.devices // one.setup.workload.tensor_parallel
    return one.setup.workload.tokens_per_update * devices / one.seconds


def sentence(choice: Choice) -> str:
    """The answer for a person who has never trained a model."""
    question = choice.question
    cluster = question.cluster
    size = f"{in_words(question.shape.parameters)} parameters"
    many = cluster.devices > 1
    device = question.profile.machine.device
    on = f"{cluster.devices} devices ({device})" if many else f"this device ({device})"
    if cluster.nodes > 1:
        on += f" in {cluster.nodes} nodes"
    best = choice.best
    if best is None:
        short = choice.nearest.short
        lacks = listed([f"{format_bytes(lack)} on {TIERS[tier]}" for tier, lack in short.items()])
        return f"Training all {size} does not fit on {on}: the closest way still lacks {lacks}."
    where = {
        Home.DEVICE: f"with everything in the memory of the device{'s' if many else ''}",
        Home.HOST: "with part of the training state in host memory",
        Home.NVME: "with part of the training state on drives",
    }[Home.NVME if best.tiers.total("nvme") else _without_drives(best.setup.optimizer)]
    pace = tokens_per_second(choice, best)
    return (
        f"Yes, this fits: all {size} train on {on} {where}, at about "
        f"{format_seconds(best.seconds)} per update, which is {pace:,.0f} tokens a second."
    )


def _without_drives(home: Home) -> Home:
    """Where state is that is asked to be on drives, when memory holds all of it."""
    return Home.HOST if home is Home.NVME else home


def as_text(choice: Choice) -> str:
    """The whole plan."""
    lines = [sentence(choice), ""]
    shown = choice.best or choice.nearest
    lines += _table(choice, shown)
    if choice.best is not None:
        lines += ["", *_speed(choice, choice.best)]
    head = "Why this one, and not another:" if choice.best else "Why no way fits:"
    lines += ["", head, *_alternatives(choice.all)]
    if choice.best is None:
        lines += ["", "The nearest changes that fit:", *_nearest(choice)]
    else:
        lines += ["", "What more would buy:", *_margins(choice)]
    lines += ["", f"Is offload worth it here? {offload_worth(choice).sentence}"]
    found = list(warnings_of(choice))
    if found:
        lines += ["", "Mind:", *(f"  - {one}" for one in found)]
    words = meanings("\n".join(lines))
    lines += ["", "Words:", *(f"  {one}" for one in words)]
    return "\n".join(lines) + "\n"


def _table(choice: Choice, one: Candidate) -> list[str]:
    closest = "" if one is choice.best else " (the closest way)"
    lines = [f"{'bytes by place and kind':<28}{one.setup.label}{closest}"]
    for tier, title in TIERS.items():
        roles = getattr(one.tiers, tier)
        limit = getattr(choice.capacity, tier)
        if not roles:
            continue
        for role, nbytes in sorted(roles.items(), key=lambda item: -item[1]):
            lines.append(f"  {title:<20} {ROLES.get(role, role):<18} {format_bytes(nbytes):>11}")
        lines.append(
            f"  {title:<20} {'all of it':<18} {format_bytes(sum(roles.values())):>11}"
            f"  of {format_bytes(limit)} usable"
        )
    return lines


def _speed(choice: Choice, one: Candidate) -> Iterator[str]:
    step, work = one.step, one.setup.workload
    assert step is not None
    flops = model_flops(choice.question.shape, work) / one.seconds
    yield (
        f"An update takes {format_seconds(step.seconds)}, {format_seconds(step.compute_seconds)} "
        f"of it computation ({flops / 1e12:,.3g} TFLOP/s a device); "
        f"the pace is set by {step.bound}."
    )
    ranks = one.setup.ranks
    yield (
        f"An update: {work.micro_batch} x {work.sequence} tokens in {work.accumulation} "
        f"pass{'es' if work.accumulation > 1 else ''} on {ranks} "
        f"device{'s' if ranks > 1 else ''} = {work.tokens_per_update * ranks:,} tokens."
    )
    yield from _whereabouts(choice, one)


def _whereabouts(choice: Choice, one: Candidate) -> Iterator[str]:
    """Where the optimizer's state is when it is not all in one place."""
    assert one.step is not None
    places = one.step.places
    counts = {place: places.count(place) for place in set(places)}
    resident, visits = counts.get(UpdatePlace.DEVICE, 0), counts.get(UpdatePlace.STREAMED, 0)
    head = f"The model is cut into {len(places)} units, about one for each layer"
    if resident:
        share = 1 - host_share(choice.question.shape, places)
        first = f"first {resident}" if resident > 1 else "first"
        yield (
            f"{head}: the state of the {first} ({share:.0%} of it) stays on the device, "
            "the others are updated on the host."
        )
    elif visits:
        yield (
            f"{head}: the state of {visits} visits the device for its update, the others are "
            "updated on the host."
        )
    elif places:
        yield f"{head}: all are updated on the host."
    sizes = [
        sum(tier.get(role, 0) for role in ("hp_params", "optim_states"))
        for tier in (one.tiers.host, one.tiers.nvme)
    ]
    if all(sizes):
        whose = "Of the state that does not stay there" if resident else "Of the optimizer's state"
        kept = f"{sizes[0] / sum(sizes):.0%}"
        kept = "hardly any" if kept == "0%" else kept
        yield (
            f"{whose} {kept} stays in host memory; the rest comes from drives for each update and "
            "goes back."
        )


def _alternatives(all_of_them: Sequence[Candidate]) -> Iterator[str]:
    for one in all_of_them:
        mark = "->" if one.verdict is Verdict.RECOMMENDED else "  "
        time = format_seconds(one.seconds) if one.step else "-"
        yield f"{mark} {one.setup.label:<56} {time:>11}  {one.verdict.value}: {one.reason}"


def _margins(choice: Choice) -> Iterator[str]:
    for change in margins(choice):
        if change.seconds is None or change.saves < 0.001:
            yield f"  {change.what}: nothing, the step stays as long"
        else:
            yield f"  {change.what}: saves {change.saves:.1%} of a step"


def _nearest(choice: Choice) -> Iterator[str]:
    found = nearest_changes(choice)
    for change in found:
        yield f"  {change.what}: fits, {format_seconds(change.seconds)} per update"
    if not found:
        yield "  none of: recomputation, smaller batches, shorter sequences, twice the nodes"


def warnings_of(choice: Choice) -> Iterator[str]:
    """Common mistakes that this plan is near to."""
    best, question = choice.best, choice.question
    work, node = question.workload, question.profile.node
    assert node is not None
    asked, has = question.cluster.devices_per_node, question.has_devices
    if has is not None and asked > has:
        yield (
            f"this machine has {has} device{'s' if has > 1 else ''}, not {asked}: the figures are "
            f"of a machine with {asked} that share its host memory, drives and network as they are"
        )
    lacks = not_built(best.setup) if best else ""
    if lacks:
        yield f"this version does not run {lacks} yet; the figures are a forecast only"
    if best:
        waits = issue_share(question.shape, workload=best.setup.workload, profile=question.profile)
        if waits > _WAITS:
            yield (
                f"for {waits:.0%} of the passes the device waits for the processor to issue "
                f"operations: {1 / (1 - waits):.2g} times as many tokens in a pass take hardly "
                "longer"
            )
    if best and best.setup.workload.order is AccumulationOrder.LAYER:
        yield "in layer order an update's micro-batches come together: engine.train_batch"
    if work.recompute is Recompute.BLOCKS:
        yield (
            "call the model's gradient_checkpointing_enable(), or train with forebay train "
            "--gradient-checkpointing: the plan counts on recomputation"
        )
    if work.precision is Precision.FP16:
        yield "fp16 needs a loss scale; bf16 does not, where the device has it"
    if best is None or best.setup.optimizer is Home.DEVICE:
        return
    host = best.tiers.total("host")
    yield f"reserve {format_bytes(host)} of host memory (container and job limits count)"
    cores = node.cores / question.cluster.devices_per_node
    if cores < _FEW_CORES:
        yield f"{cores:.3g} cores for each device are few: too few cost 30-50% of the speed"
    if question.profile.machine.device != "cpu":
        yield "host memory must be page-locked for the link's full rate: see forebay probe --report"
    drives, written = question.profile.drives, best.tiers.total("nvme")
    if written and drives is not None:
        days = drives.capacity_bytes * _DRIVE_WRITES / (written / best.seconds * 86400)
        yield (
            f"each update writes {written / 1e12:.3g} TB to each node's drives: at this pace they "
            f"reach their rated life in {days:,.0f} days"
        )
        yield "use local drives only, one set in every node, never a network disk"


def as_dict(choice: Choice) -> dict[str, Any]:
    """The plan as JSON values."""
    best = choice.best
    worth = offload_worth(choice)
    found: dict[str, Any] = {
        "sentence": sentence(choice),
        "model": {
            "name": choice.question.shape.name,
            "parameters": choice.question.shape.parameters,
            "layers": choice.question.shape.layers,
            "hidden": choice.question.shape.hidden,
        },
        "machine": choice.question.profile.machine.device,
        "fits": best is not None,
        "capacity_bytes": {
            tier: getattr(choice.capacity, tier) for tier in ("device", "host", "nvme")
        },
        "candidates": [_candidate(one) for one in choice.all],
        "offload_worth": {
            "link_bytes": worth.link_bytes,
            "link_seconds": worth.link_seconds,
            "slowdown": worth.slowdown,
            "sentence": worth.sentence,
        },
        "warnings": list(warnings_of(choice)),
    }
    if best is None:
        found["short_bytes"] = choice.nearest.short
        found["nearest"] = [
            {"change": one.what, "seconds": one.seconds} for one in nearest_changes(choice)
        ]
        return found
    found["recommended"] = _candidate(best)
    found["tokens_per_second"] = tokens_per_second(choice, best)
    if best.setup.workload.state.built:
        found["config"] = config_of(choice, best)
    found["margins"] = [
        {"change": one.what, "seconds": one.seconds, "saves": one.saves} for one in margins(choice)
    ]
    return found


def config_of(choice: Choice, one: Candidate) -> dict[str, Any]:
    """The configuration of a candidate, its units named where the shape is the model's own.

    Raises:
        ConfigError: forebay does not run the optimizer.
    """
    places = one.step.places if one.step else ()
    share = host_share(choice.question.shape, places)
    if share < 1 or not choice.question.names_units:
        places = ()
    return ready_config(one.setup, places=places, host_share=share)


def _candidate(one: Candidate) -> dict[str, Any]:
    step = one.step
    return {
        "label": one.setup.label,
        "not_built": not_built(one.setup),
        "stage": one.setup.stage,
        "optimizer": one.setup.optimizer.value,
        "weights": one.setup.weights.value,
        "micro_batch": one.setup.workload.micro_batch,
        "accumulation": one.setup.workload.accumulation,
        "accumulation_order": one.setup.workload.order.value,
        "bytes": {tier: dict(getattr(one.tiers, tier)) for tier in ("device", "host", "nvme")},
        "seconds": step.seconds if step else None,
        "compute_seconds": step.compute_seconds if step else None,
        "streamed_units": step.places.count(UpdatePlace.STREAMED) if step else None,
        "bound": step.bound if step else None,
        "verdict": one.verdict.value,
        "reason": one.reason,
    }
