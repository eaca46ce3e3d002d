"""Optimizers under DeepSpeed's names, and how any accepted optimizer becomes an update rule.

`DeepSpeedCPUAdam` and `FusedAdam` carry hyperparameters only: where the update runs is the
placement's decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.compat.inputs import chosen_parameters, class_name
from forebay.errors import ConfigError, UnsupportedError
from forebay.optim.rule import AdamRule, WeightDecay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from forebay.config.resolved import OptimizerSpec

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "adam_from", "build_optimizer"]


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam's hyperparameters under the name that scripts for CPU offload import.

    Args:
        model_params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Must be True.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        amsgrad: Must be False.
        adamw_mode: Decoupled weight decay (AdamW), as in DeepSpeed the default.
        fp32_optimizer_states: Must be True.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        for name, value, needed in (
            ("bias_correction", bias_correction, True),
            ("amsgrad", amsgrad, False),
            ("fp32_optimizer_states", fp32_optimizer_states, True),
        ):
            if value is not needed:
                raise UnsupportedError(f"{name}={value} is not supported", hint=f"use {needed}")
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
        # torch says so in the groups too, but its Adam takes the argument from torch 2.7 on only
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adamw_mode
        self.adamw_mode = adamw_mode


class FusedAdam(DeepSpeedCPUAdam):
    """Adam's hyperparameters under the name that scripts for GPUs import.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Must be True.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Decoupled weight decay (AdamW).
        weight_decay: Weight decay.
        amsgrad: Must be False.
        set_grad_none: Accepted; `zero_grad` always sets gradients to None.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adamw_mode=adam_w_mode,
        )


def adam_from(optimizer: torch.optim.Optimizer) -> AdamRule:
    """The update rule of an optimizer that a caller built.

    Raises:
        UnsupportedError: It is neither torch's Adam or AdamW nor one of the classes here.
    """
    if type(optimizer) in {DeepSpeedCPUAdam, FusedAdam}:
        assert isinstance(optimizer, DeepSpeedCPUAdam)
        kind = WeightDecay.DECOUPLED if optimizer.adamw_mode else WeightDecay.L2
        rule = AdamRule(kind)
        for group in optimizer.param_groups:
            rule.validate(group)
        return rule
    return AdamRule.of(optimizer)


def build_optimizer(
    model: nn.Module,
    *,
    given: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    parameters: Iterable[Any] | None,
    spec: OptimizerSpec | None,
) -> torch.optim.Optimizer:
    """The optimizer that carries groups and hyperparameters.

    Args:
        model: The model.
        given: The caller's optimizer, which decides alone what is trained; or a function or class
            that makes one.
        parameters: The caller's parameters or groups, where no optimizer was given.
        spec: The configuration's optimizer.

    Raises:
        ConfigError: Neither the caller nor the configuration names one, there is nothing to
            train, or a group brings a weight decay of which nobody said the kind.
    """
    if isinstance(given, torch.optim.Optimizer):
        _refuse_foreign(given, model)
        return given
    chosen = chosen_parameters(model, parameters)
    if given is not None:
        made = given(chosen)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"the optimizer function {class_name(given)} returned {type(made).__name__}, not a "
                "torch.optim.Optimizer",
                hint="lambda params: torch.optim.AdamW(params, lr=...)",
            )
        return made
    if spec is None:
        raise ConfigError(
            "no optimizer: neither initialize(optimizer=...) nor the configuration's optimizer "
            "section names one",
            hint='add "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}',
        )
    own_decay = any(isinstance(g, dict) and g.get("weight_decay") for g in chosen)
    if own_decay and not spec.is_decay_mode_chosen:
        raise ConfigError(
            "a parameter group has a weight_decay, but optimizer.type Adam does not say of which "
            "kind",
            hint="use AdamW (decoupled), or Adam with adam_w_mode: false (L2)",
        )
    kind = torch.optim.AdamW if spec.name == "AdamW" else torch.optim.Adam
    return kind(chosen, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


def _refuse_foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """An optimizer over another model's parameters would train nothing, silently."""
    own = {id(param) for param in model.parameters()}
    if any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    raise ConfigError(
        f"none of the optimizer's {count} parameters is one of the model's",
        hint="build it over the parameters of the model that initialize gets, after any copy",
    )
