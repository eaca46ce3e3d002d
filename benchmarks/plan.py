"""How long a plan takes: processor seconds of `choose` and of the whole text, by question.

python benchmarks/plan.py
"""

from __future__ import annotations

import multiprocessing
import statistics
import time

from forebay.plan.ask import Asked, question_of
from forebay.plan.choose import choose
from forebay.plan.compare import comparison
from forebay.plan.explain import as_text

QUESTIONS = {
    "8B on one 4090": Asked(model="8B", machine="4090", sequence=1024),
    "70B on 8 x A100 80": Asked(model="70B", machine="a100-80"),
    "405B on 64 x DGX H100": Asked(
        model="405B", hidden=16384, layers=126, machine="h100", nodes=64
    ),
    "1T on 512 x DGX H200": Asked(model="1T", machine="h200", nodes=512),
}
REPEATS = 5


WORK = {
    "choose": choose,
    "the whole plan": lambda question: as_text(choose(question)),
    "--compare": lambda question: comparison(question).as_text(),
}


def once(case: tuple[str, str]) -> float:
    """Seconds of one piece of work in a new process, which remembers no forecast."""
    name, work = case
    question = question_of(QUESTIONS[name])
    began = time.process_time()
    WORK[work](question)
    return time.process_time() - began


def seconds(name: str, work: str) -> float:
    """Median of the repeats."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return statistics.median(pool.map(once, [(name, work)] * REPEATS, chunksize=1))


def main() -> None:
    """Print a table."""
    print(f"| question | {' | '.join(WORK)} |")
    print("|---|---|---|---|")
    for name in QUESTIONS:
        cells = [seconds(name, work) for work in WORK]
        print(f"| {name} | " + " | ".join(f"{cell:.3f} s" for cell in cells) + " |")


if __name__ == "__main__":
    main()
