"""How training scales over ranks: stages and offloads at 1, 2, 4, 8 ranks of one host.

The driver starts torchrun for each number of ranks and library; the combinations train in turn in
those processes, each under a time limit. One that outlasts it, or fails, is named in the table
and costs a new start.

    python benchmarks/scaling.py --shape 3b --device cuda --ranks 1,2,4,8 --output results
    python benchmarks/scaling.py --shape 3b --device cuda --ranks 2 --deterministic --steps 1
    python benchmarks/scaling.py --ranks 1,2,3    # the dry run, over gloo

All of forebay's combinations of one number of ranks have to end with the same weights. On a GPU
that is asked of the deterministic run alone: some of torch's kernels add in any order.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torchrun
from scaling_worker import parse

from forebay.bench.tables import file_stem

BATCHES = {"nano": (2, 32), "1b": (8, 2048), "3b": (8, 2048)}
VARIANTS = (
    "floor,zero1+none,zero2+none,zero3+none,zero1+cpu,zero2+cpu,zero3+cpu,zero3+params,"
    "deepspeed2+cpu,deepspeed3+params,fsdp2+none,fsdp2+cpu"
)


class Driver:
    """Runs combinations and collects every rank's figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.total_seconds
        self.results: list[dict[str, Any]] = []
        self.linked: set[int] = set()

    def run(self) -> list[dict[str, Any]]:
        for count in self.options.ranks:
            groups: dict[str, list[tuple[int, str]]] = {}
            for number, name in enumerate(self.options.variants):
                library = parse(name)[0]
                groups.setdefault("forebay" if library == "floor" else library, []).append(
                    (number, name)
                )
            for library, cases in groups.items():
                if library in ("forebay", *self.options.peers_at.get(count, ())):
                    self._group(count, cases)
        return self.results

    def _group(self, count: int, cases: list[tuple[int, str]]) -> None:
        while cases:
            with tempfile.TemporaryDirectory() as folder:
                ended = self._start(count, cases, Path(folder))
                found = torchrun.gather(folder)
            self.results += [result for result in found if "failure" not in result]
            done = [c for c in cases if sum(r["variant"] == c[1] for r in found) == count]
            failures = {r["variant"]: r["failure"] for r in found if "failure" in r}
            done = [case for case in done if case[1] not in failures]
            left = [case for case in cases if case not in done]
            if left:
                name = left[0][1]
                why = failures.get(name, ended or "ended without a word")
                self.results.append({"variant": name, "ranks": count, "failure": why})
                print(f"{count} ranks, {name}: {why}", file=sys.stderr)
            cases = left[1:] if time.monotonic() < self.until else []

    def _start(self, count: int, cases: list[tuple[int, str]], folder: Path) -> str:
        """Run torchrun until it ends or a combination outlasts its limit; says which."""
        options = self.options
        rows, length = BATCHES[options.shape]
        work = {
            "folder": str(folder),
            "cases": cases,
            "shape": options.shape,
            "device": options.device,
            "steps": options.steps,
            "host_budget": options.host_budget,
            "rows": options.rows or rows,
            "length": length,
            "links": count not in self.linked,
            "deterministic": options.deterministic,
            "timeline_of": options.timeline,
            "timeline": str(_timeline(options, count)),
        }
        self.linked.add(count)
        worker = Path(__file__).with_name("scaling_worker.py")
        command = torchrun.command(worker, json.dumps(work), ranks=count)
        threads = max(1, (os.cpu_count() or 1) // count)
        environment = torchrun.environment(
            device=options.device,
            threads=threads,
            NCCL_NVLS_ENABLE="0",
            **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if options.deterministic else {}),
        )
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        # The first one's limit begins when the ranks have met.
        seen, since = 0, time.monotonic() + options.start_seconds
        try:
            while process.poll() is None:
                time.sleep(0.2)
                now = len(list(folder.glob("[0-9]*.json")))
                if now > seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > options.limit_seconds:
                    return f"no end within {options.limit_seconds:.0f} s"
                if time.monotonic() > self.until:
                    return f"not within the {options.total_seconds:.0f} s of the whole run"
            return ""
        finally:
            _end(process)


