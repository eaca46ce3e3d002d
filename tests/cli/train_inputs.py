"""Small models, data and tokenizers for tests of `forebay train`, made where they are needed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MODEL = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    def refusal(self) -> tuple[str, str]:
        """The error and the hint, which must be all that was written."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("hint: ")
        return lines[0].removeprefix("error: "), lines[1].removeprefix("hint: ")


def forebay(capsys: pytest.CaptureFixture[str], *words: object) -> Ran:
    """Runs the command line in this process."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


def model_config(folder: Path, **changes: Any) -> Path:
    """Writes a config.json to start from scratch."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    return path


def model_folder(folder: Path, **changes: Any) -> Path:
    """Saves a small Llama as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    values = {name: value for name, value in {**MODEL, **changes}.items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
    return folder


def text_file(folder: Path, repeats: int = 120) -> Path:
    """Writes text with a pattern that is quick to learn."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {number % 7}: the cat sat\n" for number in range(repeats)))
    return path


def instruction_file(folder: Path, count: int = 60) -> Path:
    """Writes instructions whose answer repeats their input."""
    path = folder / "samples.json"
    rows = [
        {"instruction": "Say it.", "input": f"{number % 5}", "output": f"{number % 5}" * 3}
        for number in range(count)
    ]
    path.write_text(json.dumps(rows))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    """Reads the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of every update."""
    return [line["loss"] for line in metrics(run) if "loss" in line]
