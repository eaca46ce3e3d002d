"""The plan beside the run: memory by tier and step seconds, predicted and measured.

Every workload trains for a few updates in one process; models are built once and trained on by the
next workload of the same shape. A repeat of a workload is a run, in turn with the other workloads.
The machine is measured anew before each round of them, on shared cores before each workload, and
a drive, which others may use, just before state lies in files. With
--output a table and the raw numbers are written, after each workload; `--onto FILE` adds repeats to
such numbers.

    python benchmarks/predicted.py --output results
    python benchmarks/predicted.py --workloads w1,w3,nvme --drive /local_nvme --output results
    python benchmarks/predicted.py --sweep --output results

`--again FILE` predicts the runs of such a file anew, from the profile in it, and measures nothing.
`--sweep` trains W1 with other numbers of units streamed beside the number that the plan chooses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from predicted_cases import CASES, WARM_UP, Trainer, predicted

from forebay.accelerators.select import default_device, device_name
from forebay.bench.tables import file_stem
from forebay.errors import ForebayError
from forebay.hardware.profile import Machine, Profile, read_profile
from forebay.hardware.rates import Drives
from forebay.plan.placement import UpdatePlace
from forebay.plan.setup import Home
from forebay.probe.folder import measure_drive
from forebay.probe.measuring import Effort, measure


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {text}", file=sys.stderr, flush=True)


BEGAN = time.perf_counter()


def machine_profile(trainer: Trainer) -> Profile:
    """Measured now, or given."""
    if trainer.profile is not None:
        return trainer.profile
    effort = None
    if trainer.device.type == "cpu":
        effort = Effort(elements=4 << 20, link_bytes=64 << 20, repeats=3)
    return measure(trainer.device, effort=effort)


def measured_drive(folder: Path) -> Drives:
    """The drive now: others may share it, and change it from minute to minute."""
    found = measure_drive(folder)
    rates = ", ".join(f"{getattr(found, k) / 1e9:.2f} {k}" for k in ("read", "write", "both"))
    say(f"drive measured, GB/s: {rates}")
    return found


def run(
    names: list[str], *, trainer: Trainer, repeats: int, before: dict[str, Any], keep: Any
) -> dict[str, Any]:
    """Train all cases; `before` was found earlier, `keep` is given what was found so far."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rows |= before.get("rows", {})
    failed: dict[str, str] = {}
    for repeat in range(repeats):
        profile = None
        for name in names:
            case = CASES[name]
            if profile is None or trainer.device.type == "cpu":
                profile = machine_profile(trainer)
                say("machine measured")
            if case.optimizer is Home.NVME and trainer.drive and trainer.profile is None:
                profile = replace(profile, drives=measured_drive(trainer.drive))
            try:
                took = trainer.measured(case, profile=profile)
            except (RuntimeError, ForebayError) as error:
                failed[name] = str(error).partition("\n")[0]
                say(f"{name} did not finish: {failed[name]}")
                continue
            said = predicted(case, profile=profile)
            own = json.loads(profile.as_json())
            rows[name].append({"predicted": said, "measured": took, "profile": own})
            ratio = said["seconds"] / took["seconds"]
            say(f"repeat {repeat}: {name}: {took['seconds']:.4f} s, predicted {ratio:.3f} of it")
            keep({"rows": {n: r for n, r in rows.items() if r}, "failed": failed})
    return {"rows": {n: r for n, r in rows.items() if r}, "failed": failed}


