"""The model of a run, from a config.json or a folder: never whole, with the usual values."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
)

import forebay
from cli.train_inputs import model_config, model_folder
from forebay.errors import ConfigError, ForebayWarning
from forebay.model.unbuilt import UnbuiltWeight, value_of
from forebay.train.model import ModelSource
from forebay.train.options import GradientCheckpointing


def test_a_model_from_scratch_is_made_by_the_engine_with_the_values_of_plain_building(tmp_path):
    path = model_config(tmp_path, hidden_size=128, intermediate_size=512)
    source = ModelSource.open(path)
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    torch.manual_seed(3)
    model = source.load(dtype="float32", checkpointing=GradientCheckpointing.ON)
    large = [p for p in model.parameters() if p.numel() >= 128 * 128]
    assert large
    assert all(isinstance(p, UnbuiltWeight) for p in large)
    with forebay.zero.GatheredParameters(model):
        for (name, one), (other, two) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            assert name == other
            assert torch.equal(one, two), name


_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "experts": MixtralConfig(**_SIZES, num_local_experts=4),  # the file has each by itself
    "transposed": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2),
}


def _open(folder, dtype="float32"):
    return ModelSource.open(folder).load(dtype=dtype, checkpointing=GradientCheckpointing.OFF)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_is_the_model_of_from_pretrained_and_nothing_of_it_is_read(tmp_path, kind, dtype):
    torch.manual_seed(3)
    saved = AutoModelForCausalLM.from_config(CONFIGS[kind])
    saved.generation_config.max_new_tokens = 7
    saved.save_pretrained(tmp_path, max_shard_size="20kB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).train()
    model = _open(tmp_path, dtype)
    assert type(model) is type(plain)
    assert model.training
    assert model.generation_config.max_new_tokens == 7
    for one, two in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(two[1], UnbuiltWeight)
        assert (one[0], one[1].dtype) == (two[0], two[1].dtype)
        assert torch.equal(one[1], value_of(two[1])), one[0]
    for one, two in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(one[1], two[1]), one[0]


def test_what_is_read_whole_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.train.pretrained._ADAPTER", "config.json")
    with pytest.warns(ForebayWarning, match="every rank has the whole model .* adapter"):
        model = _open(model_folder(tmp_path))
    assert not any(isinstance(param, UnbuiltWeight) for param in model.parameters())


def test_pickles_are_not_opened(tmp_path):
    folder = model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="reads no pickles") as caught:
        _open(folder)
    assert "to start from scratch" in caught.value.hint
