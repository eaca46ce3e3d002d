"""A Hugging Face `config.json` into a shape, read as JSON: no torch, no transformers, no class.

Families differ in key names and in a few choices; each has a row. An unknown family is refused
with what to give instead; a wrong number with its key and range.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError
from forebay.model.shape import Experts, Mlp, ModelShape, Norm

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "from_counts", "read_shape", "shape_of"]

_SHAPE_HINT = "give a parameter count and shapes: forebay plan 7e9 --hidden 4096 --layers 32"
# More than any model of today by orders of magnitude.
_MOST = {"layers": 100_000, "hidden": 10_000_000, "vocab": 100_000_000}
_MOST_PARAMETERS = 10**16
# GPT-2's vocabulary; where only a count is known.
_VOCAB = 50257


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's configuration leaves unsaid.

    A choice is 0 or 1, or the key that says it.
    """

    mlp: Mlp = Mlp.GATED
    norm: Norm = Norm.RMS
    norms: int = 2
    extra_norms: int = 1
    qk_norm: int = 0
    qkv_bias: int | str = 0
    out_bias: int | str = 0
    mlp_bias: int | str = 0
    tied: int = 0
    positions: int = 0
    expert_key: str = "intermediate_size"


_GPT: Final = _Family(
    mlp=Mlp.PLAIN, norm=Norm.LAYER, qkv_bias=1, out_bias=1, mlp_bias=1, tied=1, positions=1
)
_ALIKE: Final = _Family(
    mlp=Mlp.PLAIN,
    norm=Norm.LAYER,
    qkv_bias="use_bias",
    out_bias="use_bias",
    mlp_bias="use_bias",
    tied=1,
)

FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
        "mistral": _Family(),
        "qwen2": _Family(qkv_bias=1),
        "qwen3": _Family(qk_norm=1),
        "phi3": _Family(),
        "gemma": _Family(tied=1),
        "gemma2": _Family(tied=1, norms=4),
        "olmo": _Family(norm=Norm.BARE),
        "mixtral": _Family(),
        "qwen3_moe": _Family(qk_norm=1, expert_key="moe_intermediate_size"),
        "qwen2_moe": _Family(qkv_bias=1, expert_key="moe_intermediate_size"),
        "gpt2": _GPT,
        "gpt_neox": _Family(mlp=Mlp.PLAIN, norm=Norm.LAYER, qkv_bias=1, out_bias=1, mlp_bias=1),
        "opt": _GPT,
        "bloom": _Family(
            mlp=Mlp.PLAIN,
            norm=Norm.LAYER,
            qkv_bias=1,
            out_bias=1,
            mlp_bias=1,
            tied=1,
            extra_norms=2,
        ),
        "starcoder2": _ALIKE,
    }
)

