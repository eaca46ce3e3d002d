"""`forebay export`: a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


class _Dtype(Enum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, a folder of checkpoints (its latest), or a run's."),
    ],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    *,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Of weights. Default: what each was trained in.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer. Default: what forebay train kept in the run."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as one JSON object.")
    ] = False,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder, with configuration and tokenizer.

    Only a PEFT adapter is written where only it was trained.
    """
    from forebay.checkpoint.export import export as run
    from forebay.checkpoint.locate import locate
    from forebay.checkpoint.reader import Checkpoint
    from forebay.units_of_measure import counted, format_bytes

    with Checkpoint(locate(checkpoint)) as opened:
        written = run(
            opened, out, dtype=None if dtype is None else dtype.value, tokenizer=tokenizer
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(written), indent=2))
        return 0
    what = "adapter" if written.is_adapter else "model"
    typer.echo(
        f"{what}: {counted(written.tensors, 'tensor')}, {format_bytes(written.nbytes)} in "
        f"{counted(written.files, 'file')}, {written.path}"
    )
    if not written.has_config:
        typer.echo(
            "the model had no Hugging Face configuration, so there is no config.json", err=True
        )
    if not written.has_tokenizer:
        typer.echo("no tokenizer is known: --tokenizer names its folder", err=True)
    return 0
