"""A training run from options to a saved model: the order in which things happen.

Cheap checks come first and in one place, so that a mistake costs a second and not an hour: the
options, the output folder, the files, the configuration, the model's sizes, the data. Then the
weights are loaded, and only then does anything train.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.checkpoint.locate import CHECKPOINTS
from forebay.compat.api import initialize
from forebay.compat.files import refuse_missing_folders
from forebay.compat.placed import with_placement
from forebay.data.batches import Batches, BatchShape
from forebay.data.sources import open_files
from forebay.errors import ConfigError, ForebayError
from forebay.plan.run_record import RUN_RECORD
from forebay.plan.share import describe_places
from forebay.plan.workload import Recompute
from forebay.train.corpus import Corpus, load_corpus, sequence_length
from forebay.train.forecast import Took, run_record
from forebay.train.loop import Loop, Silent
from forebay.train.model import ModelSource, choose_device, hide_devices
from forebay.train.options import GradientCheckpointing, SaveEvery
from forebay.train.proof import prove_inputs, prove_output, trained_elements
from forebay.train.ranks import TrainRanks
from forebay.train.records import Summary
from forebay.train.report import (
    RunReporter,
    bytes_by_tier,
    logs_shown,
    memory_lines,
    summary_lines,
)
from forebay.train.resume import find_checkpoints, load_first, set_position
from forebay.train.save import RunFolder
from forebay.train.saver import RunSaver
from forebay.train.settings import Settings
from forebay.train.signals import StopSignals
from forebay.units_of_measure import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from forebay.comm.together import Together
    from forebay.config.resolved import ResolvedConfig
    from forebay.data.rows import Rows
    from forebay.train.options import TrainOptions

__all__ = ["train"]

# Evaluations in a run that does not say how often, beside the one before the first update.
_EVALUATIONS: Final = 5
# Skipped updates in a row that end a run without loss scaling: one may be a bad batch.
_MOST_SKIPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that is decided before weights are loaded."""

    options: TrainOptions
    folder: RunFolder
    source: ModelSource
    corpus: Corpus
    batches: Batches
    config: ResolvedConfig
    total_steps: int
    device: torch.device
    ranks: TrainRanks
    together: Together

    @property
    def checkpoints(self) -> Path:
        """Where all ranks write checkpoints."""
        return self.options.output / CHECKPOINTS


def train(options: TrainOptions, *, console: Console) -> Summary:
    """Train a causal language model and save it.

    Args:
        options: What to do.
        console: Where progress goes; it should write to stderr.

    Returns:
        How the run ended. The same is in the run's folder, with metrics and the model.

    Raises:
        ForebayError: Something is refused or failed; the message says what was saved.
        Interrupted: A signal came before the first step; nothing was trained.
    """

    def announce(name: str) -> None:
        _say(console, f"{name}: ending after this step; once more to end at once")

    with (
        StopSignals(announce, settle_seconds=TrainRanks.read().settle_seconds) as stop,
        logs_shown(console),
        contextlib.ExitStack() as at_end,
    ):
        ranks = TrainRanks.read()
        hide_devices(options.device)
        together = at_end.enter_context(ranks.joined())
        # What one rank refuses, the others must not wait for.
        plan = together.run(
            lambda: _prepare(options, console, at_end, ranks=ranks, together=together),
            what="the preparation of a run",
        )
        torch.manual_seed(options.seed)
        model = plan.source.load(
            dtype=plan.config.precision.dtype, checkpointing=options.gradient_checkpointing
        )
        # Again, so that dropout does not depend on how the weights came about.
        torch.manual_seed(options.seed)
        # The run reports by itself: progress and scalars would come twice.
        quiet = {"steps_per_print": None, "tensorboard": {"enabled": False}}
        engine, *_ = initialize(model=model, config=plan.config.as_dict() | quiet)
        with contextlib.closing(engine):
            return _train(plan, engine, stop=stop, console=console)


