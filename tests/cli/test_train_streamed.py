"""`forebay train` with published stage-3 configurations that put weights on the host too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cli.test_train_runs import saved
from cli.train_inputs import forebay, losses, model_folder, text_file

if TYPE_CHECKING:
    from pathlib import Path

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
HOST = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
# As two fine-tuning tools ship them.
BY_BLOCK = {
    **AUTO,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": HOST,
        "offload_param": HOST,
        "overlap_comm": False,
        **BUCKETS,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
BY_PARAMETER = {
    **AUTO,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": HOST,
        "offload_param": HOST,
        "overlap_comm": True,
        **BUCKETS,
        "sub_group_size": 0,
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
}


def _without(config: dict[str, Any]) -> dict[str, Any]:
    zero = {k: v for k, v in config["zero_optimization"].items() if k != "offload_param"}
    return {**config, "zero_optimization": zero}


@pytest.mark.parametrize("config", [BY_BLOCK, BY_PARAMETER], ids=["by_block", "by_parameter"])
def test_weights_on_the_host_give_the_same_model(config, tmp_path: Path, capsys) -> None:
    model, text = model_folder(tmp_path / "model"), text_file(tmp_path)
    ended = []
    for name, values in (("away", config), ("there", _without(config))):
        path, run = tmp_path / f"{name}.json", tmp_path / name
        path.write_text(json.dumps(values))
        ran = forebay(
            capsys, "train", "--model", model, "--data", text, "--config", path, "--output", run,
            "--steps", 6, "--sequence-length", 32, "--lr", "1e-2",
            "--eval-fraction", "0.1", "--json",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        summary = json.loads(ran.out)
        ended.append((losses(run), summary["eval_losses"], saved(run)))
        resolved = json.loads((run / "resolved_config.json").read_text())
        place = "cpu" if name == "away" else "none"
        assert resolved["zero_optimization"]["offload_param"]["device"] == place
    (seen, evaluated, weights), (expected, others, twins) = ended
    assert seen == expected
    assert evaluated == others
    assert weights.keys() == twins.keys()
    assert all(bool((weights[key] == twins[key]).all()) for key in weights)


def test_layer_order_gives_the_same_model(tmp_path: Path, capsys) -> None:
    model, text = model_folder(tmp_path / "model"), text_file(tmp_path)
    ended = []
    for order in ("microbatch", "layer"):
        path, run = tmp_path / f"{order}.json", tmp_path / order
        path.write_text(json.dumps({**BY_PARAMETER, "forebay": {"accumulation_order": order}}))
        ran = forebay(
            capsys, "train", "--model", model, "--data", text, "--config", path, "--output", run,
            "--steps", 4, "--sequence-length", 32, "--lr", "1e-2", "--batch-size", 2,
            "--accumulation", 3, "--eval-fraction", "0.1", "--json",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        ended.append((losses(run), json.loads(ran.out)["eval_losses"], saved(run)))
        resolved = json.loads((run / "resolved_config.json").read_text())
        assert resolved["forebay"]["accumulation_order"] == order
    (seen, evaluated, weights), (expected, others, twins) = ended
    assert seen == expected
    assert evaluated == others
    assert all(bool((weights[key] == twins[key]).all()) for key in twins)
