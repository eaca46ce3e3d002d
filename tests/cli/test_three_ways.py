"""One story told three ways: the command, a script with `initialize`, a plain loop with `offload`.

The same model, data, configuration and seed give the same weights to the bit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forebay as package
from cli.train_inputs import forebay, instruction_file, losses, model_folder
from forebay.config.resolve import resolve
from forebay.data import (
    Batches,
    BatchShape,
    ByteTokenizer,
    Layout,
    Position,
    build_store,
    open_files,
    plan_rows,
    split_rows,
)
from forebay.optim.schedule import Schedule
from forebay.train.forward import sum_of_token_losses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forebay.data import Window

STEPS, ROWS, ACCUMULATION, SEED = 6, 3, 2, 5


def windows(data: Path) -> Iterator[Window]:
    """What `forebay train` trains on, found again from the same data and seed."""
    tokenizer = ByteTokenizer()
    store = build_store(open_files([data]), tokenizer)
    rows = plan_rows(store, layout=Layout.PAD, length=128)
    train = split_rows(rows, fraction=0.1, seed=SEED).train
    shape = BatchShape(ROWS, ACCUMULATION)
    batches = Batches(store, rows=train, shape=shape, seed=SEED, pad_id=tokenizer.pad_id)
    position = Position(0, 0)
    for _ in range(STEPS):
        window = batches.window(position)
        position = window.following
        yield window


def window_losses(model: Any, window: Window) -> Iterator[torch.Tensor]:
    for batch in window.micro_batches:
        outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        yield sum_of_token_losses(outputs.logits, batch.labels) / window.label_tokens


def with_command(folder: Path, data: Path, run: Path, capsys: Any) -> dict[str, torch.Tensor]:
    words: list[Any] = ["train", "--model", folder, "--data", data, "--output", run, "--quiet"]
    words += ["--steps", STEPS, "--batch-size", ROWS, "--accumulation", ACCUMULATION]
    words += ["--lr", "1e-2", "--eval-fraction", "0.1", "--seed", SEED, "--device", "auto"]
    assert forebay(capsys, *words, "--set", "gradient_clipping=0.5").code == 0
    return dict(AutoModelForCausalLM.from_pretrained(run / "model").state_dict())


def with_initialize(folder: Path, data: Path, run: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    config = json.loads((run / "resolved_config.json").read_text())
    engine, *_ = package.initialize(model=model, config=config)
    for window in windows(data):
        for loss in window_losses(engine, window):
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
    engine.close()
    return dict(model.state_dict())


def with_offload(folder: Path, data: Path, run: Path) -> dict[str, torch.Tensor]:
    config = resolve(run / "resolved_config.json")
    assert config.optimizer is not None
    assert config.scheduler is not None
    model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
    plain = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    model, optimizer = package.offload(model, plain, device="cpu", clip_norm=config.clip_norm)
    schedule = Schedule(optimizer, config.scheduler)
    for window in windows(data):
        for loss in window_losses(model, window):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.close()
    return dict(model.state_dict())


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares on the host")
def test_three_ways_give_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data, run = model_folder(tmp_path / "model"), instruction_file(tmp_path), tmp_path / "r"
    command = with_command(folder, data, run, capsys)
    start = dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert len(losses(run)) == STEPS
    assert not any(torch.equal(command[name], start[name]) for name in command)
    for other in (with_initialize(folder, data, run), with_offload(folder, data, run)):
        assert other.keys() == command.keys()
        different = [name for name in command if not torch.equal(command[name], other[name])]
        assert not different