def _prepare(
    options: TrainOptions,
    console: Console,
    at_end: contextlib.ExitStack,
    *,
    ranks: TrainRanks,
    together: Together,
) -> _Plan:
    options.check()
    device = choose_device(ranks.device(options.device))
    source = ModelSource.open(options.model)
    settings = Settings.read(options, source=source, ranks=ranks)
    draft = settings.draft()
    refuse_missing_folders(draft)
    _refuse_nothing_kept(draft, options.gradient_checkpointing)
    sequence_length(options, context=source.context)
    files = open_files(options.data)
    outline = source.outline(dtype=draft.precision.dtype)
    prove_inputs(options, draft, outline=outline, device=device, ranks=ranks)
    output = at_end.enter_context(ranks.folder(options.output))
    folder = RunFolder.prepare(output, existing=options.existing_output)
    at_end.callback(folder.release)
    if ranks.speaks:
        prove_output(options, draft, folder=folder, outline=outline)

    def progress(documents: int, tokens: int) -> None:
        _say(
            console, f"reading: {counted(documents, 'document')}, {counted(tokens, 'token')} so far"
        )

    corpus = load_corpus(
        files, source=source, options=options, spill=folder.path, on_progress=progress
    )
    shape = BatchShape(draft.batch.micro_batch_size, draft.batch.accumulation_steps)
    _refuse_more_than_all(shape.rows * ranks.size, num_rows=len(corpus.train))
    batches = _batches(corpus, corpus.train, shape=shape, seed=options.seed, ranks=ranks)
    total_steps = options.steps or batches.windows_in(options.epochs or 1.0)
    config = settings.final(total_steps, samples=len(corpus.train))
    for line in corpus.lines:
        _say(console, line)
    return _Plan(
        options=options,
        folder=folder,
        source=source,
        corpus=corpus,
        batches=batches,
        config=config,
        total_steps=total_steps,
        device=device,
        ranks=ranks,
        together=together,
    )


def _refuse_more_than_all(batch_rows: int, *, num_rows: int) -> None:
    """A micro-batch larger than the data would hold some rows several times."""
    if batch_rows > num_rows:
        raise ConfigError(
            f"a batch of {batch_rows:,} rows is more than the {num_rows:,} rows of training data",
            hint=f"--batch-size {num_rows} at most",
        )


def _refuse_nothing_kept(draft: ResolvedConfig, checkpointing: GradientCheckpointing) -> None:
    """A key that cannot act."""
    if draft.keeps_activations_on_host and checkpointing is GradientCheckpointing.OFF:
        raise ConfigError(
            "activation_checkpointing.cpu_checkpointing keeps on the host what checkpointing keeps "
            "of a forward, and nothing is checkpointed",
            hint="--gradient-checkpointing",
        )


def _batches(
    corpus: Corpus, rows: Rows, *, shape: BatchShape, seed: int, ranks: TrainRanks
) -> Batches:
    return Batches(
        corpus.store,
        rows=rows,
        shape=shape,
        seed=seed,
        pad_id=corpus.tokenizer.pad_id,
        share=ranks.share,
    )


def _train(plan: _Plan, engine: Any, *, stop: StopSignals, console: Console) -> Summary:
    # Of the run's own configuration, which knows who decided what.
    _say(console, f"\n{with_placement(plan.config, engine.core).table()}")
    tiers = bytes_by_tier(engine.ledger.table())
    count = trained_elements(engine.module)
    _say(console, f"\n{plan.source.kind}: {count:,} trainable parameters on {plan.device}")
    for line in memory_lines(tiers):
        _say(console, line)
    _say(console, f"updates: {describe_places(engine.core.placement)}")

    saver = RunSaver(
        engine=engine,
        folder=plan.folder,
        checkpoints=plan.checkpoints,
        corpus=plan.corpus,
        together=plan.together,
        seed=plan.options.seed,
    )
    loop = _loop(plan, engine, stop=stop, save=lambda: saver.save_both(loop))
    former = _resume(plan, engine, loop=loop, console=console)
    plan.folder.keep_tokenizer(plan.corpus.tokenizer)
    reporter = RunReporter(
        console,
        metrics=plan.folder.metrics,
        tensorboard=_tensorboard(plan),
        total_steps=plan.total_steps,
        every=plan.config.steps_per_print,
        memory=lambda: bytes_by_tier(engine.ledger.table()),
    )
    reporter.remember(former)
    loop.reporter = reporter
    with reporter:
        began = time.monotonic()
        stop.defer()
        try:
            loop.run()
        except ForebayError as error:
            kept = saver.rescue(loop)
            raise type(error)(f"{error.message}; {kept}", hint=error.hint) from error
        except Exception as error:
            error.add_note(saver.rescue(loop))
            raise
        seconds = time.monotonic() - began
        if loop.is_stopping or plan.options.save_every is not None:
            saver.save_checkpoint(loop)
        saver.save_model()
        engine.wait_for_checkpoint()
    summary = _summary(plan, engine, loop=loop, reporter=reporter, seconds=seconds)
    plan.folder.write_summary(summary.as_dict())
    _record(plan, engine, reporter=reporter, summary=summary)
    for line in ("", *summary_lines(summary)):
        _say(console, line)
    return summary


