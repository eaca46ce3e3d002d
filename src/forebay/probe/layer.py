"""What a transformer layer's operations reach beside its matrix products, and what issuing costs.

Each kind of operation runs as transformers writes it, forward and backward by themselves; bytes and
operations are those of `hardware.layer_work`. The cost of issuing is that of whole layers on almost
nothing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from forebay.hardware.layer_work import (
    ATTENTION_BACKWARD,
    BYTES_BACKWARD,
    activation_bytes,
    attention_operations,
    fused_norm_bytes,
    loss_bytes,
    norm_bytes,
    rotation_bytes,
)
from forebay.hardware.rates import LayerRates, PassRate, PassSeconds
from forebay.probe.timing import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Accelerator

__all__ = ["layer_rates"]

# Layers behind one figure of what issuing costs, and how often they are issued, at first unseen.
_LAYERS, _ISSUES, _WARM_UP = 4, 40, 5
# From here on bf16 is no emulation.
_BF16_CAPABILITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """How large the operations are: far more than caches hold, or as toys on a processor have it.

    Attributes:
        rows: Sequences.
        sequence: Tokens of each.
        hidden: Width of a layer; the activation's is twice that.
        head: Of one head of attention.
        words: Tokens that have logits, and how many each.
        dtype: Of everything but the loss.
    """

    rows: int
    sequence: int
    hidden: int
    head: int
    words: tuple[int, int]
    dtype: torch.dtype


_SIZES = {
    "cuda": _Size(
        rows=8, sequence=2048, hidden=4096, head=128, words=(4096, 32768), dtype=torch.bfloat16
    ),
    "cpu": _Size(rows=4, sequence=128, hidden=256, head=64, words=(512, 2048), dtype=torch.float32),
}


class _Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(states.dtype)


def _rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    middle = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., middle:], heads[..., :middle]), dim=-1)
    return (heads * angles) + (turned * angles)


def _attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True
    )
    return found.transpose(1, 2).flatten(2)


class _Layer(nn.Module):
    """A layer of a Llama's, one module for each of its parts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm(hidden) for _ in range(2))
        self.inward = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.outward = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](states)
        heads = (*states.shape[:-1], -1, angles.shape[-1])
        queries, keys, values = (p(normed).view(heads).transpose(1, 2) for p in self.inward)
        found = _attention(_rotated(queries, angles), _rotated(keys, angles), values)
        states = states + self.outward(found)
        normed = self.norms[1](states)
        fed: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return states + fed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Runs operations of a size on a device."""

    accelerator: Accelerator
    size: _Size

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.accelerator.device, dtype=self.size.dtype)

    def heads(self) -> torch.Tensor:
        """As a projection leaves them: a view, heads behind tokens."""
        size = self.size
        heads = (size.rows, size.sequence, size.hidden // size.head, size.head)
        return self.values(*heads).transpose(1, 2)

    def computed(
        self,
        work: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        *,
        forward: float,
        backward: float,
    ) -> PassRate:
        """What both passes of an operation reach of an amount each."""
        for one in inputs:
            one.requires_grad_()
        result = work(*inputs)
        gradient = torch.ones_like(result)

        def back() -> Any:
            return torch.autograd.grad(result, inputs, gradient, retain_graph=True)

        return PassRate(
            forward=forward / seconds_of(lambda: work(*inputs), self.accelerator),
            backward=backward / seconds_of(back, self.accelerator),
        )

    def moved(
        self,
        work: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        each: Callable[[int], int],
    ) -> PassRate:
        """Of bytes, so many for each element of the first input."""
        nbytes = float(each(self.size.dtype.itemsize) * inputs[0].numel())
        return self.computed(work, inputs, forward=nbytes, backward=BYTES_BACKWARD * nbytes)


def _issue(accelerator: Accelerator, dtype: torch.dtype) -> PassSeconds:
    """Seconds of one layer on almost nothing."""
    device, hidden = accelerator.device, 64
    layers = [_Layer(hidden).to(device, dtype) for _ in range(_LAYERS)]
    angles = torch.ones(1, 1, 8, hidden // 2, device=device, dtype=dtype)
    start = torch.ones(1, 8, hidden, device=device, dtype=dtype, requires_grad=True)
    forward, backward = [], []
    for _ in range(_WARM_UP + _ISSUES):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        accelerator.synchronize()
        begin = time.perf_counter()
        states = start
        for layer in layers:
            states = layer(states, angles)
        total = states.sum()
        middle = time.perf_counter()
        accelerator.synchronize()
        again = time.perf_counter()
        total.backward()
        forward.append(middle - begin)
        backward.append(time.perf_counter() - again)
    return PassSeconds(
        forward=statistics.median(forward[_WARM_UP:]) / _LAYERS,
        backward=statistics.median(backward[_WARM_UP:]) / _LAYERS,
    )


def _size_for(device: torch.device) -> _Size:
    """Of what devices of a kind train with: 16 bits as they compute them themselves."""
    size = _SIZES[device.type]
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < _BF16_CAPABILITY:
        return replace(size, dtype=torch.float16)
    return size


def layer_rates(accelerator: Accelerator) -> LayerRates:
    """Measure a layer's operations."""
    size = _size_for(accelerator.device)
    bench = _Bench(accelerator=accelerator, size=size)
    hidden, tokens = size.hidden, size.rows * size.sequence
    norm = _Norm(hidden).to(accelerator.device, size.dtype)
    angles = bench.values(1, 1, size.sequence, size.head)
    words = torch.zeros(size.words[0], dtype=torch.long, device=accelerator.device)
    operations = attention_operations(tokens=tokens, sequence=size.sequence, width=hidden)
    return LayerRates(
        dtype=str(size.dtype).removeprefix("torch."),
        norm=bench.moved(
            lambda states, _weight: norm(states),
            [bench.values(tokens, hidden), norm.weight],
            norm_bytes,
        ),
        fused_norm=bench.moved(
            lambda states, weight: functional.layer_norm(states, (hidden,), weight),
            [bench.values(tokens, hidden), bench.values(hidden)],
            fused_norm_bytes,
        ),
        rotation=bench.moved(
            lambda states: _rotated(states, angles), [bench.heads()], rotation_bytes
        ),
        activation=bench.moved(
            lambda gate, up: functional.silu(gate) * up,
            [bench.values(tokens, 2 * hidden) for _ in range(2)],
            activation_bytes,
        ),
        attention=bench.computed(
            _attention,
            [bench.heads() for _ in range(3)],
            forward=operations,
            backward=ATTENTION_BACKWARD * operations,
        ),
        loss=bench.moved(
            lambda logits: functional.cross_entropy(logits.float(), words),
            [bench.values(*size.words)],
            loss_bytes,
        ),
        issue=_issue(accelerator, size.dtype),
    )