def again(path: Path) -> dict[str, Any]:
    """The runs of a file with what the planner says of them now."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, repeats in found["rows"].items():
        for one in repeats:
            profile = Profile.from_dict(one["profile"], source=str(path))
            one["predicted"] = predicted(CASES[name], profile=profile)
    return found


def table(found: dict[str, Any]) -> str:
    """Medians over the repeats, each of which is the median of its timed steps."""
    lines = [
        "| workload | step, predicted s | measured s | ratio (of each repeat) "
        "| host, predicted GB | measured | files, predicted GB | measured "
        "| device placed, predicted GB | measured | device peak, predicted GB | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, repeats in found["rows"].items():
        pairs = [(r["predicted"]["seconds"], r["measured"]["seconds"]) for r in repeats]
        ratios = [said / took for said, took in pairs]
        said, took = (statistics.median(side) for side in zip(*pairs, strict=True))
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cells = [name, f"{said:.4f}", f"{took:.4f}", f"{statistics.median(ratios):.2f} ({spread})"]
        last = repeats[-1]
        cells += [
            f"{last[side]['tiers'].get(tier, 0) / 1e9:,.3f}"
            for tier in ("host", "nvme", "device")
            for side in ("predicted", "measured")
        ]
        peak = last["measured"]["peak"]
        foretold = last["predicted"]["peak"]
        cells.append(f"{foretold / 1e9:.2f}")
        cells += [f"{peak / 1e9:.2f}", f"{foretold / peak:.3f}"] if peak else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{name} did not finish: {words}" for name, words in found["failed"].items()]
    return "\n".join(lines) + "\n"


def sweep(counts: list[int] | None, *, trainer: Trainer, name: str) -> tuple[dict[str, Any], str]:
    """A case with other numbers of units streamed beside the number that the plan chooses."""
    case = CASES[name]
    profile = machine_profile(trainer)
    say("machine measured")
    chosen = predicted(case, profile=profile)["streamed"]
    units = len(case.shape.unit_elements())
    tried = counts or [max(0, chosen - 4), chosen + 4, 0, units // 2, units]
    tried = [k for k in dict.fromkeys(tried) if k != chosen and 0 <= k <= units]
    rows: list[dict[str, Any]] = []
    # The chosen one first and last: what lies between them is the machine's drift.
    for streamed in [chosen, *tried, chosen]:
        places = [UpdatePlace.STREAMED] * streamed + [UpdatePlace.HOST] * (units - streamed)
        took = trainer.placed(case, places=places, profile=profile)
        rows.append({"streamed": streamed, **took})
        say(f"{streamed} of {units} units streamed: {took['seconds']:.4f} s")
    least = min(row["seconds"] for row in rows)
    lines = ["| units streamed | step s | each step | of the least |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda one: one["streamed"]):
        mark = " (chosen)" if row["streamed"] == chosen else ""
        each = ", ".join(f"{second:.3f}" for second in row["all_seconds"][WARM_UP:])
        lines.append(
            f"| {row['streamed']} of {units}{mark} | {row['seconds']:.4f} | {each} "
            f"| {row['seconds'] / least:.3f} |"
        )
    found = {"case": name, "chosen": chosen, "rows": rows, "profile": json.loads(profile.as_json())}
    return found, "\n".join(lines) + "\n"


def write(folder: Path, kind: str, found: dict[str, Any], text: str, *, device: Any) -> None:
    machine = Machine.read(device_name(device))
    words = f"{kind} {machine.cpu} {machine.cpus} cpus {machine.device} torch {torch.__version__}"
    stem = file_stem(words.partition("+")[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(text)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", help="names, by commas; default: all of this device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    parser.add_argument("--profile", type=Path, help="of forebay probe --drive, just before")
    parser.add_argument("--host-budget", help="where the machine's memory grows as it is touched")
    parser.add_argument("--drive", type=Path, help="a folder for state in files")
    parser.add_argument("--sweep", action="store_true", help="W1 with other placements")
    parser.add_argument("--counts", help="for --sweep: numbers of units streamed, by commas")
    parser.add_argument("--onto", type=Path, help="numbers of an earlier call, to add repeats to")
    parser.add_argument("--again", type=Path, help="predict the runs of a result anew")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.again is not None:
        print(table(again(given.again)))
        return
    device = default_device()
    trainer = Trainer(
        device=device,
        steps=given.steps,
        drive=given.drive,
        host_budget=given.host_budget,
        profile=read_profile(given.profile) if given.profile else None,
    )
    cpu = device.type == "cpu"
    if given.sweep:
        counts = [int(k) for k in given.counts.split(",")] if given.counts else None
        name = given.workloads or ("cpu-small" if cpu else "w1")
        found, text = sweep(counts, trainer=trainer, name=name)
        kind = f"sweep-{name}"
    else:
        usual = [n for n in CASES if n.startswith("cpu") is cpu and n != "w3-streamed"]
        if given.drive is None:
            usual = [name for name in usual if CASES[name].optimizer is not Home.NVME]
        names = given.workloads.split(",") if given.workloads else usual

        def keep(so_far: dict[str, Any]) -> None:
            if given.output is not None:
                write(given.output, "predicted", so_far, table(so_far), device=device)

        before = json.loads(given.onto.read_text(encoding="utf-8")) if given.onto else {}
        found = run(names, trainer=trainer, repeats=given.repeats, before=before, keep=keep)
        text, kind = table(found), "predicted"
    print(text)
    say("done")
    if given.output is not None:
        write(given.output, kind, found, text, device=device)


if __name__ == "__main__":
    main()
