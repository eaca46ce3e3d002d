"""`forebay export` and `forebay inspect`, on checkpoints of a small Llama."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import forebay as package
from cli.train_inputs import MODEL, forebay

_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two checkpoints of a bf16 model with a frozen weight, and the model's last state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    values = {name: value for name, value in MODEL.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(requires_grad=False)
    engine, *_ = package.initialize(model=model, config=_CONFIG)
    for step in range(2):
        ids = torch.arange(32).reshape(2, 16) + step
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(folder)
    engine.synchronize()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    masters = {r.label: r.part.master_copy(r.slot) for r in engine.core.collector.records}
    engine.close()
    return folder, state, masters


def test_export_is_what_transformers_loads(trained, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    folder, state, _ = trained
    ran = forebay(capsys, "export", folder, tmp_path / "out")
    assert ran.code == 0, ran.err
    found, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    assert found.dtype is torch.bfloat16
    assert all(torch.equal(found.state_dict()[name], value) for name, value in state.items())


def test_export_in_other_precisions_and_several_files(trained, tmp_path, capsys, monkeypatch):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder, state, masters = trained
    monkeypatch.setattr("forebay.checkpoint.export._FILE_BYTES", 40_000)
    ran = forebay(capsys, "export", folder, tmp_path / "fp32", "--dtype", "fp32", "--json")
    written = json.loads(ran.out)
    assert written["files"] > 1
    index = json.loads((tmp_path / "fp32" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]  # tied: once, under its first name
    tensors = {}
    for name in set(index["weight_map"].values()):
        tensors.update(load_file(tmp_path / "fp32" / name))
    assert len(tensors) == written["tensors"]
    assert index["metadata"]["total_size"] == written["nbytes"]
    for name, master in masters.items():
        assert torch.equal(tensors[name], master), name
    frozen = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[frozen], state[frozen].float())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype="auto")
    assert model.dtype is torch.float32


def test_export_peak_is_far_below_the_model(tmp_path):
    """A model of 400 MiB: what export holds at once does not grow with it."""
    import psutil
    from torch import nn

    from forebay.checkpoint.export import export
    from forebay.checkpoint.reader import Checkpoint

    model = nn.Sequential(nn.Embedding(50_000, 2048), nn.Linear(2048, 500))
    model[0].requires_grad_(requires_grad=False)
    engine, *_ = package.initialize(model=model, config=_CONFIG)
    with engine:
        engine.save_checkpoint(tmp_path, "one")
    del model, engine
    process, peak = psutil.Process(), 0

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    import threading

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    with Checkpoint(tmp_path / "one") as checkpoint:
        checkpoint.verify()  # threads and their heaps are there
        before = process.memory_info().rss
        watcher.start()
        written = export(checkpoint, tmp_path / "out", dtype="fp32")
        done.set()
        watcher.join()
    assert written.nbytes > 390 << 20
    # Four pieces of 2 MiB to write; reading and rounding go by 1 MiB.
    assert peak - before < 40 << 20, (peak - before) >> 20
    assert not written.has_config


def test_export_of_an_adapter(tmp_path, capsys):
    """Names as PEFT gives them; only the adapter is trained, so only it is written."""
    from safetensors.torch import load_file
    from torch import nn

    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.base_layer.requires_grad_(requires_grad=False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    class Settings:
        def to_dict(self):
            return {"peft_type": "LORA", "r": 2, "target_modules": {"b", "a"}}

    model = nn.Sequential(Lora())
    model.peft_config = {"default": Settings()}
    engine, *_ = package.initialize(model=model, config=_CONFIG)
    engine.save_checkpoint(tmp_path, "one")
    ran = forebay(capsys, "export", tmp_path, tmp_path / "out")
    engine.close()
    assert ran.code == 0, ran.err
    assert ran.out.startswith("adapter: 2 tensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sorted(found) == ["0.lora_A.weight", "0.lora_B.weight"]
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings == {"peft_type": "LORA", "r": 2, "target_modules": ["a", "b"]}


def test_export_refuses_a_folder_with_files(trained, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    error, _ = forebay(capsys, "export", trained[0], tmp_path).refusal()
    assert "is there already and not an empty folder" in error
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_inspect_says_what_is_there(trained, capsys):
    ran = forebay(capsys, "inspect", trained[0])
    assert ran.code == 0
    assert "every checksum matches" in ran.out
    assert "LlamaForCausalLM" in ran.out
    ran = forebay(capsys, "inspect", trained[0] / "global_step1", "--json")
    found = json.loads(ran.out)
    assert found["counters"]["global_steps"] == 1
    assert found["tensors"]["frozen"] == {"tensors": 1, "elements": 1024, "dtypes": ["BF16"]}


def test_inspect_compares(trained, tmp_path, capsys):
    folder, _, _ = trained
    ran = forebay(capsys, "inspect", folder, "--diff", folder / "global_step1")
    assert ran.code == 1
    assert "1 tensors are the same to the bit" in ran.out  # the frozen one
    assert "counters.global_steps: 2 -> 1" in ran.out
    copy = shutil.copytree(folder / "global_step2", tmp_path / "copy")
    ran = forebay(capsys, "inspect", folder, "--diff", copy, "--json")
    assert ran.code == 0
    assert not json.loads(ran.out)["different_tensors"]


def test_inspect_names_damage(trained, tmp_path, capsys):
    copy = shutil.copytree(trained[0] / "global_step2", tmp_path / "copy")
    file = copy / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    error, hint = forebay(capsys, "inspect", copy).refusal()
    assert str(file) in error
    assert "is damaged" in error
    assert hint


@pytest.mark.parametrize("verb", ["inspect", "export"])
def test_no_checkpoint(tmp_path, capsys, verb):
    words = [verb, tmp_path, *([tmp_path / "out"] if verb == "export" else [])]
    error, _ = forebay(capsys, *words).refusal()
    assert "has no complete checkpoint" in error
