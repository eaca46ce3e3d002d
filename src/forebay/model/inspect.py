"""From an `nn.Module` and its optimizer's groups to a `ModelSpec` and the parameters behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.errors import UnsupportedError
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.model.units import UnitMembers, units_by_blocks, units_by_size
from forebay.model.whole import whole_modules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DTYPES", "InspectedModel", "inspect_model", "names_and_owners", "refuse_wrapped"]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
OUTSIDE = "outside the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedModel:
    """A model seen through forebay's eyes.

    Attributes:
        spec: Units and parameters as values.
        params: The parameters, by `ParamSpec.index`, trained ones first.
        owners: For each of them, the modules that hold it directly (several when tied).
        frozen: Units that are not trained and come and go; see `forebay.model.frozen`.
        order: All units in module order; the indices of frozen ones follow the others'.
    """

    spec: ModelSpec
    params: tuple[nn.Parameter, ...]
    owners: tuple[tuple[nn.Module, ...], ...]
    frozen: ModelSpec
    order: tuple[int, ...]


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse models that another engine has already taken over.

    Raises:
        UnsupportedError: DDP, FSDP, DTensor parameters, or a model compiled as a whole.
    """
    kind = type(model).__name__
    if kind in {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}:
        raise UnsupportedError(
            f"the model is wrapped by {kind}",
            hint="pass the module inside (model.module); forebay does the data parallelism",
        )
    if any(cls.__name__ == "FSDPModule" for cls in type(model).__mro__):
        raise UnsupportedError(
            "the model was given to fully_shard (FSDP2)",
            hint="pass the model before fully_shard; forebay shards it by zero_optimization.stage",
        )
    if kind == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            "the whole model was compiled before it was given to forebay, so that no hook of "
            "forebay's would fire",
            hint="compile its blocks before initialize()/offload(); all of it may be compiled "
            "afterwards where weights stay on the device",
        )
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise UnsupportedError(
                f"parameter {name} has no shape yet: its module is lazy",
                hint="run one forward first, so that lazy modules take their shapes",
            )
        if type(param.data).__name__ == "DTensor":
            raise UnsupportedError(
                f"parameter {name} is a DTensor",
                hint="pass the plain model; forebay shards it by zero_optimization.stage",
            )
    refuse_meta(model)


def refuse_meta(model: nn.Module) -> None:
    """Refuse what is on the meta device and has no values to come.

    Raises:
        UnsupportedError: There is such a parameter or buffer.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UnsupportedError(
                f"{kind} {name} is on the meta device and has no values",
                hint="forebay.zero.weights_from(model, folder) reads parameters from safetensors "
                "files; give buffers their values before, or use model.to_empty(device='cpu') and "
                "load_state_dict",
            )


def _dtype_name(param: nn.Parameter, name: str, cast_to: torch.dtype | None) -> str:
    cast = cast_to is not None and param.dtype is torch.float32
    try:
        return DTYPES[cast_to if cast and cast_to is not None else param.dtype]
    except KeyError:
        raise UnsupportedError(
            f"parameter {name} has dtype {param.dtype}",
            hint="trained parameters are float32, bfloat16 or float16; freeze or convert it",
        ) from None


def _refuse_shared_memory(
    model: nn.Module, trained: Mapping[int, nn.Parameter], names: Mapping[int, list[str]]
) -> None:
    """Two parameters over the same bytes would silently part when one of them moves."""
    at: dict[tuple[torch.device, int], int] = {}
    everything = {id(t): t for t in [*model.parameters(), *model.buffers(), *trained.values()]}
    for key, tensor in everything.items():
        if not tensor.numel() or tensor.is_meta or type(tensor.data) is not torch.Tensor:
            continue
        if key in trained and tensor.numel() > 1 and not any(tensor.stride()):
            raise UnsupportedError(
                f"parameter {names.get(key, ['?'])[0]} has no value: all of it is one element, as "
                "an engine leaves weights that were spread over ranks when it is closed",
                hint="build the model again, and load a checkpoint or a state dict",
            )
        other = at.setdefault((tensor.device, tensor.data_ptr()), key)
        if other != key and (key in trained or other in trained):
            first, second = (
                names.get(k, ["a buffer or outside parameter"])[0] for k in (other, key)
            )
            raise UnsupportedError(
                f"{first} and {second} share memory but are two tensors",
                hint="tie weights by assigning the Parameter itself: a.weight = b.weight",
            )


def names_and_owners(
    model: nn.Module,
) -> tuple[dict[int, list[str]], dict[int, list[nn.Module]]]:
    """By the `id` of each parameter, all its names and the modules that hold it directly."""
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(param), []).append(f"{prefix}.{name}" if prefix else name)
            owners.setdefault(id(param), []).append(module)
    return names, owners


def inspect_model(
    model: nn.Module,
    *,
    groups: Sequence[dict[str, Any]],
    unit_elements: int | None = None,
    whole: Sequence[nn.Module] = (),
    cast_to: torch.dtype | None = None,
) -> InspectedModel:
    """Find the trained parameters, their units and their owners.

    Args:
        model: The model as the user made it.
        groups: The optimizer's parameter groups; they decide what is trained and may interleave.
        unit_elements: Elements per unit; None lets units follow the module tree.
        whole: Modules whose parameters must stay in one unit, beside those that are marked
            (`forebay.model.whole`).
        cast_to: What float32 parameters will become; None leaves them.

    Raises:
        UnsupportedError: Wrapped models, foreign dtypes, memory that two parameters share.
    """
    refuse_wrapped(model)
    names, owners = names_and_owners(model)
    group_of: dict[int, int] = {}
    given: dict[int, nn.Parameter] = {}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param.requires_grad:
                group_of[id(param)] = index
                given[id(param)] = param
    trained = set(group_of)
    _refuse_shared_memory(model, given, names)
    kept = [*whole, *whole_modules(model)]
    if unit_elements is None:
        units = units_by_blocks(model, trained=trained, whole=kept)
    else:
        units = units_by_size(model, trained=trained, unit_elements=unit_elements, whole=kept)
    inside = {id(p) for unit in units for p in unit.params}
    outside = [param for key, param in given.items() if key not in inside]
    if not inside:
        in_model = sum(1 for _ in model.parameters())
        raise UnsupportedError(
            f"none of the optimizer's {sum(len(group['params']) for group in groups)} parameters "
            f"is a trainable one of the model's {in_model}",
            hint="build the optimizer from this model's parameters, and leave some unfrozen",
        )
    if outside:
        units.append(UnitMembers(OUTSIDE, outside))
    specs: list[UnitSpec] = []
    params: list[nn.Parameter] = []
    for unit in units:
        members = []
        for param in unit.params:
            index = len(params)
            known = tuple(names.get(id(param), [f"{OUTSIDE}[{index}]"]))
            members.append(
                ParamSpec(
                    index=index,
                    names=known,
                    shape=tuple(param.shape),
                    dtype=_dtype_name(param, known[0], cast_to),
                    group=group_of[id(param)],
                )
            )
            params.append(param)
        specs.append(UnitSpec(name=unit.name, params=tuple(members)))
    return InspectedModel(
        spec=ModelSpec(units=tuple(specs)),
        params=tuple(params),
        owners=tuple(tuple(owners.get(id(p), ())) for p in params),
        frozen=ModelSpec(units=()),
        order=tuple(range(len(specs))),
    )
