"""Who takes part in a step benchmark. Each trains the same model on the same tokens.

* `floor`: forward and backward alone.
* `none`: no offload: bf16 weights, fp32 masters and moments on the device, plain PyTorch.
* `host`, `device`: forebay with every update on the host, or every state on the device.
* `r0`, `r25`, `r50`, ...: forebay with that percentage of the 12 bytes of state per parameter
  resident on the device, the rest streamed or updated on the host as the planner chooses.
* `planned`: forebay as it comes. `synchronous`: the same, finishing within `step()`.
* `streamed`: weights on the host, state as in `r0`; `streamed+P`: with P GB of the device for
  weights instead of what they need at least; `streamed+P+R`: with the first share R of the
  parameters, state and weights, on the device for good. `+host` after these updates the others
  on the host alone.
* `mix+R+S`: the first share R of the parameters resident, the next share S streamed.
* `+layer` after any of these: all micro-batches of an update pass a block before the next one.
* `+speculative`, `+delayed` or `+zenflow` after any of these (`r0+speculative`): that policy of
  updates instead of the exact one.
* Any of these with `+offload` at the end keeps the boundary activations of checkpointed layers on
  the host too.
* `deepspeed2`, `deepspeed3`, `deepspeed3super`, `deepspeed2zenflow`, `fsdp2`: other libraries; see
  `forebay.bench.peers`.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forebay.bench.peers import DECAY, RATE, peer
from forebay.bench.spec import SHAPES
from forebay.bench.streamed import SPLIT_STATE_BYTES, Streamed, draw_later
from forebay.bench.variant import Variant
from forebay.engine import EngineOptions, offload_with
from forebay.engine.layer_order import LayerOrder
from forebay.engine.options import ActivationPlace, Timing
from forebay.errors import ConfigError
from forebay.plan.placement import AccumulationOrder, UpdatePlace, WeightPlace
from forebay.plan.policies import Exact, Speculative
from forebay.plan.solve import DeviceRoom, choose_places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from forebay.bench.spec import StepSpec
    from forebay.engine import Engine
    from forebay.model.spec import ModelSpec
    from forebay.plan.solve import Rates

__all__ = ["STATE_BYTES", "Contestant", "build_model", "contestant", "resident_share"]

# State of a parameter that "all of the state" means: fp32 master and two moments.
STATE_BYTES = 12


class Contestant(Protocol):
    """Trains: `backward`, then `step`."""

    engine: Engine | None

    def backward(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Forward and backward of an update's micro-batches; returns the last one's loss."""
        ...

    def step(self) -> None:
        """Update and clear gradients."""
        ...


