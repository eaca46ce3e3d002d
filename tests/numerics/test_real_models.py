"""Real model code: both faces, both places, the same bits; nothing asks for a class."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_model, save_model

import forebay
from forebay.plan import UpdatePlace, WeightPlace
from numerics.real_models import (
    CHECKPOINTS,
    DEVICE,
    MODELS,
    STREAMED,
    VOCABULARY,
    Job,
    build,
    by_initialize,
    by_offload,
    by_streaming,
    groups_of,
    loss_of,
    tokens,
)
from numerics.training import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16]
CAUSAL = ["llama", "tied_llama", "qwen2", "gpt2", "mixtral"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
    pytest.mark.usefixtures("deterministic"),
]


@functools.cache
def _on_device(job: Job):
    """The reference: state on the device, nothing deferred."""
    return by_offload(job, place=UpdatePlace.DEVICE)


def _jobs():
    """Every job; those that the default run keeps meet each value of each axis for each model."""
    axes = itertools.product(MODELS, DTYPES, (1, 2), CHECKPOINTS)
    for model, dtype, micro, checkpoints in axes:
        job = Job(model, dtype=dtype, micro=micro, checkpoints=checkpoints)
        if model == "router" and checkpoints != "stored":
            continue
        thin = {
            (torch.float32, 1, "non_reentrant"),
            (torch.bfloat16, 2, "reentrant"),
            (torch.bfloat16, 1, "stored"),
        }
        kept = (dtype, micro, checkpoints) in thin or model == "router"
        name = f"{model}-{str(dtype).removeprefix('torch.')}-{micro}-{checkpoints}"
        yield pytest.param(job, id=name, marks=[] if kept else [pytest.mark.slow])


@pytest.mark.parametrize("job", list(_jobs()))
def test_faces_and_places_give_the_same_bits(job):
    expected = _on_device(job)
    assert len(set(expected.losses)) == len(expected.losses), "nothing was learned"
    assert any(norm > job.clip for norm in expected.norms), "clipping was never active"
    assert_same_bits(expected, by_offload(job))
    assert_same_bits(expected, by_initialize(job))
    assert_same_bits(expected, by_initialize(job, place=UpdatePlace.DEVICE))
    assert_same_bits(expected, by_initialize(job, weights=WeightPlace.HOST))


class _Reader:
    """Evaluates and generates after every step, and keeps what came out."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.texts: list[list[int]] = []

    def __call__(self, model, optimizer, step) -> None:
        model.eval()
        with torch.no_grad():
            self.losses.append(loss_of(model, tokens(99)).item())
            if isinstance(model, transformers.PreTrainedModel):
                prompt = tokens(98)[:1, :4]
                text = model.generate(prompt, max_new_tokens=4, do_sample=False)
                self.texts.append(text.flatten().tolist())
        model.train()


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_between_steps_reads_new_weights_and_changes_nothing(name):
    """The forward after `step()` is an evaluation: it must wait for the weights, too."""
    job = Job(name, dtype=torch.bfloat16)
    readers = [_Reader() for _ in range(5)]
    runs = [
        by_offload(job, place=UpdatePlace.DEVICE, between=readers[0]),
        by_offload(job, between=readers[1]),
        by_initialize(job, between=readers[2]),
        by_streaming(job, between=readers[3]),
        by_streaming(job, options=replace(STREAMED, unit_elements=1), between=readers[4]),
    ]
    assert len(set(readers[0].losses)) == job.steps
    for run, reader in zip(runs, readers, strict=True):
        assert_same_bits(_on_device(job), run)
        assert (reader.losses, reader.texts) == (readers[0].losses, readers[0].texts)


@pytest.mark.parametrize("face", [by_offload, by_streaming])
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_save_pretrained_after_training(name, dtype, face, tmp_path):
    """Saved at once after `step()`, while new weights are on their way."""
    saved = []

    def save(model, optimizer, step):
        if step == 3:
            model.save_pretrained(tmp_path)
            saved.append(sum(p.nbytes for p in model.parameters()))

    trained = face(Job(name, dtype=dtype), between=save)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    state = loaded.state_dict()
    assert state.keys() == trained.weights.keys()
    for key, value in trained.weights.items():
        assert value.dtype is dtype, key
        assert torch.equal(state[key], value), key
    # Parameters are views of one allocation for each unit; no file may hold more than its own.
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert saved[0] <= written <= saved[0] + 8192


