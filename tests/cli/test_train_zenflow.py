"""`forebay train` with a `zenflow` section: it trains, resumes, and says what it decided."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cli.train_inputs import forebay, losses, model_config, text_file

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    # the same whatever the number of steps
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {
            "topk_ratio": 0.1,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 3,
            "full_warm_up_rounds": 1,
            "overlap_step": True,
        },
    },
}


def test_it_trains_and_resumes(tmp_path: Path, capsys) -> None:
    config = tmp_path / "zenflow.json"
    config.write_text(json.dumps(CONFIG))
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--config", config, "--device", "cpu", "--save-every", 5, "--quiet"]
    whole = forebay(capsys, *words, "--steps", 8, "--output", tmp_path / "whole")
    assert whole.code == 0, whole.err
    resolved = json.loads((tmp_path / "whole" / "resolved_config.json").read_text())
    assert resolved["forebay"]["update"] == "zenflow"
    assert resolved["zero_optimization"]["zenflow"]["select_interval"] > 3  # updates of an epoch
    first = forebay(capsys, *words, "--steps", 5, "--output", tmp_path / "parts")
    assert first.code == 0, first.err
    again = [*words, "--steps", 8, "--output", tmp_path / "parts", "--resume", "auto"]
    second = forebay(capsys, *again)
    assert second.code == 0, second.err
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
