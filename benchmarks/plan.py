"""How long a plan takes: processor seconds of `choose` and of the whole text, by question.

python benchmarks/plan.py
"""

from __future__ import annotations

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


def seconds(work) -> float:
    """Median of the repeats after one to warm up."""
    work()
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main() -> None:
    """Print a table."""
    print("| question | choose | the whole plan | --compare |")
    print("|---|---|---|---|")
    for name, asked in QUESTIONS.items():
        question = question_of(asked)
        cells = [
            seconds(lambda q=question: choose(q)),
            seconds(lambda q=question: as_text(choose(q))),
            seconds(lambda q=question: comparison(q).as_text()),
        ]
        print(f"| {name} | " + " | ".join(f"{cell:.3f} s" for cell in cells) + " |")


if __name__ == "__main__":
    main()
