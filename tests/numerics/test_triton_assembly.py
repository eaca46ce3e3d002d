"""The compiled kernels contain no instruction that would change a bit; needs Triton, no GPU."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton", minversion="3.3")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from forebay.optim import triton_kernels as kernels  # noqa: E402

KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "int16"}


def assembly(kernel, signature: dict[str, str], constants: dict[str, object], arch: int) -> str:
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=kernels.LAUNCH_OPTIONS).asm["ptx"]


def floating_point(text: str) -> set[str]:
    """The floating-point instructions, such as `add.rn.f32`."""
    return set(re.findall(r"\b((?:\w+\.)*(?:f32|f64))\b", text))


def assert_exact(text: str) -> None:
    names = floating_point(text)
    assert not [name for name in names if "ftz" in name or "approx" in name or name[:3] == "fma"]
    for name in names:
        if name.split(".")[0] in {"add", "sub", "mul", "div", "sqrt"}:
            assert ".rn." in name, name


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", [*KINDS.values(), "float64"])
def test_square_sums_add_and_multiply_apart(kind, arch):
    text = assembly(
        kernels.block_sums_kernel,
        {"table": "*i64", "rows": "i32"},
        {"capacity": 16, "kind": getattr(triton.language, kind), "aligned": True},
        arch,
    )
    assert_exact(text)
    assert "add.rn.f64" in floating_point(text)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("layout", ["whole", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_round_every_operation(kind, layout, arch):
    roles = {"table": "*i64", "rows": "i32"}
    roles |= dict.fromkeys(("numbers", "scale", "exp_avg", "exp_avg_sq"), "*fp32")
    constants = {
        "capacity": 16,
        "kind": getattr(triton.language, KINDS[kind]),
        "aligned": True,
        "compiled": True,
    }
    if layout == "split":
        roles |= {"high": "*i16", "low": "*i16"}
        constants |= {"out": None}
    else:
        roles |= {"high": "*fp32", "out": "*i16" if kind == "bf16" else f"*{kind}"}
        constants |= {"low": None}
    text = assembly(kernels.update_kernel, roles, constants, arch)
    assert_exact(text)
    assert {"sqrt.rn.f32", "div.rn.f32"} <= floating_point(text)
