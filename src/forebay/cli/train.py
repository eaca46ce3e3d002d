"""`forebay train`: options to `forebay.train`, its result to stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.train.options import (
    ExistingOutput,
    GradientCheckpointing,
    Offload,
    Packing,
    SaveEvery,
    Schedule,
    TrainOptions,
)

__all__ = ["train"]


def _option(words: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=words, **settings)


_Model = Annotated[
    Path, _option("Local Hugging Face folder, or a config.json to start from scratch.")
]
_Data = Annotated[
    list[Path], _option("File or folder: .txt, .json, .jsonl or .parquet. May be repeated.")
]
_Output = Annotated[Path, _option("Folder of the run: configuration, metrics, model.")]
_Config = Annotated[Path | None, _option("DeepSpeed configuration (JSON).")]
_Set = Annotated[
    list[str] | None,
    _option(
        "Change one key of the configuration: --set bf16.enabled=true. May be repeated.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
_Offload = Annotated[
    Offload | None, _option("Home of optimizer state when no --config is given. Default: cpu.")
]
_Tokenizer = Annotated[
    Path | None, _option("Folder of the tokenizer. Default: the model's, else bytes.")
]
_Steps = Annotated[int | None, _option("Updates to make.")]
_Epochs = Annotated[float | None, _option("Passes over the data. Default: 1, unless --steps.")]
_BatchSize = Annotated[
    int | None, _option("Rows per forward. Default: the configuration's, else 8.")
]
_Accumulation = Annotated[
    int | None, _option("Forwards per update. Default: the configuration's, else 1.")
]
_SequenceLength = Annotated[
    int | None, _option("Most tokens in a row. Default: the model's context, at most 2048.")
]
_Pack = Annotated[
    bool | None,
    _option(
        "Pack rows full, or pad one sample a row. Default: pack text, pad samples with a prompt.",
        "--pack/--pad",
    ),
]
_Truncate = Annotated[bool, _option("Cut off ends of samples that are too long.", "--truncate")]
_Lr = Annotated[
    float | None,
    _option("Peak learning rate. Default: the configuration's, else 2e-5, or 3e-4 from scratch."),
]
_Schedule = Annotated[
    Schedule | None, _option("Rate over the run. Default: the configuration's, else cosine.")
]
_Warmup = Annotated[int | None, _option("Updates of warm-up. Default: a twentieth of the run.")]
_EvalFraction = Annotated[
    float | None, _option("Share of rows held out. Default: 2%, at most 256 rows.")
]
_EvalEvery = Annotated[
    int | None, _option("Updates between evaluations. Default: a fifth of the run.")
]
_SaveEvery = Annotated[
    str | None,
    _option(
        "Updates (100) or time (30min) between checkpoints. Default: only where a run is stopped.",
        metavar="STEPS|MINUTES",
    ),
]
_Resume = Annotated[
    str | None,
    _option(
        "Go on from a checkpoint; alone or as auto: from the newest in --output, if there is one.",
        metavar="[auto|PATH]",
    ),
]
_Seed = Annotated[int, _option("Of weights from scratch, order, held-out rows and dropout.")]
_Checkpointing = Annotated[
    bool, _option("Compute activations again in backward.", "--gradient-checkpointing")
]
_Device = Annotated[str, _option("auto, cpu, cuda or cuda:1; auto is the GPU where there is one.")]
_Overwrite = Annotated[bool, _option("Replace a former run in the output folder.", "--overwrite")]
_Json = Annotated[bool, _option("Print the summary as one JSON object on stdout.", "--json")]
_Quiet = Annotated[bool, _option("Show errors alone.", "--quiet")]


def train(  # noqa: PLR0913 - one parameter an option
    *,
    model: _Model,
    data: _Data,
    output: _Output,
    config: _Config = None,
    overrides: _Set = None,
    offload: _Offload = None,
    tokenizer: _Tokenizer = None,
    steps: _Steps = None,
    epochs: _Epochs = None,
    batch_size: _BatchSize = None,
    accumulation: _Accumulation = None,
    sequence_length: _SequenceLength = None,
    pack: _Pack = None,
    truncate: _Truncate = False,
    lr: _Lr = None,
    schedule: _Schedule = None,
    warmup_steps: _Warmup = None,
    eval_fraction: _EvalFraction = None,
    eval_every: _EvalEvery = None,
    save_every: _SaveEvery = None,
    resume: _Resume = None,
    seed: _Seed = 0,
    gradient_checkpointing: _Checkpointing = False,
    device: _Device = "auto",
    overwrite: _Overwrite = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> int:
    """Train a causal language model on a data file and save it.

    Needs no configuration: --model, --data and --output are enough.
    """
    # Every parameter by its name: most are fields of TrainOptions as they are.
    return _run(dict(locals()))


def _run(values: dict[str, Any]) -> int:
    from rich.console import Console

    from forebay.train.model import hush_libraries
    from forebay.train.ranks import TrainRanks
    from forebay.train.run import train as run

    as_json, quiet = values.pop("as_json"), values.pop("quiet")
    hush_libraries()
    speaks = TrainRanks.read().speaks
    summary = run(_options(values), console=Console(stderr=True, quiet=quiet or not speaks))
    if as_json and speaks:
        typer.echo(json.dumps(summary.as_dict(), indent=2))
    return summary.exit_code


def _options(values: dict[str, Any]) -> TrainOptions:
    """Turns flags into what they stand for; the other options are fields under the same name."""
    pack, overwrite = values.pop("pack"), values.pop("overwrite")
    save_every = values.pop("save_every")
    return TrainOptions(
        data=tuple(values.pop("data")),
        overrides=tuple(values.pop("overrides") or ()),
        learning_rate=values.pop("lr"),
        packing=Packing.AUTO if pack is None else Packing.PACK if pack else Packing.PAD,
        gradient_checkpointing=(
            GradientCheckpointing.ON
            if values.pop("gradient_checkpointing")
            else GradientCheckpointing.OFF
        ),
        existing_output=(
            ExistingOutput.OVERWRITE
            if overwrite
            else ExistingOutput.REFUSE
            if values["resume"] is None
            else ExistingOutput.RESUME
        ),
        save_every=None if save_every is None else SaveEvery.parse(str(save_every)),
        **values,
    )
