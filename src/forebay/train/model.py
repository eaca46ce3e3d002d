"""The model of a run: a local Hugging Face folder, or a config.json to start from scratch.

`ModelSource.open` reads the configuration alone, so that data and settings can be checked before
any weight is loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, UnsupportedError
from forebay.train.options import GradientCheckpointing

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from forebay.config.resolved import Dtype

__all__ = ["ModelSource", "choose_device", "hide_devices", "hush_libraries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from, and what its configuration says.

    Attributes:
        folder: Where its configuration, and its tokenizer if it has one, lie.
        is_from_scratch: Whether weights are made instead of loaded.
        config: The `PretrainedConfig`.
        kind: Its model type, for messages.
        dtype: The dtype its configuration names; "float32" where it names none.
        vocabulary: How many embeddings it has.
        context: The longest row that it reads, None where it has no bound.
    """

    folder: Path
    is_from_scratch: bool
    config: Any
    kind: str
    dtype: str
    vocabulary: int
    context: int | None

    @classmethod
    def open(cls, path: Path) -> ModelSource:
        """Read a model's configuration.

        Args:
            path: A folder with config.json and weights, or a .json file.

        Raises:
            ConfigError: There is none, or transformers cannot read it.
            UnsupportedError: The architecture is unknown, or no causal language model.
        """
        if path.is_dir():
            file, from_scratch = path / "config.json", False
        elif path.suffix == ".json":
            file, from_scratch = path, True
        else:
            file, from_scratch = path / "config.json", False
        if not file.is_file():
            what = f"the folder {path} has no config.json" if path.is_dir() else f"no model: {path}"
            raise ConfigError(
                what,
                hint="--model names a local folder saved by transformers, or a config.json to "
                "start from scratch; from the hub: hf download NAME --local-dir FOLDER",
            )
        config = _read_config(file)
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        text = config.get_text_config()
        return cls(
            folder=file.parent,
            is_from_scratch=from_scratch,
            config=config,
            kind=str(config.model_type),
            dtype=str(dtype or "float32").removeprefix("torch."),
            vocabulary=int(text.vocab_size),
            context=_context(text),
        )

    def outline(self, *, dtype: Dtype) -> nn.Module:
        """The model on the meta device: names, shapes and dtypes, no memory.

        Raises:
            ConfigError: There is no such model.
        """
        import torch

        outlined: nn.Module = self._from_config(dtype, within=torch.device("meta"))
        return outlined

    def load(self, *, dtype: Dtype, checkpointing: GradientCheckpointing) -> nn.Module:
        """Say where the weights lie, or how they are made from torch's random state.

        Args:
            dtype: The dtype to load or make them in.
            checkpointing: Whether activations are computed again in backward.

        Returns:
            The model, in training mode, never whole in memory: see `forebay.train.pretrained`
            and `forebay.zero.Init`.

        Raises:
            ConfigError: Weights are missing, of another shape, pickled or unreadable.
            UnsupportedError: The model cannot recompute activations.
        """
        model: Any
        if self.is_from_scratch:
            model = self._make(dtype)
        else:
            from forebay.train.pretrained import load_pretrained

            model = load_pretrained(self.folder, config=self.config, dtype=_torch_dtype(dtype))
        if checkpointing is GradientCheckpointing.ON:
            try:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
            except ValueError as error:
                raise UnsupportedError(
                    f"{self.kind} models cannot recompute activations in this transformers",
                    hint="leave out --gradient-checkpointing",
                ) from error
        model.train()
        trained: nn.Module = model
        return trained

    def _make(self, dtype: Dtype) -> Any:
        from forebay.compat.zero_init import Init

        # Weights are made where the engine wants them, one at a time and each rank's slice.
        return self._from_config(dtype, within=Init())

    def _from_config(self, dtype: Dtype, *, within: AbstractContextManager[Any]) -> Any:
        try:
            with within:
                return _causal_lm().from_config(self.config, dtype=_torch_dtype(dtype))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"cannot make a {self.kind} model from this configuration: {_first_line(error)}",
                hint="check the sizes in config.json against each other",
            ) from error


def _read_config(file: Path) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        kind = values.pop("model_type")
        assert isinstance(kind, str)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError) as error:
        raise ConfigError(
            f'{file} is no model configuration: no JSON object with a "model_type"',
            hint="a config.json as transformers saves it",
        ) from error
    if kind not in _known_kinds():
        raise UnsupportedError(
            f'unknown architecture "{kind}" in {file}',
            hint="update transformers, or check model_type",
        )
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ConfigError(
            f"{file} is no valid {kind} configuration: {_last_line(error)}",
            hint="check its values",
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(
            f"{kind} is no causal language model in this transformers",
            hint="forebay train needs one; other models train with forebay.offload",
        )
    return config


def _causal_lm() -> Any:
    """The loader's class; typed Any, because its annotations differ between releases."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _known_kinds() -> set[str]:
    from transformers import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())


def _context(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _torch_dtype(dtype: Dtype) -> Any:
    import torch

    return getattr(torch, dtype)


def hide_devices(name: str) -> None:
    """Let torch see no CUDA device where the processor is asked for, before it looks.

    The engine takes the current accelerator, and ranks that have GPUs meet over NCCL. CUDA reads
    the variable when it is first asked for a device.
    """
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def choose_device(name: str) -> Any:
    """Make a device the one that forebay computes on.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".

    Returns:
        The torch device.

    Raises:
        ConfigError: There is no such device.
    """
    kind, _, index = name.partition(":")
    if kind not in {"auto", "cpu", "cuda"} or (index and not index.isdigit()):
        raise ConfigError(f'unknown device "{name}"', hint="--device auto, cpu, cuda or cuda:1")
    hide_devices(name)
    import torch

    if kind == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "--device cpu, but CUDA is in use in this process already",
            hint="start a new process with CUDA_VISIBLE_DEVICES empty",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise ConfigError(
            f"--device {name}, but this torch sees {count} CUDA devices",
            hint="--device cpu, or install a CUDA build of torch and check nvidia-smi",
        )
    if kind == "cuda" and index:
        torch.cuda.set_device(int(index))
    return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")


def hush_libraries() -> None:
    """Keep the progress bars and advice of transformers and datasets off the terminal.

    Called by commands, which report in their own words; errors still come through.
    """
    from transformers import utils

    transformers_logging: Any = utils.logging
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        import datasets
    except ImportError:
        return
    datasets.logging.set_verbosity(50)
    datasets.disable_progress_bars()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
