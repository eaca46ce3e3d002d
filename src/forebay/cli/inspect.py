"""`forebay inspect`: what is in a checkpoint, is it whole, how do two differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["inspect"]


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a folder of checkpoints (its latest), or a run's."),
    ],
    *,
    diff: Annotated[Path | None, typer.Option(help="Another one to compare with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show what is in a checkpoint, and verify every byte of it.

    With --diff: how two differ, to the bit; exit code 1 where they do.
    """
    from forebay.checkpoint.describe import (
        compare,
        comparison_lines,
        describe,
        description_lines,
        is_same,
    )
    from forebay.checkpoint.locate import locate
    from forebay.checkpoint.reader import Checkpoint

    with Checkpoint(locate(checkpoint)) as left:
        left.verify()
        if diff is None:
            found = describe(left)
            lines = list(description_lines(found))
            code = 0
        else:
            with Checkpoint(locate(diff)) as right:
                right.verify()
                found = compare(left, right)
            lines = list(comparison_lines(found))
            code = 0 if is_same(found) else 1
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    return code
