"""The words of a plan: what each role and tier is called, and what each word means.

A plan is read by people who have never trained a model. Whatever word of the trade it uses is
explained under it; a word that it does not use is not.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ROLES", "TIERS", "in_words", "meanings"]

ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lp_params": "weights",
        "lp_grads": "gradients",
        "contiguous_grad_buffer": "gradient sums",
        "hp_params": "fp32 masters",
        "optim_states": "optimizer state",
        "visits": "visiting state",
        "activations": "activations",
        "staging": "staging",
    }
)
"""What the ledger's roles are called."""

TIERS: Final[Mapping[str, str]] = MappingProxyType(
    {"device": "each device", "host": "each host", "nvme": "each node's drives"}
)
"""What the tiers are called."""

# A word, how it is found in a plan, and what it means; in the order in which a reader meets them.
_MEANINGS: Final = (
    (
        "parameters, weights",
        r"parameters?|weights",
        "the numbers that a model consists of, and that training changes",
    ),
    ("device", r"devices?", "what computes: a GPU with a fast memory of its own, or the processor"),
    ("host", r"hosts?", "the machine around the devices, with its processor and its memory"),
    ("node", r"nodes?", "one machine of those that train together, a host and its devices"),
    ("drives, nvme", r"drives?|nvme", "fast disks inside the machine: large, slower than memory"),
    (
        "offload",
        r"offload",
        "to keep on the host or on drives what devices need only now and then",
    ),
    ("token", r"tokens?", "a piece of text: a word or a part of one"),
    ("sequence", r"sequences?", "one text, of as many tokens as --sequence says"),
    (
        "update, step",
        r"updates?|steps?",
        "one change of all weights, after one or more passes over a batch of texts",
    ),
    (
        "pass",
        r"pass(es)?",
        "some texts (a micro-batch) go through the model and back, to see how to change it",
    ),
    (
        "stage",
        r"stage",
        "what devices share out among them instead of each holding all: 1 the optimizer's "
        "state, 2 gradients too, 3 weights too (on one device they are the same)",
    ),
    (
        "layer order",
        r"layer order",
        "all passes of an update go through one layer before the next, so that weights come once "
        "for all of them",
    ),
    ("gradients", r"gradients", "how each weight is to change, from one pass"),
    (
        "gradient sums",
        r"gradient sums",
        "gradients of several passes or devices, added up in 32 bits",
    ),
    ("optimizer", r"optimizer", "the rule that turns gradients into changes of the weights"),
    (
        "optimizer state",
        r"optimizer state|optimizer's state",
        "what the optimizer remembers of each weight",
    ),
    (
        "fp32 masters",
        r"masters",
        "exact copies of the weights, which the optimizer changes",
    ),
    (
        "visiting state",
        r"visiting state",
        "masters and optimizer state that come to the device for an update and go back",
    ),
    (
        "activations",
        r"activations",
        "what the way back through the model needs of the way forward",
    ),
    (
        "recomputation",
        r"recomputation|recompute",
        "the way back computes activations again, so that few have to be kept",
    ),
    ("staging", r"staging", "memory that bytes pass through on their way"),
    ("link", r"link", "the connection between a device and its host"),
    (
        "page-locked",
        r"page-locked",
        "held in place by the system, so that devices can read it by themselves",
    ),
    ("bf16, fp16", r"bf16|fp16", "two ways to write a number in 16 bits"),
    ("loss scale", r"loss scale", "a factor that keeps small gradients from becoming zero"),
    ("TFLOP/s", r"TFLOP/s", "million million additions and multiplications a second"),
    (
        "GiB, TiB",
        r"[GT]iB",
        "1,073,741,824 bytes, a little more than a GB; 1,024 GiB, a little more than a TB",
    ),
)


def meanings(text: str) -> Iterator[str]:
    """Each word that a text uses, with what it means.

    Example:
        >>> list(meanings("bytes of staging"))
        ['staging: memory that bytes pass through on their way']
    """
    for word, pattern, meaning in _MEANINGS:
        if re.search(rf"(?<![\w-])(?:{pattern})(?![\w-])", text):
            yield f"{word}: {meaning}"


def in_words(count: int) -> str:
    """A count of parameters.

    Example:
        >>> in_words(8_030_000_000), in_words(50_000_000)
        ('8.03 billion', '50 million')
    """
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"
