"""The model of a run that starts from a config.json."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

import forebay
from cli.train_inputs import model_config
from forebay.model.unbuilt import UnbuiltWeight
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
