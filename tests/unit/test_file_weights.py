"""Weights that stay in safetensors files until they are used."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import forebay
from forebay.errors import CheckpointError, UnsupportedError
from forebay.model.unbuilt import UnbuiltWeight

VALUES = {
    "0.weight": torch.arange(12.0).reshape(4, 3) / 7,
    "0.bias": torch.tensor([1.0, -2.0, 3.0, 0.5]),
    "one": torch.tensor(4),
}


@pytest.fixture
def folder(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    save_file({"0.bias": torch.zeros(1)}, tmp_path / "adapter.safetensors")  # none of the model's
    return tmp_path


@pytest.fixture
def weights(folder):
    return forebay.zero.file_weights(folder)


def _index(folder, *files):
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = {f"name{number}": file for number, file in enumerate(files)}
    text = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(text)


def test_they_have_shape_dtype_and_value(weights):
    assert set(weights) == set(VALUES)
    for name, value in VALUES.items():
        assert isinstance(weights[name], UnbuiltWeight)
        assert (weights[name].shape, weights[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(weights[name], value)


def test_loaders_may_cast_cut_join_and_turn_them(weights):
    def change(of):
        weight = of["0.weight"]
        top, bottom = weight.chunk(2)
        joined = torch.stack([top.t(), bottom.t().contiguous()])
        both = torch.cat([weight[1:3].unsqueeze(0), weight[2:].reshape(1, 2, 3)])
        rounded = weight.to(torch.bfloat16).float()
        return [top, bottom, joined, both, rounded, weight[..., 1:], joined.transpose(0, 2)]

    for found, expected in zip(change(weights), change(VALUES), strict=True):
        assert isinstance(found, UnbuiltWeight)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert torch.equal(found.build(), expected)


def test_nothing_is_computed_with_them_and_parameters_are_left_whole(weights):
    with pytest.raises(UnsupportedError, match=r"mul.* wants the elements of a weight of shape"):
        torch.mul(weights["0.weight"], 2)
    with pytest.raises(UnsupportedError, match=r"split.* wants the elements"):
        nn.Parameter(weights["0.weight"]).chunk(2)


def test_a_model_takes_them_by_load_state_dict(weights):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4))
    model.load_state_dict({name: weights[name] for name in ("0.weight", "0.bias")}, assign=True)
    model, optimizer = forebay.offload(model, torch.optim.AdamW(model.parameters()), device="cpu")
    assert all(torch.equal(p, VALUES[name]) for name, p in model.named_parameters())
    optimizer.close()


def test_a_window_gives_memory_that_no_file_shares(folder):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4))
    forebay.zero.weights_from(model, folder)
    with forebay.zero.GatheredParameters(model):
        (folder / "model.safetensors").write_bytes(b"")
        assert torch.equal(model[0].weight, VALUES["0.weight"])
        model[0].bias.data.fill_(9.0)
    assert bool((model[0].bias == 9.0).all())


@pytest.mark.parametrize("name", VALUES)
def test_another_value_is_another_fingerprint_and_no_other_is(weights, tmp_path, name):
    other = {key: value.clone() for key, value in VALUES.items()}
    other[name].view(-1)[-1] += 1
    save_file(other, tmp_path / "other.safetensors")
    found = forebay.zero.file_weights(tmp_path / "other.safetensors")
    for key in VALUES:
        for one, two in ((weights[key], found[key]), (weights[key][None], found[key][None])):
            assert (one.recipe.fingerprint() == two.recipe.fingerprint()) is (key != name)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/model-1.safetensors", "a/b.c"])
def test_an_index_that_leaves_its_folder_is_refused(folder, name):
    save_file(VALUES, folder.parent / "model-1.safetensors")
    _index(folder, name)
    with pytest.raises(CheckpointError, match="which is not in its own folder"):
        forebay.zero.file_weights(folder)


def test_broken_folders_are_told_apart(folder):
    _index(folder, "adapter.safetensors", "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"1 of the 2 files .* first is model-2\.safetensors"):
        forebay.zero.file_weights(folder)
    (folder / "model-2.safetensors").write_bytes(b"not at all")
    with pytest.raises(CheckpointError, match=r"cannot read the weights in .*model-2"):
        forebay.zero.file_weights(folder)
    for text in ("[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="is no index of weights"):
            forebay.zero.file_weights(folder)


def test_pickles_are_refused(tmp_path):
    torch.save(VALUES, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"no pickles \(pytorch_model\.bin\)") as caught:
            forebay.zero.file_weights(path)
        assert "save_pretrained" in caught.value.hint
