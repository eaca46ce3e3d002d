"""Models built in a window of memory: the values, tensors and random numbers of plain building."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from forebay.errors import UnsupportedError
from forebay.model.construction import Construction
from forebay.model.unbuilt import UnbuiltWeight, build_in_place

# Only the parameter at work has memory, however small it is.
LEAST = {"window_bytes": 0, "smallest_bytes": 0}


class Root(nn.Module):
    """Own parameters, buffers, tied weights and initialisations that read what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(9, 7) * 0.02)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("angles", torch.arange(5.0) / 3)
        self.words = nn.Embedding(10, 4, padding_idx=3)
        self.scale.data.mul_(2)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.words.weight[:2], std=0.02)
        if float(self.first.weight.detach().sum()) != 0.0:
            self.scale.data[0] = self.scale.data[1]


def _copies() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def _reset_later() -> nn.Module:
    """As `post_init` does: other values, long after the modules were made."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model.apply(lambda m: nn.init.xavier_normal_(m.weight) if isinstance(m, nn.Linear) else None)
    return model


def _own_generator() -> nn.Module:
    model = nn.Linear(5, 5)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(4))
    return model


def _recurrent() -> nn.Module:
    """Its parameters are held by weak references, so they cannot leave."""
    return nn.LSTM(4, 4)


def _llama() -> nn.Module:
    library = pytest.importorskip("transformers")
    config = library.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return library.AutoModelForCausalLM.from_config(config)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("build", "staying"),
    [(Root, 0), (_copies, 0), (_reset_later, 0), (_own_generator, 0), (_recurrent, 4), (_llama, 0)],
)
@pytest.mark.parametrize("limits", [LEAST, {"window_bytes": 700, "smallest_bytes": 40}])
def test_values_and_random_numbers_are_those_of_plain_building(build, staying, limits):
    torch.manual_seed(0)
    plain, drawn = build(), torch.get_rng_state()
    torch.manual_seed(0)
    with Construction(**limits):
        model = build()
    assert torch.equal(torch.get_rng_state(), drawn)
    for (name, given), (_, buffer) in zip(
        plain.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(given, buffer), name
    named = dict(model.named_parameters())
    stayed = [name for name, param in named.items() if not isinstance(param, UnbuiltWeight)]
    for (name, given), (other, param) in zip(
        plain.named_parameters(remove_duplicate=False),
        model.named_parameters(remove_duplicate=False),
        strict=True,
    ):
        assert name == other
        assert isinstance(param, nn.Parameter)
        if isinstance(param, UnbuiltWeight):
            build_in_place(param)
        assert torch.equal(_bits(param), _bits(given)), name
    assert torch.equal(torch.get_rng_state(), drawn)
    if limits is LEAST:
        assert len(stayed) == staying, stayed


def test_parameters_have_memory_one_at_a_time():
    layers: list[nn.Module] = []
    held = []
    with Construction(**LEAST):
        for _ in range(6):
            layers.append(nn.Linear(9, 7, bias=False))
            held.append(sum(layer.weight.untyped_storage().nbytes() for layer in layers))
        nn.Sequential(*layers)
    assert held == [9 * 7 * 4] * 6
    assert all(isinstance(layer.weight, UnbuiltWeight) for layer in layers)


def test_what_somebody_else_sees_stays():
    with Construction(**LEAST):
        seen, written, loaded = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(200, 200)
        view = seen.weight[0]
        written.weight.detach().numpy()[:] = 3.0
        loaded.weight.data.copy_(OUTSIDE)
        nn.Linear(6, 6)
    assert torch.equal(view, seen.weight[0])
    assert bool((written.weight == 3.0).all())
    assert torch.equal(loaded.weight, OUTSIDE)


# Too large to be kept a second time.
OUTSIDE = torch.linspace(0, 1, 40_000).view(200, 200)


def test_a_failed_operation_leaves_values_as_they_were():
    torch.manual_seed(0)
    given = nn.Linear(6, 6).weight.detach().clone()
    torch.manual_seed(0)
    with Construction(**LEAST):
        model = nn.Linear(6, 6)
        nn.Linear(6, 6)  # sends the first one's memory away
        with pytest.raises(RuntimeError):
            model.weight.data.copy_(torch.ones(5, 5))
        assert torch.equal(model.weight, given)


def test_without_memory_elements_are_refused_and_all_else_works():
    with Construction(**LEAST):
        model = nn.Linear(6, 4)
    weight = model.weight
    optimizer = torch.optim.AdamW(model.parameters())
    assert (weight.shape, weight.numel(), weight.requires_grad) == ((4, 6), 24, True)
    for use in (
        weight.data.normal_,
        weight.sum,
        lambda: model(torch.ones(1, 6)),
        lambda: weight.to("meta"),
        lambda: nn.init.zeros_(weight),
    ):
        with pytest.raises(
            UnsupportedError, match=r"shape \[4, 6\].*built inside forebay.zero.Ini"
        ):
            use()
    twin = copy.deepcopy(model).to(torch.bfloat16)
    build_in_place(weight)
    build_in_place(twin.weight)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert torch.equal(twin.weight, model.weight.to(torch.bfloat16))


def test_recipes_tell_two_ways_of_building_apart():
    def _print(seed: int, factor: float) -> str:
        torch.manual_seed(seed)
        with Construction(**LEAST):
            model = nn.Linear(6, 6)
            model.weight.data.mul_(factor)
        return model.weight.recipe.fingerprint()

    assert _print(0, 2.0) == _print(0, 2.0)
    assert len({_print(0, 2.0), _print(1, 2.0), _print(0, 3.0)}) == 3
