"""The engine that `initialize` returns: DeepSpeed's methods over `forebay.engine.Engine`."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import ConfigError, GradientError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.tiers.ledger import Ledger

__all__ = ["TrainingEngine"]

_log = logging.getLogger("forebay")

# What DeepSpeed's engine has and forebay's has not yet, so that the message names it instead of
# the module's missing attribute.
_NOT_YET = frozenset(
    {
        "compile",
        "load_checkpoint",
        "offload_states",
        "reload_states",
        "save_16bit_model",
        "save_checkpoint",
    }
)


class TrainingEngine:
    """Forward, backward and step of one model under one configuration.

    Args:
        core: The engine that does the work.
        optimizer: The optimizer over it.
        config: The resolved configuration.
        scheduler: Stepped after every applied update; None for none.

    Attributes:
        module: The user's model.
        global_steps: Updates so far, skipped ones included.
        micro_steps: Calls of `step()` so far.
    """

    def __init__(
        self,
        core: Engine,
        *,
        optimizer: OffloadedOptimizer,
        config: ResolvedConfig,
        scheduler: LRScheduler | None,
    ) -> None:
        self.core = core
        self.module: nn.Module = core.module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.config = config
        self.training_dataloader: DataLoader[Any] | None = None
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self._micro_batch_size = config.batch.micro_batch_size
        self._accumulation = config.batch.accumulation_steps
        self._micro_in_window = 0
        self._boundary: bool | None = None
        self._backward_pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of one micro-batch; divides by the accumulation steps, returns the loss.

        Raises:
            GradientError: An earlier backward of this window raised.
        """
        self.core.collector.refuse_if_spoiled()
        scaled = loss / self._accumulation if scale_wrt_gas and self._accumulation > 1 else loss
        return self._backward(loss, self.optimizer.scale(scaled), retain_graph=retain_graph)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss divided by the accumulation steps and scaled; call `.backward()` on it."""
        self.core.collector.window.boundary = self.is_gradient_accumulation_boundary()
        self._backward_pending = True
        return self.optimizer.scale(loss / self._accumulation if self._accumulation > 1 else loss)

    def _backward(
        self, loss: torch.Tensor, scaled: torch.Tensor, *, retain_graph: bool
    ) -> torch.Tensor:
        window = self.core.collector.window
        window.boundary = self.is_gradient_accumulation_boundary()
        try:
            scaled.backward(retain_graph=retain_graph)
        except BaseException as error:
            window.abandon_open(f"a backward raised {type(error).__name__}")
            raise
        self._backward_pending = True
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; at the window's boundary, update and clear gradients.

        Raises:
            GradientError: No backward ran since the last step, or one raised.
            TransferError: A transfer failed; the engine is closed.
        """
        self.core.collector.refuse_if_spoiled()
        if not self._backward_pending:
            raise GradientError(
                "step() was called without a backward since the last step()",
                hint="call engine.backward(loss) before engine.step()",
            )
        boundary = self.is_gradient_accumulation_boundary()
        self._backward_pending = False
        self._micro_in_window += 1
        self.micro_steps += 1
        if boundary:
            self._update(self._accumulation, lr_kwargs)

    def flush(self) -> None:
        """Update with a window that is not full, averaged over the micro-batches that it has.

        For the end of an epoch; does nothing when the window is empty.
        """
        if self._micro_in_window:
            self._update(self._micro_in_window, None)

    def _update(self, num_micro: int, lr_kwargs: dict[str, Any] | None) -> None:
        # Each addend was divided by the accumulation steps; a partial window has fewer.
        self.optimizer.step_with(divisor=num_micro / self._accumulation)
        self._micro_in_window = 0
        self._boundary = None
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self._micro_batch_size * num_micro * self.world_size
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            _log.info(
                "step=%d, skipped=%d, lr=%s, norm=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_global_grad_norm(),
            )

    def zero_grad(self) -> None:
        """Discard the window's gradients."""
        self.optimizer.zero_grad()
        self._micro_in_window = 0
        self._backward_pending = False

    def train(self, mode: bool = True) -> TrainingEngine:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        """Set the module's evaluation mode."""
        self.module.eval()
        return self

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-step ends a window."""
        if self._boundary is not None:
            return self._boundary
        return self._micro_in_window + 1 >= self._accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide the boundary by hand, until the next update."""
        self._boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, micro-steps do not end a window."""
        if self.zero_optimization_stage() >= 2:
            raise UnsupportedError(
                f"no_sync() needs stage 0 or 1, this is stage {self.zero_optimization_stage()}",
                hint="use gradient_accumulation_steps, which needs no no_sync()",
            )
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per update."""
        per_pass = self._micro_batch_size * self.world_size
        if train_batch_size <= 0 or train_batch_size % per_pass:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is not a multiple of micro batch "
                f"{self._micro_batch_size} x {self.world_size} processes"
            )
        if self._micro_in_window:
            raise GradientError(
                "the batch size cannot change in the middle of a window",
                hint="call flush() or zero_grad() first",
            )
        self._accumulation = train_batch_size // per_pass
        self.core.expect_backwards(self._accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size that counters and loaders use."""
        if micro_batch_size <= 0:
            raise ConfigError(f"micro batch size {micro_batch_size} is not positive")
        self._micro_batch_size = micro_batch_size

    def train_batch_size(self) -> int:
        """Samples per update over all processes."""
        return self._micro_batch_size * self._accumulation * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward of one process."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.config.batch.world_size

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage asked for."""
        return self.config.zero.stage

    @property
    def skipped_steps(self) -> int:
        """Updates skipped since a gradient was not finite."""
        return self.core.skipped_steps

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step before clipping; None before the first."""
        return self.optimizer.last_grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last update changed the weights."""
        outcome = self.core.last_outcome
        return outcome is not None and outcome.applied

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Betas of each group."""
        return [group["betas"] for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Kind of each group, where the user named one."""
        return [group.get("type") for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """The loss scale in force."""
        return self.core.options.loss_scale.value

    @property
    def ledger(self) -> Ledger:
        """Every byte that forebay placed."""
        return self.core.ledger

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state, after the barrier."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's weights; masters follow them at the next step."""
        return self.module.load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all updates are done and all weights are new."""
        self.core.synchronize()

    def close(self) -> None:
        """Give all memory back; the module keeps its newest weights."""
        self.core.close()

    def destroy(self) -> None:
        """DeepSpeed's name for `close`."""
        self.close()

    def __enter__(self) -> TrainingEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Forward what the engine does not have to the module."""
        if name in _NOT_YET:
            raise UnsupportedError(f"engine.{name} is not supported yet")
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(module, name)
