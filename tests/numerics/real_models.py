"""Tiny models of real code, and one way to train any of them through either face.

Everything is seeded by the step, dropout included, so that two runs differ in nothing but where
state lives and which calls drive it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.accelerators.select import default_device
from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import Timing
from forebay.plan import UpdatePlace, WeightPlace
from numerics.training import Trained

VOCABULARY = 61
DEVICE = default_device()

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 40}


class Translator(nn.Module):
    """`torch.nn.Transformer` from tokens to the loss of the next token.

    Its attention reads the weight of `out_proj` without calling that module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.transformer = nn.Transformer(
            d_model=24,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=40,
            batch_first=True,
        )
        self.head = nn.Linear(24, VOCABULARY)
        self.reentrant: bool | None = None

    def forward(self, input_ids, labels):
        """Encode the tokens and decode them again, each position from those before it."""
        source = target = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(
            input_ids.shape[1], device=source.device, dtype=source.dtype
        )
        coder = self.transformer
        for layer in coder.encoder.layers:
            source = self._run(layer, source)
        source = coder.encoder.norm(source)
        for layer in coder.decoder.layers:
            target = self._run(layer, target, source, mask)
        logits = self.head(coder.decoder.norm(target)).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}

    def _run(self, layer, *inputs):
        if self.reentrant is None or not self.training:
            return layer(*inputs)
        return checkpoint(layer, *inputs, use_reentrant=self.reentrant)


class Router(nn.Module):
    """A language model whose experts are modules of their own; one that gets no token is not run.

    Unlike Mixtral's experts in transformers, which lie in one tensor, such an expert has no
    gradient at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.gate = nn.Linear(24, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(6)
        )
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids, labels):
        """Send each sequence to one expert, chosen by its first token."""
        hidden = self.embed(input_ids)
        weight, chosen = self.gate(hidden[:, 0]).softmax(-1).max(-1)
        chosen = input_ids[:, 0] % 6 if self.training else chosen
        mixed = hidden
        for index in chosen.unique().tolist():
            rows = chosen == index
            routed = self.experts[index](hidden[rows]) * weight[rows, None, None]
            mixed = mixed.index_add(0, rows.nonzero().flatten(), routed)
        logits = self.head(mixed).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def _causal(config: transformers.PretrainedConfig, **options: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config, **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _causal(transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=False)),
    "tied_llama": lambda: _causal(transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True)),
    "qwen2": lambda: _causal(transformers.Qwen2Config(**_GROUPED, tie_word_embeddings=True)),
    "gpt2": lambda: _causal(transformers.GPT2Config(**_SHAPE)),
    "mixtral": lambda: _causal(
        transformers.MixtralConfig(**_GROUPED, num_local_experts=6, num_experts_per_tok=1)
    ),
    # Every expert takes part, so that the loss is a continuous function of the weights.
    "dense_mixtral": lambda: _causal(
        transformers.MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=3),
        experts_implementation="eager",
    ),
    "transformer": Translator,
    "router": Router,
}

CHECKPOINTS = {"stored": None, "reentrant": True, "non_reentrant": False}


@dataclass(frozen=True)
class Job:
    """What is trained and how; two faces and two places give the same bits for one job."""

    model: str
    dtype: torch.dtype = torch.float32
    micro: int = 1
    checkpoints: str = "stored"
    steps: int = 4
    clip: float = 0.5
    lr: float = 1e-2


def build(job: Job) -> nn.Module:
    """The model of a job, the same each time."""
    torch.manual_seed(7)
    model = MODELS[job.model]().to(job.dtype).train()
    reentrant = CHECKPOINTS[job.checkpoints]
    if reentrant is not None and isinstance(model, transformers.PreTrainedModel):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    elif reentrant is not None:
        model.reentrant = reentrant
    return model


def tokens(step: int, micro: int = 0) -> torch.Tensor:
    """A batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(3, VOCABULARY, (3, 12), generator=generator).to(DEVICE)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return model(input_ids=ids, labels=ids)["loss"]


