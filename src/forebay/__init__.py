"""forebay: offloaded training for PyTorch, with exactly the same arithmetic.

Two faces lead to one engine:

* `forebay.initialize` takes a DeepSpeed configuration and returns an engine under DeepSpeed's
  names.
* `forebay.offload` takes a model and a `torch.optim` optimizer and leaves the training loop as
  it is.

Names are loaded when they are first used, so that `import forebay` and the planner
(`forebay.plan`) load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from forebay.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
    ForebayError,
    ForebayWarning,
    GradientError,
    PendingWeightError,
    StateAwayError,
    StorageError,
    TransferError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from forebay import ops as ops
    from forebay import runtime as runtime
    from forebay import utils as utils
    from forebay import zero as zero
    from forebay.compat.api import add_config_arguments, initialize
    from forebay.compat.distributed import init_distributed
    from forebay.compat.states import OffloadDeviceEnum, OffloadStateTypeEnum
    from forebay.engine.checkpoints import Checkpoints
    from forebay.engine.offload import offload
    from forebay.engine.save_request import SaveTiming

    __version__: str

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "EngineClosedError",
    "ForebayError",
    "ForebayWarning",
    "GradientError",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "PendingWeightError",
    "SaveTiming",
    "StateAwayError",
    "StorageError",
    "TransferError",
    "UnsupportedError",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "offload",
]

# Where each name that needs torch lives.
_LAZY = {
    "Checkpoints": "forebay.engine.checkpoints",
    "OffloadDeviceEnum": "forebay.compat.states",
    "OffloadStateTypeEnum": "forebay.compat.states",
    "SaveTiming": "forebay.engine.save_request",
    "add_config_arguments": "forebay.compat.api",
    "init_distributed": "forebay.compat.distributed",
    "initialize": "forebay.compat.api",
    "offload": "forebay.engine.offload",
}

# Modules that scripts reach as attributes, without an import of their own.
_MODULES = frozenset({"ops", "runtime", "utils", "zero"})

# What scripts for DeepSpeed use and forebay has not, with what to write instead.
_ABSENT = {
    "DeepSpeedEngine": "the engine's class is forebay.compat.engine.TrainingEngine",
    "OnDevice": "build under torch.device('meta'), or with forebay.zero.Init",
    "PipelineModule": "every rank computes the whole model: pass a plain nn.Module to initialize",
    "checkpointing": "use torch.utils.checkpoint",
    "comm": "use torch.distributed",
    "init_inference": "forebay trains; use the trained module as it is",
    "tp_model_init": "every rank computes the whole model: pass a plain nn.Module to initialize",
}


def __getattr__(name: str) -> object:
    """Loads a public name on first use (PEP 562) and keeps it in the namespace."""
    if name == "__version__":
        value: object = _version()
    elif name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        instead = f" ({_ABSENT[name]})" if name in _ABSENT else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _version() -> str:
    """Returns the installed version, or `0+source` when run from a tree that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("forebay")
    except metadata.PackageNotFoundError:
        return "0+source"