@pytest.mark.parametrize("face", [by_offload, by_initialize])
@pytest.mark.parametrize("name", ["tied_llama", "qwen2", "gpt2"])
def test_tied_weights_stay_tied(name, face):
    """The embedding is one parameter with two names, one master and one pair of moments."""
    tied = []

    def look(model, optimizer, step):
        model.state_dict()  # the barrier: both names view the new weights
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        tied.append(head is embedding and head.data_ptr() == embedding.data_ptr())
        names = [r.slot.names for r in optimizer.engine.collector.records if r.param is head]
        assert [len(found) for found in names] == [2]

    trained = face(Job(name, dtype=torch.bfloat16), between=look)
    assert tied == [True] * 4
    expected = len({id(p) for p in build(Job(name)).parameters()})
    assert len(trained.masters) == expected


def _plain_torch(job: Job):
    """The same job without forebay; fp32, so that the working weight is the master."""
    model = build(job).to(DEVICE)
    optimizer = torch.optim.AdamW(groups_of(model, job), lr=job.lr)
    for step in range(job.steps):
        torch.manual_seed(step)
        loss_of(model, tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("place", [UpdatePlace.HOST, UpdatePlace.DEVICE])
def test_experts_without_tokens_are_skipped_as_torch_skips_them(place):
    """No update, no decay, no count for a parameter that no loss reached (law 2)."""
    job = Job("router", steps=6)
    chosen = [set((tokens(step)[:, 0] % 6).tolist()) for step in range(job.steps)]
    times = [sum(expert in step for step in chosen) for expert in range(6)]
    assert min(times) < job.steps
    trained = by_offload(job, place=place)
    model, optimizer = _plain_torch(job)
    named = dict(model.named_parameters())
    steps = dict(zip(named, trained.steps, strict=True))
    for name, param in named.items():
        state = optimizer.state.get(param)
        assert steps[name] == (int(state["step"]) if state else 0), name
        torch.testing.assert_close(
            trained.weights[name], param.detach().cpu(), rtol=1e-4, atol=1e-6
        )
    for expert, count in enumerate(times):
        assert steps[f"experts.{expert}.0.weight"] == count


@pytest.mark.parametrize("name", ["router", "mixtral"])
def test_an_expert_that_is_never_chosen(name):
    """A module of its own stays as it was; a slice of one tensor has zeros, and decays."""
    seen = set()
    ids = torch.full((2, 8), 5, device=DEVICE)  # one token: one expert in each layer
    ids[:, 1::2] = 11
    job = Job(name)
    model = build(job)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for key, module in model.named_modules():
        if key.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: seen.update(args[1].unique().tolist()))
    model, optimizer = forebay.offload(
        model, torch.optim.AdamW(groups_of(model, job), lr=job.lr), device=DEVICE
    )
    for _ in range(3):
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {key: value.cpu() for key, value in model.state_dict().items()}
    if name == "router":
        assert not torch.equal(after["experts.5.0.weight"], before["experts.5.0.weight"])
        for expert in range(5):
            assert torch.equal(
                after[f"experts.{expert}.0.weight"], before[f"experts.{expert}.0.weight"]
            )
        optimizer.close()
        return
    idle = sorted(set(range(6)) - seen)
    assert idle, "every expert was chosen"
    key = "model.layers.0.mlp.experts.down_proj"
    for expert in idle:
        # no gradient, so the moments stay 0 and only the decay is left: three factors
        expected = before[key][expert]
        for _ in range(3):
            expected = expected * torch.tensor(1.0 - job.lr * 0.1, dtype=torch.float32)
        assert torch.equal(after[key][expert], expected)
    optimizer.close()


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_every_weight_has_a_storage_of_its_own(name, tmp_path):
    """As in a model that nobody took over: savers look at storages, not at tensors."""
    job = Job(name, dtype=torch.bfloat16)
    model = build(job)
    model, optimizer = forebay.offload(
        model, torch.optim.AdamW(groups_of(model, job), lr=job.lr), device=DEVICE
    )
    for closing in (False, True):
        loss_of(model, tokens(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict()
        if closing:
            optimizer.close()
        for param in model.parameters():
            assert param.untyped_storage().nbytes() == param.nbytes
        save_model(model, tmp_path / "model.safetensors")
        twin = build(job)
        load_model(twin, tmp_path / "model.safetensors")
        for key, value in twin.state_dict().items():
            assert torch.equal(value, state[key].cpu()), key


def test_weights_that_changed_their_shape_are_refused_by_name():
    job = Job("tied_llama")
    model = build(job)
    model, optimizer = forebay.offload(
        model, torch.optim.AdamW(groups_of(model, job), lr=job.lr), device=DEVICE
    )
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    with pytest.raises(forebay.UnsupportedError, match=r"embed_tokens.* shape \(64, 24\)"):
        loss_of(model, tokens(0)).backward()
    optimizer.close()