def groups_of(model: nn.Module, job: Job) -> list[dict[str, Any]]:
    """Two groups that interleave: matrices decay, the rest does not and learns faster."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 3 * job.lr},
    ]


# Called with model, optimizer and step after every step.
Between = Callable[[Any, Any, int], None] | None


def by_offload(job: Job, *, place: UpdatePlace = UpdatePlace.HOST, between: Between = None):
    """Train in a plain loop."""
    model = build(job)
    source = torch.optim.AdamW(groups_of(model, job), lr=job.lr)
    if place is UpdatePlace.HOST:
        model, optimizer = forebay.offload(model, source, device=DEVICE, clip_norm=job.clip)
    else:
        options = EngineOptions(
            device=DEVICE, update=place, clip_norm=job.clip, timing=Timing.SYNCHRONOUS
        )
        model, optimizer = offload_with(model, source, options=options)
    return _loop(job, model, optimizer, between)


# Weights on the host, and on the device what computes at once and one more unit.
STREAMED = EngineOptions(weights=WeightPlace.HOST, pool_bytes=0, update=UpdatePlace.HOST)


def by_streaming(
    job: Job,
    *,
    options: EngineOptions = STREAMED,
    between: Between = None,
    around: Callable[[], Any] = contextlib.nullcontext,
):
    """Train in a plain loop with weights on the host; forwards run inside `around()`."""
    model = build(job)
    source = torch.optim.AdamW(groups_of(model, job), lr=job.lr)
    chosen = replace(options, device=DEVICE, clip_norm=job.clip)
    model, optimizer = offload_with(model, source, options=chosen)
    assert all(unit.streams_weights for unit in optimizer.engine.units)
    return _loop(job, model, optimizer, between, around)


def _loop(
    job: Job,
    model: nn.Module,
    optimizer: Any,
    between: Between,
    around: Callable[[], Any] = contextlib.nullcontext,
):
    losses, norms = [], []
    for step in range(job.steps):
        for micro in range(job.micro):
            torch.manual_seed(step)
            with around():
                loss = loss_of(model, tokens(step, micro))
            (loss / job.micro).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
        if between is not None:
            between(model, optimizer, step)
    return finished(model, optimizer, losses, norms)


def by_initialize(
    job: Job,
    *,
    place: UpdatePlace = UpdatePlace.HOST,
    weights: WeightPlace = WeightPlace.DEVICE,
    between: Between = None,
):
    """Train through DeepSpeed's calls and a configuration given as a dict."""
    model = build(job)
    on_host = place is UpdatePlace.HOST
    away = {"offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 0}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": job.micro,
        "gradient_clipping": job.clip,
        "bf16": {"enabled": job.dtype is torch.bfloat16},
        "zero_optimization": {
            "stage": 3 if weights is WeightPlace.HOST else 2,
            "offload_optimizer": {"device": "cpu" if on_host else "none"},
            **(away if weights is WeightPlace.HOST else {}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": job.lr}},
        "forebay": {"synchronous": not on_host},
    }
    engine, optimizer, _, _ = forebay.initialize(
        model=model, model_parameters=groups_of(model, job), config=config
    )
    losses, norms = [], []
    for step in range(job.steps):
        for micro in range(job.micro):
            torch.manual_seed(step)
            loss = engine.backward(loss_of(engine, tokens(step, micro)))
            losses.append(loss.item())
            engine.step()
        norms.append(engine.get_global_grad_norm())
        if between is not None:
            between(engine.module, optimizer, step)
    return finished(model, optimizer, losses, norms)


def finished(model: nn.Module, optimizer: Any, losses: list[float], norms: list[float]) -> Trained:
    """What a run ends with; closes the optimizer."""
    records = optimizer.engine.collector.records
    state = model.state_dict()  # passes the barrier
    result = Trained(
        losses=losses,
        norms=norms,
        weights={name: value.clone().cpu() for name, value in state.items()},
        masters=[r.part.master_copy(r.slot).cpu() for r in records],
        moments=[
            optimizer.state[r.param][name].clone().cpu()
            for r in records
            for name in ("exp_avg", "exp_avg_sq")
        ],
        steps=[r.step for r in records],
    )
    optimizer.engine.ledger.check()
    optimizer.close()
    return result