# The first key that is there counts.
_KEYS: Final = MappingProxyType(
    {
        "layers": ("num_hidden_layers", "n_layer", "num_layers"),
        "hidden": ("hidden_size", "n_embd"),
        "heads": ("num_attention_heads", "n_head", "num_heads"),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        "vocab": ("vocab_size",),
        "positions": ("max_position_embeddings", "n_positions"),
        "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    }
)


def read_shape(path: Path) -> ModelShape:
    """Read a model's folder or its `config.json`.

    Raises:
        ConfigError: It cannot be read, or is refused by `shape_of`.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint=_SHAPE_HINT) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}", hint=_SHAPE_HINT) from error
    return shape_of(data, source=str(file))


def shape_of(data: Any, *, source: str) -> ModelShape:
    """The shape that a decoded configuration describes.

    Args:
        data: The configuration; of a model with several parts, its text part counts.
        source: Its name, for messages.

    Raises:
        ConfigError: Its family is not known, or a number is missing or absurd.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must be an object, not {type(data).__name__}")
    if isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    kind = str(data.get("model_type", "none")).removesuffix("_text")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type {kind!r} is not known; known are {', '.join(FAMILIES)}",
            hint=_SHAPE_HINT,
        )
    family = FAMILIES[kind]
    reader = _Reader(data, source)
    hidden, heads = reader.number("hidden"), reader.number("heads")
    if hidden % heads and "head_dim" not in data:
        raise ConfigError(f"{source}: hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = reader.number("head_dim", default=hidden // heads)
    return ModelShape(
        name=str(data.get("_name_or_path") or kind),
        layers=reader.number("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=reader.number("kv_heads", default=heads),
        head_dim=head_dim,
        ffn=reader.number("ffn", default=4 * hidden),
        vocab=reader.number("vocab"),
        tied=int(bool(data.get("tie_word_embeddings", family.tied))),
        mlp=family.mlp,
        norm=family.norm,
        norms=family.norms,
        qk_norms=head_dim * family.qk_norm,
        # OPT keeps two rows for padding.
        positions=reader.number("positions") + 2 * (kind == "opt") if family.positions else 0,
        qkv_bias=_choice(data, family.qkv_bias),
        out_bias=_choice(data, family.out_bias),
        mlp_bias=_choice(data, family.mlp_bias),
        extra_norms=family.extra_norms,
        experts=_experts(reader, family),
    )


def from_counts(
    parameters: float,
    *,
    hidden: int | None = None,
    layers: int | None = None,
    vocab: int | None = None,
) -> ModelShape:
    """A GPT-like shape with that many parameters.

    Without shapes, a block is 128 times as wide as the model is deep: 13 billion parameters have 40
    layers of 5120, 175 billion 96 of 12288, as in GPT-3. The feed-forward size, 4 times the hidden
    size or near it, makes the count come out.

    Raises:
        ConfigError: A number is absurd, or the shapes leave nothing for feed-forward layers.

    Example:
        >>> shape = from_counts(13e9)
        >>> shape.layers, shape.hidden, round(shape.parameters / 1e9, 1)
        (40, 5120, 13.0)
    """
    count = _checked(parameters, "parameters", most=_MOST_PARAMETERS)
    words = vocab if vocab is not None else min(_VOCAB, max(256, count // 1000))
    words = _checked(words, "--vocab", most=_MOST["vocab"])
    if layers is not None:
        layers = _checked(layers, "--layers", most=_MOST["layers"])
    if hidden is None:
        depth = layers or 0
        width = (count / (12 * depth)) ** 0.5 if depth else (128 * count / 12) ** (1 / 3)
        hidden = max(64, round(width / 128) * 128)
    hidden = _checked(hidden, "--hidden", most=_MOST["hidden"])
    if layers is None:
        layers = max(1, round((count - words * hidden) / (12 * hidden * hidden)))
    # What the rest of the model leaves for the two matrices of each feed-forward layer.
    ffn = round((count - words * hidden - layers * 4 * hidden * hidden) / (2 * layers * hidden))
    if ffn < 1:
        raise ConfigError(
            f"{count:,} parameters are too few for {layers} layers of hidden size {hidden} and "
            f"{words:,} words: they need more than "
            f"{layers * 4 * hidden * hidden + words * hidden:,}",
            hint="give fewer --layers, a smaller --hidden or a smaller --vocab",
        )
    head = 128 if hidden % 128 == 0 and hidden >= 1024 else 64 if hidden % 64 == 0 else hidden
    return ModelShape(
        name=f"{count / 1e9:.3g}B parameters",
        layers=layers,
        hidden=hidden,
        heads=hidden // head,
        kv_heads=hidden // head,
        head_dim=head,
        ffn=ffn,
        vocab=words,
        tied=1,
        mlp=Mlp.PLAIN,
        norm=Norm.LAYER,
    )


class _Reader:
    """Reads whole numbers by several names."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = data
        self.source = source

    def number(self, name: str, *, default: int | None = None) -> int:
        for key in _KEYS[name]:
            value = self.data.get(key)
            if value is not None:
                most = _MOST.get(name, 10**9)
                return _checked(value, f"{self.source}: {key}", most=most)
        if default is None:
            names = " or ".join(_KEYS[name])
            raise ConfigError(f"{self.source}: {names} is missing", hint=_SHAPE_HINT)
        return default


def _checked(value: Any, what: str, *, most: int) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1 <= value <= most or value != int(value):
        raise ConfigError(f"{what} is {value!r}; it must be a whole number from 1 to {most:,}")
    return int(value)


def _choice(data: Mapping[str, Any], choice: int | str) -> int:
    return int(bool(data.get(choice, 0))) if isinstance(choice, str) else choice


def _experts(reader: _Reader, family: _Family) -> Experts | None:
    if not any(key in reader.data for key in _KEYS["experts"]):
        return None
    count = reader.number("experts")
    active = _checked(
        reader.data.get("num_experts_per_tok"),
        f"{reader.source}: num_experts_per_tok",
        most=count,
    )
    ffn = _checked(
        reader.data.get(family.expert_key), f"{reader.source}: {family.expert_key}", most=10**9
    )
    shared = reader.data.get("shared_expert_intermediate_size") or 0
    return Experts(count=count, active=active, ffn=ffn, shared_ffn=int(shared))
