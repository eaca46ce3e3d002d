"""Other libraries that train with state on the host, with the settings that they document.

* `deepspeed2`, `deepspeed3`: DeepSpeed's ZeRO stage 2 with its optimizer on the host, stage 3
  with parameters there too; where DeepSpeed is installed. `deepspeed3nvme`: stage 3 with its
  optimizer's state in files (`forebay bench nvme-step`). `deepspeed3super` is its SuperOffload,
  `deepspeed2zenflow` its ZenFlow, by the values of their tutorials.
* `fsdp2`: PyTorch's FSDP2 with `CPUOffloadPolicy`: fp32 parameters and state on the host, bf16
  computation, every layer a group.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.spec import SHAPES
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from forebay.bench.spec import StepSpec
    from forebay.engine import Engine

__all__ = ["DECAY", "RATE", "peer", "shard_fully"]

RATE = 1e-5
DECAY = 0.01


def peer(spec: StepSpec, model: nn.Module) -> _DeepSpeed | _FullyShard | None:
    """The contestant of another library; None where the variant names none.

    Raises:
        ConfigError: Its library is not installed.
    """
    if spec.variant in _DEEPSPEED:
        return _DeepSpeed(spec, model, stage=int(spec.variant[len("deepspeed")]))
    if spec.variant == "fsdp2":
        return _FullyShard(spec, model)
    return None


_DEEPSPEED = ("deepspeed2", "deepspeed2zenflow", "deepspeed3", "deepspeed3nvme", "deepspeed3super")


class _DeepSpeed:
    """DeepSpeed with the settings that its documentation gives for offload on one device."""

    def __init__(self, spec: StepSpec, model: nn.Module, *, stage: int) -> None:
        try:
            library: Any = importlib.import_module("deepspeed")
        except ImportError as error:
            raise ConfigError(
                f"{spec.variant} needs DeepSpeed, which is not installed",
                hint="pip install deepspeed, or leave it out of --variants",
            ) from error
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
        self.engine: Engine | None = None
        self._engine, *_ = library.initialize(
            model=model, config=_deepspeed_config(spec, stage), model_parameters=model.parameters()
        )

    def backward(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for batch in batches:
            loss = self._engine(input_ids=batch, labels=batch).loss
            self._engine.backward(loss)
            self._engine.step()
        return loss.detach()

    def step(self) -> None:
        """Its engine steps by itself at the window's end."""


# One process; the port is free unless two benchmarks run at once.
_ALONE = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
}


def _deepspeed_config(spec: StepSpec, stage: int) -> dict[str, Any]:
    on_host = {"device": "cpu", "pin_memory": True}
    square = SHAPES[spec.size].hidden ** 2
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": on_host,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if spec.variant == "deepspeed3nvme":
        zero |= _in_files(spec)
    elif spec.variant == "deepspeed3super":
        zero |= _SUPER
    elif spec.variant == "deepspeed2zenflow":
        zero |= _ZENFLOW
    elif stage == 3:
        # as its "auto" answers for a model of this width
        zero |= {
            "offload_param": on_host,
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * SHAPES[spec.size].hidden,
        }
    return {
        # only counted with, so that one engine may meet every size of a run
        "train_micro_batch_size_per_gpu": spec.micro_batches[0],
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": spec.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "steps_per_print": 1 << 30,
    }


# As its tutorials have them.
_SUPER: dict[str, Any] = {
    "overlap_comm": False,
    "reduce_bucket_size": 400_000_000,
    "sub_group_size": 400_000_000,
    "offload_optimizer": {
        "device": "cpu",
        "pin_memory": True,
        "ratio": 0.9,
        "super_offload": True,
        "cpuadam_cores_perc": 0.9,
    },
}
_ZENFLOW: dict[str, Any] = {
    "zenflow": {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
}


def _in_files(spec: StepSpec) -> dict[str, Any]:
    """Optimizer state in files, by the values of its tutorial; groups so that buffers are small."""
    return {
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": spec.nvme_path,
            "pin_memory": True,
            "buffer_count": 4,
        },
        "sub_group_size": 100_000_000,
    }


def shard_fully(model: Any, *, device: str, offload: bool, computes: torch.dtype) -> None:
    """Apply FSDP2 over all ranks: every layer a group.

    Args:
        model: A Llama in fp32.
        device: "cuda" or "cpu".
        offload: Whether parameters, gradients and state live on the host.
        computes: What forward and backward compute in.
    """
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    ranks: Any = importlib.import_module("torch.distributed")
    how = {
        "mesh": ranks.init_device_mesh(device, (ranks.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32),
    }
    if offload:
        how["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device == "cuda")
    for layer in model.model.layers:
        fsdp.fully_shard(layer, **how)
    fsdp.fully_shard(model, **how)


class _FullyShard:
    """FSDP2 of one rank: parameters, gradients and state in fp32 on the host."""

    def __init__(self, spec: StepSpec, model: nn.Module) -> None:
        ranks: Any = importlib.import_module("torch.distributed")
        if not ranks.is_initialized():
            # Norms of gradients on the host are reduced there.
            ranks.init_process_group(
                "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo",
                store=ranks.HashStore(),
                rank=0,
                world_size=1,
            )
        self.engine: Engine | None = None
        self._accumulation, self._clip = spec.accumulation, spec.clip
        trained: Any = model.float()
        shard_fully(trained, device=spec.device, offload=True, computes=torch.bfloat16)
        self._model = trained
        self._params = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, lr=RATE, weight_decay=DECAY, fused=True)

    def backward(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for batch in batches:
            loss = self._model(input_ids=batch, labels=batch).loss
            (loss / self._accumulation).backward()
        return loss.detach()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