def build_model(spec: StepSpec) -> nn.Module:
    """A randomly initialised bf16 Llama with every layer checkpointed; the same every time."""
    library = importlib.import_module("transformers")
    shape = SHAPES[spec.size]
    config = library.LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max(4096, spec.sequence, *spec.lengths),
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    streams = Streamed.of(spec.variant) is not None
    try:
        with torch.device("meta" if streams else spec.device):
            model: Any = library.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if streams:  # larger than the device: each parameter is made when forebay has its place
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=config)
        draw_later(model, device=spec.device)
    if shape.frozen:
        for param in model.model.layers.parameters():
            param.requires_grad_(param.ndim == 1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def contestant(spec: StepSpec, model: nn.Module, *, rates: Rates | None) -> Contestant:
    """The contestant that a specification names.

    Raises:
        ConfigError: There is none of that name, or its library is not installed.
    """
    if spec.variant == "floor":
        return _Passes(spec, model)
    if spec.variant == "none":
        return _NoOffload(spec, model)
    return peer(spec, model) or _Forebay(spec, model, rates=rates)


class _Passes:
    """Forward and backward alone."""

    def __init__(self, spec: StepSpec, model: nn.Module) -> None:
        self.engine: Engine | None = None
        self.model = model
        self._accumulation = spec.accumulation

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the loss."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss / self._accumulation

    def backward(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        share = torch.zeros(())
        for batch in batches:
            share = self.share(batch)
            share.backward()
        return share.detach() * self._accumulation

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)


class _NoOffload(_Passes):
    """bf16 weights, fp32 masters and moments on the device."""

    def __init__(self, spec: StepSpec, model: nn.Module) -> None:
        super().__init__(spec, model)
        self._params = list(model.parameters())
        self._masters = [param.detach().float() for param in self._params]
        self._optimizer = torch.optim.AdamW(self._masters, lr=RATE, weight_decay=DECAY, fused=True)
        self._clip = spec.clip

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        for master, param in zip(self._masters, self._params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        self._optimizer.step()
        with torch.no_grad():
            for master, param in zip(self._masters, self._params, strict=True):
                param.copy_(master)
                master.grad = None


class _Forebay(_Passes):
    def __init__(self, spec: StepSpec, model: nn.Module, *, rates: Rates | None) -> None:
        super().__init__(spec, model)
        trained = [param for param in model.parameters() if param.requires_grad]
        source = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
        named = Variant.parse(spec.variant)
        variant, streamed = named.base, Streamed.of(named.base)
        options = EngineOptions(
            device=spec.device,
            clip_norm=spec.clip,
            update={"device": UpdatePlace.DEVICE, "host": UpdatePlace.HOST}.get(variant),
            places=_places(named, rates=rates, backwards=spec.accumulation),
            weights=WeightPlace.DEVICE if streamed is None else WeightPlace.HOST,
            pool_bytes=None if streamed is None else streamed.pool_bytes,
            activations=ActivationPlace.HOST if named.offloads else ActivationPlace.DEVICE,
            timing=Timing.SYNCHRONOUS if variant == "synchronous" else Timing.DEFERRED,
            backwards=spec.accumulation,
            threads=spec.threads,
            host_budget=spec.host_budget,
            device_budget=spec.device_budget,
            rates=rates,
            policy=named.policy,
            order=named.order,
        )
        _, self._optimizer = offload_with(model, source, options=options)
        self.engine = self._optimizer.engine
        layers = named.order is AccumulationOrder.LAYER
        self._layers = LayerOrder(self.engine) if layers else None

    def backward(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._layers is None:
            return super().backward(batches)
        shares = self._layers.backward([partial(self.share, batch) for batch in batches])
        return shares[-1] * self._accumulation

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def _places(
    named: Variant, *, rates: Rates | None, backwards: int
) -> Callable[[ModelSpec], Sequence[UpdatePlace]] | None:
    variant = named.base
    if variant in ("planned", "synchronous", "host", "device"):
        return None
    share = resident_share(variant)
    if share is not None and not variant.startswith("mix"):

        def _budgeted(model: ModelSpec) -> Sequence[UpdatePlace]:
            # A streamed variant counts parameters: a resident one has its state of 10 bytes beside
            # its weight (split masters).
            streamed = Streamed.of(variant)
            item = STATE_BYTES if streamed is None else SPLIT_STATE_BYTES
            resident = int(share * item * model.elements)
            chosen = choose_places(
                model,
                rates=rates,
                room=DeviceRoom(resident_bytes=resident),
                backwards=backwards,
                weights=WeightPlace.DEVICE if streamed is None else WeightPlace.HOST,
            )
            # other policies let no state visit the device
            may_visit = isinstance(named.policy, Exact | Speculative)
            if may_visit and (streamed is None or not streamed.updates_on_host):
                return chosen
            stays = UpdatePlace.DEVICE
            return [one if one is stays else UpdatePlace.HOST for one in chosen]

        return _budgeted
    name, *numbers = variant.split("+")
    if name != "mix" or len(numbers) != 2:
        raise ConfigError(
            f"variant {variant!r} is not known",
            hint="floor, none, planned, host, device, synchronous, r0 ... r100, streamed, mix+R+S, "
            "deepspeed2, deepspeed3, deepspeed3super, deepspeed2zenflow or fsdp2; +layer, "
            "+speculative, +delayed or +zenflow after forebay's",
        )
    resident, streamed = (float(number) for number in numbers)

    def _by_shares(model: ModelSpec) -> Sequence[UpdatePlace]:
        chosen, used = [], 0
        for unit in model.units:
            used += unit.elements
            if used <= resident * model.elements:
                chosen.append(UpdatePlace.DEVICE)
            elif used <= (resident + streamed) * model.elements:
                chosen.append(UpdatePlace.STREAMED)
            else:
                chosen.append(UpdatePlace.HOST)
        return chosen

    return _by_shares


def resident_share(variant: str) -> float | None:
    """The share of the state that a variant keeps on the device; None where it states none."""
    variant = Variant.parse(variant).base
    streamed = Streamed.of(variant)
    if streamed is not None:
        return streamed.resident
    if variant == "host":
        return 0.0
    if variant.startswith("r") and variant[1:].isdigit():
        return int(variant[1:]) / 100
    if variant.startswith("mix+"):
        return float(variant.split("+")[1])
    return None
