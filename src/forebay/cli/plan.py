"""`forebay plan`: what a model takes on a machine, how fast it trains, and what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.outputs import file_to_write, saying, write_text

if TYPE_CHECKING:
    from forebay.plan.ways import Question

__all__ = ["plan"]

_PICTURES = (".svg", ".png")

_Model = Annotated[
    str | None,
    typer.Argument(help="A Hugging Face folder or config.json, or a parameter count: 7e9, 13B."),
]
_Machine = Annotated[
    str | None,
    typer.Option(help="A catalogued machine: v100-32, a100-40, a100-80, 4090, h100, h200, gh200."),
]
_Profile = Annotated[
    Path | None, typer.Option(help="A measured machine: what forebay probe wrote.", dir_okay=False)
]
_Devices = Annotated[int | None, typer.Option(help="Devices of each node. Default: all.")]
_Nodes = Annotated[int, typer.Option(help="Nodes.")]
_HostMemory = Annotated[
    str | None,
    typer.Option(help="Memory of each node, as 64GiB. Default: what the machine has."),
]
_Drives = Annotated[
    int | None,
    typer.Option(help="NVMe drives of each node, like the machine's. Default: as many."),
]
_Batch = Annotated[
    int | None, typer.Option(help="Sequences per update on all devices. Default: 8 a device.")
]
_MicroBatch = Annotated[
    int | None,
    typer.Option(help="Sequences of one pass on one device. Default: the most that fit."),
]
_Sequence = Annotated[int, typer.Option(help="Tokens of a sequence.")]
_Precision = Annotated[
    str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 where the device has it.")
]
_Optimizer = Annotated[str, typer.Option(help="adamw, adam, lamb, lion, momentum, sgd, ...")]
_Recompute = Annotated[
    str, typer.Option(help="blocks (activation checkpointing) or none: what backward recomputes.")
]
_Hidden = Annotated[int | None, typer.Option(help="Hidden size, beside a parameter count.")]
_Layers = Annotated[int | None, typer.Option(help="Layers, beside a parameter count.")]
_Vocab = Annotated[int | None, typer.Option(help="Vocabulary, beside a parameter count.")]
_Compare = Annotated[
    bool, typer.Option("--compare", help="ZeRO stages and offloads side by side, as a table.")
]
_Picture = Annotated[
    Path | None,
    typer.Option(
        help="With --compare, draw it too: a .svg or .png file.",
        dir_okay=False,
        callback=file_to_write,
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(
        help="Write the recommended configuration here.", dir_okay=False, callback=file_to_write
    ),
]
_Learn = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of a run (forebay train) on the --profile's machine; corrects it."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


def plan(  # noqa: PLR0913 - one parameter for each option
    model: _Model = None,
    *,
    machine: _Machine = None,
    profile: _Profile = None,
    devices: _Devices = None,
    nodes: _Nodes = 1,
    host_memory: _HostMemory = None,
    drives: _Drives = None,
    batch: _Batch = None,
    micro_batch: _MicroBatch = None,
    sequence: _Sequence = 2048,
    precision: _Precision = None,
    optimizer: _Optimizer = "adamw",
    recompute: _Recompute = "blocks",
    hidden: _Hidden = None,
    layers: _Layers = None,
    vocab: _Vocab = None,
    compare: _Compare = False,
    picture: _Picture = None,
    config: _Config = None,
    learn: _Learn = None,
    as_json: _Json = False,
) -> int:
    """Say whether a model trains on a machine, how fast, and with which configuration.

    Needs no GPU and takes less than a second. With --learn, correct a profile from runs instead.
    """
    if learn:
        _learn(learn, profile=profile)
        return 0
    from forebay.plan.ask import Asked, question_of

    question = question_of(
        Asked(
            model=model,
            machine=machine,
            profile=profile,
            devices=devices,
            nodes=nodes,
            host_memory=host_memory,
            drives=drives,
            batch=batch,
            micro_batch=micro_batch,
            sequence=sequence,
            precision=precision,
            optimizer=optimizer,
            recompute=recompute,
            hidden=hidden,
            layers=layers,
            vocab=vocab,
        )
    )
    _refuse_outputs(config=config, picture=picture, compare=compare)
    if compare:
        _compare(question, picture=picture, as_json=as_json)
        return 0
    return _answer(question, config=config, as_json=as_json)


def _answer(question: Question, *, config: Path | None, as_json: bool) -> int:
    from forebay.plan.choose import choose
    from forebay.plan.explain import as_dict, as_text, config_of

    choice = choose(question)
    if config is not None and choice.best is not None:
        text = json.dumps(config_of(choice, choice.best), indent=2)
        write_text(config, f"{text}\n")
    shown = json.dumps(as_dict(choice), indent=2) + "\n" if as_json else as_text(choice)
    typer.echo(shown, nl=False)
    return 0 if choice.best is not None else 1


def _refuse_outputs(*, config: Path | None, picture: Path | None, compare: bool) -> None:
    """Before anything is planned, what could not be written after it."""
    from forebay.errors import ConfigError

    if picture is not None and not compare:
        raise ConfigError("--picture draws a comparison", hint="add --compare")
    if picture is not None and picture.suffix not in _PICTURES:
        raise ConfigError(
            f"--picture {picture} is neither a .svg nor a .png file",
            hint=f"--picture {picture.with_suffix('.svg')}",
        )
    if config is not None and compare:
        raise ConfigError(
            "--config writes the recommended way, and --compare shows all of them",
            hint="run forebay plan once with --config and once with --compare",
        )


def _compare(question: Question, *, picture: Path | None, as_json: bool) -> None:
    from forebay.plan.compare import comparison

    table = comparison(question)
    typer.echo(table.as_json() if as_json else table.as_text(), nl=False)
    if picture is not None:
        from forebay.observe.plan_picture import draw_comparison

        with saying(picture):
            draw_comparison(picture, table)
        typer.echo(f"wrote {picture}", err=True)


def _learn(folders: list[Path], *, profile: Path | None) -> None:
    from forebay.errors import ConfigError
    from forebay.hardware.profile import read_profile
    from forebay.plan.learn import learn
    from forebay.plan.run_record import read_record

    if profile is None:
        raise ConfigError(
            "--learn corrects a profile: name it with --profile",
            hint="measure this machine with: forebay probe --output FILE",
        )
    before = read_profile(profile)
    corrected, lessons = learn(before, [read_record(folder) for folder in folders])
    for folder, lesson in zip(folders, lessons, strict=True):
        typer.echo(f"{folder}: {lesson.sentence()}")
    write_text(profile, corrected.as_json())