def _timeline(options: argparse.Namespace, count: int) -> Path:
    """Without an ending."""
    name = f"timeline-{options.timeline}-{count}-ranks"
    return (options.output or Path()) / file_stem(name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun and its ranks, which are a session of their own."""
    if process.poll() is None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, sent)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                continue
            break


def table(results: list[dict[str, Any]]) -> str:
    """One line for each number of ranks and combination; the slowest rank's seconds."""
    heads = ("ranks", "variant", "s/step", "tokens/s", "exposed exchange s", "beyond floor s")
    heads += (
        "down GB/s",
        "up GB/s",
        "both, all ranks",
        "rank-rank GB a step",
        "gathers in time",
        "update s",
    )
    heads += ("host GB a rank", "RSS GB", "device GB a rank", "peak GB", "loss", "weights")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for count, name in dict.fromkeys((r["ranks"], r["variant"]) for r in results):
        of = [r for r in results if (r["ranks"], r["variant"]) == (count, name)]
        if name == "links":
            continue
        failure = next((r["failure"] for r in of if "failure" in r), None)
        cells = [failure] if failure else _cells(of, results)
        lines.append("| " + " | ".join([str(count), name, *cells]) + " |")
    return "\n".join(lines)


def _cells(of: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[str]:
    def most(key: str, scale: float = 1.0) -> str:
        values = [r[key] for r in of if r.get(key) is not None]
        return f"{max(values) / scale:.3g}" if values else ""

    slowest = max(r["seconds"] for r in of)
    floors = [r["seconds"] for r in results if r["variant"] == "floor" if "seconds" in r]
    if not floors:
        beyond = ""
    else:
        same = [
            r["seconds"]
            for r in results
            if (r["variant"], r["ranks"]) == ("floor", of[0]["ranks"]) and "seconds" in r
        ]
        beyond = f"{slowest - max(same or floors):.3g}"
    silent = [r["silent_seconds"] for r in of if "silent_seconds" in r]
    moved = sum(r.get("down_bytes", 0) + r.get("up_bytes", 0) for r in of)
    between = max(sum(r.get("rank_bytes", {}).values()) for r in of)
    return [
        f"{slowest:.4g}",
        f"{sum(r['tokens'] for r in of) / slowest:,.0f}",
        f"{slowest - max(silent):.3g}" if silent else "",
        beyond,
        _rate(of, "down"),
        _rate(of, "up"),
        f"{moved / slowest / 1e9:.3g}" if moved else "",
        f"{between / 1e9:.3g}" if between else "",
        _in_time(of),
        most("update_seconds"),
        _ledger(of, "host"),
        most("host_resident", 1e9),
        _ledger(of, "device"),
        most("device_peak", 1e9),
        f"{sum(r['losses'][-1] for r in of) / len(of):.5f}",
        _same({r["weights"] for r in of if "weights" in r}),
    ]


def _rate(of: list[dict[str, Any]], way: str) -> str:
    """While a link is busy; the slowest rank's."""
    rates = [r[f"{way}_bytes"] / r[f"{way}_busy"] for r in of if r.get(f"{way}_busy")]
    return f"{min(rates) / 1e9:.3g}" if rates else ""


def _ledger(of: list[dict[str, Any]], tier: str) -> str:
    sums = [
        sum(n for name, n in r["ledger"].items() if name.startswith(tier))
        for r in of
        if "ledger" in r
    ]
    return f"{max(sums) / 1e9:.3g}" if sums else ""


def _in_time(of: list[dict[str, Any]]) -> str:
    """Of the uses of weights that are not on the device for good."""
    counts = [sum(r.get(key, 0) for r in of) for key in ("in_time", "late")]
    return f"{100 * counts[0] / sum(counts):.0f}%" if sum(counts) else ""


def _same(found: set[str]) -> str:
    return "" if not found else found.pop() if len(found) == 1 else "DIFFER"


def links(results: list[dict[str, Any]]) -> str:
    """What page-locked copies reach while every rank copies."""
    lines = []
    for count in dict.fromkeys(r["ranks"] for r in results if r["variant"] == "links"):
        of = [r for r in results if (r["ranks"], r["variant"]) == (count, "links")]
        for ways in ("up", "down", "up+down"):
            rates = [r[ways] / 1e9 for r in of if ways in r]
            if rates:
                each = ", ".join(f"{rate:.1f}" for rate in rates)
                lines.append(f"- {count} ranks, {ways}: {each} GB/s; {sum(rates):.1f} in all")
    return "\n".join(lines)


def refuse_different_bits(results: list[dict[str, Any]]) -> None:
    """At one number of ranks every combination of forebay's has the same weights."""
    for count in sorted({r["ranks"] for r in results}):
        found = {r["weights"] for r in results if r["ranks"] == count and "weights" in r}
        if len(found) > 1:
            sys.exit(f"{count} ranks ended with {len(found)} different sets of weights: {found}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(BATCHES), default="nano")
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--peers-at", help="Ranks at which peers run; all by default.")
    parser.add_argument("--rows", type=int, help="Rows of one forward on each rank.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--host-budget", help="Of the machine, for forebay: 200GB.")
    parser.add_argument("--limit-seconds", type=float, default=60, help="For each combination.")
    parser.add_argument("--start-seconds", type=float, default=40, help="For the ranks to meet.")
    parser.add_argument("--total-seconds", type=float, default=1200, help="For everything.")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="Compare weights on a GPU too, in slower kernels; not for figures of time.",
    )
    parser.add_argument("--timeline", help="A combination of forebay's to draw into --output.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.timeline is not None and options.output is None:
        parser.error("--timeline needs --output, where it is written")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    options.deterministic |= options.device == "cpu"
    options.ranks = [int(count) for count in options.ranks.split(",")]
    options.variants = options.variants.split(",")
    for name in options.variants:
        parse(name)
    at = options.ranks if options.peers_at is None else map(int, options.peers_at.split(","))
    options.peers_at = dict.fromkeys(at, ("deepspeed", "fsdp2"))
    return options


def main() -> None:
    options = _options()
    # The ranks are a session of their own: who ends the driver means them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = Driver(options).run()
    text = "\n\n".join(part for part in (table(results), links(results)) if part)
    print(text)
    if options.output is not None:
        version = torch.__version__.split("+")[0]
        name = f"scaling-{options.shape}-{options.device}-torch{version}"
        (options.output / f"{name}.json").write_text(json.dumps(results, indent=1))
        machine = torch.cuda.get_device_name() if options.device == "cuda" else "processor cores"
        head = f"`python {' '.join(sys.argv)}` on {machine}, {os.cpu_count()} cores\n\n"
        (options.output / f"{name}.md").write_text(head + text + "\n")
    refuse_different_bits(results)


if __name__ == "__main__":
    main()
