"""The configuration that a setup asks for: JSON that `forebay.initialize` accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.setup import CHECKPOINT_BYTES, Home
from forebay.plan.workload import Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.setup import Setup

__all__ = ["not_built", "ready_config"]

# Where state on drives goes; a local drive, never a network disk.
_NVME_PATH = "/local_nvme"


def not_built(setup: Setup) -> str:
    """What of a setup this version does not run; empty where it runs all of it.

    Example:
        >>> from forebay.plan.workload import Workload
        >>> not_built(
        ...     Setup(stage=3, optimizer=Home.HOST, weights=Home.NVME, workload=Workload())
        ... )
        'weights on drives beside state in memory'
    """
    if not setup.workload.state.built:
        return f"the optimizer {setup.workload.optimizer}"
    if setup.weights is Home.NVME and setup.optimizer is not Home.NVME:
        return "weights on drives beside state in memory"
    return ""


def ready_config(
    setup: Setup,
    *,
    places: Sequence[UpdatePlace] = (),
    host_share: float = 1.0,
    learning_rate: float = 1e-5,
) -> dict[str, Any]:
    """A configuration in DeepSpeed's form.

    Args:
        setup: The recommended one.
        places: Where its units update; none where the state has one place.
        host_share: Of the state, where the rest stays on the device.
        learning_rate: A start; the right one is the user's to know.

    Raises:
        ConfigError: forebay does not run the optimizer.

    Example:
        >>> from forebay.plan.workload import Workload
        >>> setup = Setup(
        ...     stage=2, optimizer=Home.HOST, weights=Home.DEVICE, workload=Workload()
        ... )
        >>> ready_config(setup)["zero_optimization"]
        {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}
    """
    work = setup.workload
    if not work.state.built:
        raise ConfigError(
            f"forebay does not run the optimizer {work.optimizer} yet: there is no configuration "
            "to write",
            hint="plan with --optimizer adamw or adam for one",
        )
    config: dict[str, Any] = {
        "train_batch_size": work.micro_batch * work.accumulation * setup.ranks,
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": work.state.built, "params": {"lr": learning_rate}},
        "zero_optimization": _zero(setup, host_share),
    }
    if work.precision is Precision.BF16:
        config["bf16"] = {"enabled": True}
    elif work.precision is Precision.FP16:
        config["fp16"] = {"enabled": True}
    own: dict[str, Any] = {}
    if setup.host_budget is not None:
        saving = CHECKPOINT_BYTES * setup.cluster.devices_per_node
        own["host_budget"] = f"{(setup.host_budget + saving) >> 20}MiB"
    if places:
        visits = [i for i, place in enumerate(places) if place is UpdatePlace.STREAMED]
        own["streamed_units"] = visits
    if work.order is AccumulationOrder.LAYER:
        own["accumulation_order"] = work.order.value
    return config | ({"forebay": own} if own else {})


def _zero(setup: Setup, host_share: float) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.stage}
    for key, home in (("offload_optimizer", setup.optimizer), ("offload_param", setup.weights)):
        if home is Home.HOST:
            zero[key] = {"device": "cpu"}
        elif home is Home.NVME:
            zero[key] = {"device": "nvme", "nvme_path": _NVME_PATH}
    if setup.host_budget is not None:
        zero["offload_optimizer"]["ratio"] = 1.0  # what stays in memory is updated there
    if host_share < 1:
        zero["offload_optimizer"]["ratio"] = round(host_share, 6)
    if setup.weights is Home.NVME:
        zero["offload_param"]["max_in_cpu"] = setup.weights_in_memory
    return zero