def _loop(
    plan: _Plan,
    engine: Any,
    *,
    stop: StopSignals,
    save: Callable[[], None],
) -> Loop:
    options, corpus = plan.options, plan.corpus
    every = options.save_every or SaveEvery()
    held_out = None
    if len(corpus.held_out):
        held_out = _batches(
            corpus,
            corpus.held_out,
            shape=plan.batches.shape,
            seed=options.seed,
            ranks=plan.ranks,
        )
    return Loop(
        engine=engine,
        batches=plan.batches,
        held_out=held_out,
        device=plan.device,
        total_steps=plan.total_steps,
        eval_every=options.eval_every or math.ceil(plan.total_steps / _EVALUATIONS),
        save_every=every.steps,
        save_seconds=every.seconds,
        most_skips=None if plan.config.precision.loss_scale else _MOST_SKIPS,
        router_weight=float(getattr(plan.source.config, "router_aux_loss_coef", None) or 0.0),
        reporter=Silent(),
        stop=stop,
        save=save,
    )


def _resume(plan: _Plan, engine: Any, *, loop: Loop, console: Console) -> list[dict[str, Any]]:
    """Load what the options name and put the loop there; returns the metrics that stay."""
    config, options = plan.config.as_json(), plan.options
    loaded = None
    if options.resume is not None:
        paths = find_checkpoints(options.resume, folder=plan.checkpoints, together=plan.together)
        loaded = load_first(engine, paths, say=lambda line: _say(console, line))
    if loaded is None:
        if options.resume is not None:
            _say(console, "no checkpoint to go on from: the run starts anew")
        plan.folder.begin(config)
        return []
    set_position(
        loop,
        engine.checkpoints.loaded_data,
        seed=options.seed,
        store=plan.corpus.store,
        steps=engine.global_steps,
    )
    _say(console, f"going on after {counted(loop.steps_done, 'update')}, from {loaded}")
    again = loop.steps_done % loop.eval_every == 0
    return plan.folder.go_on(config, steps=loop.steps_done, is_evaluated_again=again)


def _summary(
    plan: _Plan,
    engine: Any,
    *,
    loop: Loop,
    reporter: RunReporter,
    seconds: float,
) -> Summary:
    on_cuda = plan.device.type == "cuda"
    return Summary(
        steps=loop.steps_done,
        total_steps=plan.total_steps,
        skipped_steps=engine.skipped_steps,
        ended_by=loop.ended_by,
        parameters=trained_elements(engine.module),
        epoch=loop.position.epoch,
        row=loop.position.row,
        tokens=loop.tokens_done,
        seconds=seconds,
        first_loss=reporter.losses[0] if reporter.losses else None,
        last_loss=reporter.losses[-1] if reporter.losses else None,
        eval_losses=tuple(reporter.eval_losses),
        bytes_by_tier=bytes_by_tier(engine.ledger.table()),
        device_peak_bytes=torch.cuda.max_memory_allocated(plan.device) if on_cuda else None,
        output=str(plan.folder.path),
        model=str(plan.folder.model),
    )


def _record(plan: _Plan, engine: Any, *, reporter: RunReporter, summary: Summary) -> None:
    """Write what the planner can learn from."""
    options, files = plan.options, engine.core.lanes.files
    again = options.gradient_checkpointing is GradientCheckpointing.ON
    record = run_record(
        plan.source.config.to_dict(),
        config=plan.config,
        device=plan.device,
        sequence=sequence_length(options, context=plan.source.context),
        recompute=Recompute.BLOCKS if again else Recompute.NONE,
        took=Took(
            seconds=reporter.recent_seconds,
            tiers=summary.bytes_by_tier,
            peak=summary.device_peak_bytes,
            placement=engine.core.placement,
            drives=None if files is None else files.link.use,
        ),
    )
    if record is not None:
        plan.folder.write_record(RUN_RECORD, record.as_json())


def _tensorboard(plan: _Plan) -> Path:
    spec = plan.config.tensorboard
    if spec is None or not spec.output_path:
        return plan.folder.tensorboard
    return Path(spec.output_path) / spec.job_name


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
