"""Options that the verbs of `forebay bench` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.outputs import folder_to_write

__all__ = [
    "Accumulation",
    "AnyVariants",
    "Budget",
    "Clip",
    "Device",
    "DeviceBudget",
    "Elements",
    "Folder",
    "Json",
    "Limit",
    "Micro",
    "Micros",
    "Output",
    "OwnVariants",
    "Profile",
    "Repeats",
    "Sequence",
    "Size",
    "Steps",
    "Threads",
    "Timeline",
    "Variants",
]

Output = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the table and its raw numbers. Default: none.", callback=folder_to_write
    ),
]
Folder = Annotated[
    Path, typer.Option(help="Where: on the drive to measure.", exists=True, file_okay=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print raw numbers instead of the table.")]
_WHO = (
    "Contestants in turn, separated by commas: floor, none, planned, host, device, synchronous, "
    "r0 ... r100 (percent of the state that stays on the device), streamed (weights on the host; "
    "+P: P GB of the device for them; +P+R: the first share R resident; +host: the others' state "
    "never visits), mix+R+S, each with +layer (micro-batches block by block), +speculative, "
    "+delayed or +zenflow (how updates run) and +offload (activations on the host too), "
    "deepspeed2, deepspeed3, deepspeed3super, deepspeed2zenflow, fsdp2."
)
Variants = Annotated[
    str,
    typer.Option(help=f"{_WHO} deepspeed3@8+16 takes part at micro-batches 8 and 16 alone."),
]
OwnVariants = Annotated[str, typer.Option(help="forebay's variants in turn, as in bench step.")]
AnyVariants = Annotated[str, typer.Option(help="Contestants in turn, as in bench step.")]
Size = Annotated[
    str, typer.Option(help="Llama shape: nano, tiny, 1b, 3b, 7b, 8k, 32k, 13b, 18b, 19b, 20b.")
]
Micro = Annotated[int, typer.Option("--micro-batch", help="Rows of one forward.", min=1)]
Micros = Annotated[
    str,
    typer.Option(
        "--micro-batch", help="Rows of one forward; several, ascending, are measured in turn: 2,8."
    ),
]
Sequence = Annotated[int, typer.Option(help="Tokens in a row.", min=1)]
Accumulation = Annotated[int, typer.Option(help="Micro-batches per update.", min=1)]
Steps = Annotated[int, typer.Option(help="Updates, two of them warm-up.", min=3)]
Clip = Annotated[float, typer.Option(help="Bound on the global gradient norm.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="Update threads. Default: all cores but one.")]
Budget = Annotated[
    str | None, typer.Option(help="Host memory that forebay may use, as 120GiB. Default: what is.")
]
DeviceBudget = Annotated[
    str | None,
    typer.Option(help="Device memory that a process may use, as 48GiB. Default: all of it."),
]
Timeline = Annotated[
    str,
    typer.Option(
        help="File for a trace of three more steps (.json, with a picture beside it); {variant} "
        "and {tokens} in it are replaced. Default: none."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="The machine's ceilings, as forebay probe --output writes them. Default: measured now."
    ),
]
Limit = Annotated[float, typer.Option(help="Seconds after which a contestant is given up.")]
Elements = Annotated[int, typer.Option(help="Parameters of one pass.", min=1)]
Repeats = Annotated[int, typer.Option(help="Rounds.", min=1)]
