"""The engine that `initialize` returns: DeepSpeed's methods over `forebay.engine.Engine`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from forebay.compat.batches import MicroBatches
from forebay.compat.checkpoints import Checkpoints
from forebay.compat.flags import check_flags
from forebay.compat.loader import make_loader
from forebay.compat.not_yet import NOT_YET, refusal
from forebay.compat.progress import Progress
from forebay.compat.states import StateOffload
from forebay.compat.steps import MicroSteps
from forebay.compat.windows import Windows
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.tiers.ledger import Ledger

__all__ = ["TrainingEngine"]


class TrainingEngine:
    """Forward, backward and step of one model under one configuration.

    Calls per micro-batch: the engine itself, `backward`, `step`; the last `step` of a window
    updates, moves the schedule on and clears the gradients. A backward that raised (out of memory,
    say) is followed by `zero_grad`, which begins the window again. `train_batch` takes a window's
    micro-batches at once; in layer order nothing else does.

    Args:
        core: The engine that does the work.
        optimizer: The optimizer over it.
        config: The resolved configuration.
        scheduler: Stepped after every applied update; None for none.
        progress: Told of every update; None reports nothing.
        collate_fn: For the loaders that `deepspeed_io` makes.

    Attributes:
        module: The user's model.
        training_dataloader: The loader over `training_data`, or None.
        local_rank: This rank, counted on its machine; 0 where one process trains.
        global_rank: This rank.
    """

    def __init__(
        self,
        core: Engine,
        *,
        optimizer: OffloadedOptimizer,
        config: ResolvedConfig,
        scheduler: LRScheduler | None,
        progress: Progress | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.core = core
        self.module: nn.Module = core.module
        self.optimizer = optimizer
        self.config = config
        self.collate_fn = collate_fn
        self.training_dataloader: DataLoader[Any] | None = None
        group = core.options.group
        self.local_rank = 0 if group is None else group.local_rank
        self.global_rank = 0 if group is None else group.rank
        self.batches = MicroBatches(config.batch)
        self._progress = progress or Progress(every=None)
        self._steps = MicroSteps(
            core,
            optimizer=optimizer,
            batches=self.batches,
            scheduler=scheduler,
            progress=self._progress,
        )
        windows = Windows(core, steps=self._steps, batches=self.batches)
        self.backward_window, self.train_batch = windows.backward_window, windows.train_batch
        saved = Checkpoints(core, optimizer=optimizer, steps=self._steps, config=config)
        self.checkpoints = saved
        self.save_checkpoint, self.load_checkpoint = saved.save_checkpoint, saved.load_checkpoint
        self.wait_for_checkpoint = saved.wait_for_checkpoint
        self.import_torch_state = saved.import_torch_state
        moves = StateOffload(core)
        self.offload_states, self.reload_states = moves.offload_states, moves.reload_states
        self.save_16bit_model = self.save_fp16_model = saved.save_16bit_model

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

        Args:
            loss: A scalar.
            retain_graph: Keep the graph for another backward, which counts again.
            scale_wrt_gas: Whether to divide by the accumulation steps; False for a loss that is
                a share of the whole window's already.

        Raises:
            GradientError: An earlier backward of this window raised.
        """
        self._steps.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss divided by the accumulation steps and scaled; call `.backward()` on it."""
        return self._steps.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; at the window's boundary, update and clear gradients.

        Args:
            lr_kwargs: Arguments of the scheduler's `step` (the metric that some need).

        Raises:
            GradientError: No backward ran since the last step, or one raised.
            TransferError: A transfer failed; the engine is closed.
            CheckpointError: A save beside training failed; step() may be called again.
        """
        self.checkpoints.poll()
        self._steps.step(lr_kwargs)

    def flush(self) -> None:
        """Update with a window that is not full, averaged over the micro-batches that it has.

        For the end of an epoch; does nothing when the window is empty.
        """
        self._steps.flush()

    def zero_grad(self) -> None:
        """Discard the window's gradients and begin it again."""
        self._steps.discard()

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
        return self.batches.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether a micro-step ends the window; holds until it is called again.

        Losses are divided by the configured accumulation steps all the same.
        """
        check_flags("set_gradient_accumulation_boundary", is_boundary=is_boundary)
        self.batches.boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, micro-steps do not end a window (stages 0 and 1)."""
        if self.zero_optimization_stage() >= 2:
            raise UnsupportedError(
                f"no_sync() needs stage 0 or 1, this is stage {self.zero_optimization_stage()}",
                hint="use gradient_accumulation_steps, which needs no no_sync()",
            )
        with self.batches.held_open():
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Inside, gradients of several backwards are exchanged once; see `no_sync`."""
        yield

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per update, between two windows.

        Raises:
            ConfigError: It is no multiple of the micro-batch size.
            GradientError: A window is open.
            BudgetError: fp32 sums, which several micro-batches need, do not fit.
        """
        steps = self.batches.accumulation_for(train_batch_size)
        self.core.expect_backwards(steps)
        self.batches.per_update = steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward, for counters and for loaders made from now on."""
        self.batches.set_micro_batch_size(micro_batch_size)

    def train_batch_size(self) -> int:
        """Samples per update over all processes."""
        return self.batches.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward of one process."""
        return self.batches.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.batches.per_update

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.train_batch_size(), self.batches.micro_batch_size, self.batches.per_update

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of micro-batches; see `forebay.compat.loader.make_loader`.

        Args:
            dataset: A dataset.
            batch_size: Samples per batch; the micro-batch size where it is None.
            route: "train" shuffles; "eval" and "predict" do not.
            pin_memory: Page-lock batches, where there is a CUDA device.
            data_sampler: Decides the order instead.
            collate_fn: Samples into a batch; that of `initialize` where it is None.
            num_local_io_workers: Processes that load; None loads in this one.
        """
        return make_loader(
            dataset,
            batch_size=batch_size or self.batches.micro_batch_size,
            drop_last=self.config.dataloader_drop_last,
            collate_fn=collate_fn or self.collate_fn,
            route=route,
            sampler=data_sampler,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            group=self.core.options.group,
        )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.core.accelerator.device

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.batches.world_size

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """Stepped after every applied update; may be replaced."""
        return self._steps.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        self._steps.scheduler = scheduler

    @property
    def global_steps(self) -> int:
        """Updates so far, skipped ones included."""
        return self._steps.global_steps

    @property
    def global_samples(self) -> int:
        """Samples that they had."""
        return self._steps.global_samples

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` so far."""
        return self._steps.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Updates skipped since a gradient was not finite."""
        return self.core.skipped_steps

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; 1 without fp16."""
        return self.core.options.loss_scale.value

    @property
    def ledger(self) -> Ledger:
        """Every byte that forebay placed."""
        return self.core.ledger

    def mean_over_ranks(self, value: float) -> float:
        """The mean of a number over all ranks, in rank order; all of them call it together."""
        return self.core.ranks.mean(value)

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage asked for."""
        return self.config.zero.stage

    def fp16_enabled(self) -> bool:
        """Whether working weights are float16."""
        return self.config.precision.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether working weights are bfloat16."""
        return self.config.precision.dtype == "bfloat16"

    def gradient_clipping(self) -> float:
        """Bound on the global gradient norm; 0 does not clip."""
        return self.core.terms.clip_norm or 0.0

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last update's gradient before clipping; None before the first."""
        return self.optimizer.last_grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights; False inside a window too."""
        return self._steps.applied

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; a schedule sets it again after the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Betas of each group."""
        return [group["betas"] for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Kind of each group, where the user named one."""
        return [group.get("type") for group in self.optimizer.param_groups]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state, after the barrier."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's weights; masters follow those that change at the next step."""
        return self.module.load_state_dict(*args, **kwargs)

    def empty_partition_cache(self) -> None:
        """Give cached device memory back to the driver; no parameter is cached in one process."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until all updates are done and all weights are new."""
        self.core.synchronize()

    def close(self) -> None:
        """Give all memory back; the module keeps its newest weights. Idempotent."""
        self._progress.close()
        try:
            self.checkpoints.wait_for_checkpoint()
        finally:
            self.optimizer.close()

    def destroy(self) -> None:
        """DeepSpeed's name for `close`."""
        self.close()

    def __enter__(self) -> TrainingEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Forward what the engine does not have to the module.

        A method of DeepSpeed's engine that is not there yet raises when it is called, so that
        `hasattr` answers as a script expects.
        """
        if name in NOT_YET:
            return refusal(name)
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its {type(module).__name__} has an attribute {name!r}"
            ) from None
