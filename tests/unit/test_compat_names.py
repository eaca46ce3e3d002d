"""`import forebay as deepspeed`: the names that scripts import are where they look."""

from __future__ import annotations

import importlib

import pytest

import forebay
from forebay.errors import UnsupportedError
from house.tree import python

# The lines of a script that change are its imports: `deepspeed` becomes `forebay`.
_SCRIPT = """
import sys
import forebay as deepspeed
assert "torch" not in sys.modules
import torch
from forebay.ops.adam import DeepSpeedCPUAdam, FusedAdam
from forebay.utils import safe_get_full_grad, set_z3_leaf_modules
from forebay.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from forebay.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold

deepspeed.init_distributed(dist_backend="gloo")
assert torch.distributed.get_rank() == 0
import argparse
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args(["--deepspeed", "--deepspeed_config", sys.argv[1]])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model)
deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.Sequential])
data = torch.utils.data.TensorDataset(torch.randn(24, 4))
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args,
    model=model,
    optimizer=deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-3),
    model_parameters=model.parameters(),
    training_data=data,
)
for (batch,) in loader:
    loss = engine(batch.to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
assert engine.global_steps == 3, engine.global_steps
deepspeed.utils.safe_get_full_fp32_param(model[0].weight)
engine.destroy()
torch.distributed.destroy_process_group()
"""


def test_a_script_with_its_imports_changed(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(
        """{
          "train_micro_batch_size_per_gpu": 4,  // as DeepSpeed's own parser, comments pass
          "gradient_accumulation_steps": 2,
          "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }"""
    )
    run = python(_SCRIPT, str(config))
    assert run.returncode == 0, run.stderr
    assert "offload_optimizer=cpu" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("name", ["init_inference", "PipelineModule", "tp_model_init"])
def test_what_is_not_here_says_what_to_do(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(.+\)"):
        getattr(forebay, name)
    assert "one process" not in forebay._ABSENT[name]  # true over ranks as well
    assert not hasattr(forebay, name)


def test_other_names_are_plainly_absent():
    with pytest.raises(AttributeError, match=r"^module 'forebay' has no attribute 'nonsense'$"):
        forebay.nonsense  # noqa: B018
    assert {"ops", "runtime", "utils", "initialize"} <= set(dir(forebay))


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("forebay.zero", "TiledLinear", "use nn.Linear"),
        ("forebay.utils", "OnDevice", r"torch.device\("),
        ("forebay.utils", "safe_update_full_grad_vectorized", "safe_set_full_grad"),
        ("forebay.ops.adagrad", "DeepSpeedCPUAdagrad", "AdamW"),
        ("forebay.ops.lamb", "FusedLamb", "AdamW"),
        ("forebay.ops.lion", "DeepSpeedCPULion", "AdamW"),
        ("forebay.ops.lion", "FusedLion", "AdamW"),
        ("forebay.ops.adam", "ZenFlowCPUAdam", "zenflow"),
        ("forebay.ops.adam", "ZenFlowSelectiveAdamW", "zenflow"),
        ("forebay.ops.adam", "ZenFlowSelectiveAdamW_stage3", "zenflow"),
    ],
)
def test_names_that_are_imported_and_not_supported_say_so_when_used(module, name, instead):
    value = getattr(importlib.import_module(module), name)
    with pytest.raises(UnsupportedError, match=rf"{name} is not supported\nhint: .*{instead}"):
        value([], lr=1e-3)
    assert not isinstance(value, type) or not isinstance(value, value)


def test_collectives_are_torchs():
    import forebay.comm

    with pytest.raises(AttributeError, match=r"no attribute 'all_reduce' \(.*torch.distributed\)"):
        forebay.comm.all_reduce  # noqa: B018
