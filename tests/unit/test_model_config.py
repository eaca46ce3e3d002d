"""Shapes: the same parameters as the models that transformers builds, and refusals by field."""

from __future__ import annotations

import json

import pytest
import torch

from forebay.errors import ConfigError
from forebay.model.inspect import inspect_model
from forebay.plan.model_config import FAMILIES, from_counts, read_shape, shape_of

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def _built(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_has_the_parameters_of_its_model(family):
    """Every family's default configuration, two layers deep."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    config.num_hidden_layers = 2
    shape = shape_of(config.to_dict(), source=family)
    model = _built(config)
    assert shape.parameters == sum(param.numel() for param in model.parameters())
    assert sum(shape.unit_elements()) == shape.parameters == shape.spec("bfloat16").elements


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_those_that_the_engine_finds(tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**_LLAMA, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    found = inspect_model(model, groups=torch.optim.AdamW(model.parameters()).param_groups)
    shape = shape_of(config.to_dict(), source="config")
    spec = shape.spec("float32")
    assert [u.elements for u in found.spec.units] == [u.elements for u in spec.units]
    assert [sorted(p.elements for p in u.params) for u in found.spec.units] == [
        sorted(p.elements for p in u.params) for u in spec.units
    ]


def test_a_folder_and_a_part_of_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": _LLAMA, "model_type": "x"}))
    assert read_shape(tmp_path) == read_shape(tmp_path / "config.json")
    assert read_shape(tmp_path).layers == 2


@pytest.mark.parametrize("count", [1e6, 1.4e9, 13e9, 175e9, 1e12, 32e12])
def test_counts_come_out(count):
    assert from_counts(count).parameters == pytest.approx(count, rel=2e-3)


def test_shapes_of_a_count():
    gpt3 = from_counts(175e9)
    assert (gpt3.layers, gpt3.hidden) == (96, 12288)
    shape = from_counts(7e9, hidden=4096, layers=32, vocab=32000)
    assert (shape.layers, shape.hidden, shape.vocab) == (32, 4096, 32000)
    assert shape.parameters == pytest.approx(7e9, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv9"}, "model_type 'rwkv9' is not known; known are llama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; .* from 1 to 100,000"),
        ({"hidden_size": -64}, "hidden_size is -64; .* from 1 to"),
        ({"vocab_size": 1e12}, r"vocab_size is .*; .* to 100,000,000"),
        ({"num_attention_heads": 5}, "64 is not a multiple of 5 heads"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_local_experts": 4, "num_experts_per_tok": 9}, "per_tok is 9; .* from 1 to 4"),
    ],
    ids=str,
)
def test_wrong_configurations_are_refused_by_field(change, words):
    with pytest.raises(ConfigError, match=words):
        shape_of(_LLAMA | change, source="config.json")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: from_counts(0), "parameters is 0; .* from 1 to"),
        (lambda: from_counts(1e20), "parameters is 1e[+]20"),
        (lambda: from_counts(1e9, hidden=-1), "--hidden is -1"),
        (lambda: from_counts(1e9, hidden=4096, layers=100), "too few for 100 layers"),
        (lambda: shape_of([], source="x"), "must be an object, not list"),
    ],
)
def test_wrong_counts_are_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_shape(tmp_path)
