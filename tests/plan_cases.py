"""Questions that several tests of the planner ask."""

from __future__ import annotations

from forebay.hardware.catalog import CATALOG
from forebay.plan.model_config import shape_of
from forebay.plan.setup import Cluster
from forebay.plan.ways import Question
from forebay.plan.workload import Precision, Workload

LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
# The shape of the measurements in benchmarks/results.
LLAMA_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def question(config, machine, *, nodes=1, devices=None, free=64, **work):
    """A question about a catalogued machine."""
    profile = CATALOG[machine]
    precision = Precision.FP16 if machine.startswith("v100") else Precision.BF16
    return Question(
        shape=shape_of(config, source="config"),
        profile=profile,
        cluster=Cluster(devices_per_node=devices or profile.node.devices, nodes=nodes),
        workload=Workload(**{"micro_batch": 8, "precision": precision, **work}),
        free_micro_batch=free,
    )
