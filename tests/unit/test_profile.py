"""Profiles: whole round trips, and every wrong file refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import forebay
from forebay.compat.watching import measured_profile
from forebay.errors import ConfigError, ForebayWarning
from forebay.hardware.profile import (
    Drives,
    LayerRates,
    LinkRates,
    Machine,
    MatrixRate,
    Network,
    Node,
    Profile,
    ThreadRate,
    load_profile,
    read_profile,
)
from forebay.hardware.rates import PassRate, PassSeconds, System

_KINDS = ("norm", "fused_norm", "rotation", "activation", "attention", "loss")


def _layer(dtype: str) -> LayerRates:
    return LayerRates(
        dtype=dtype,
        **dict.fromkeys(_KINDS, PassRate(forward=3e12, backward=2e12)),
        issue=PassSeconds(forward=1e-3, backward=2e-3),
    )


def _profile(**changes) -> Profile:
    values = {
        "machine": Machine.read("cpu"),
        "forebay": "0",
        "kernel_level": "avx2",
        "threads": (
            ThreadRate(threads=1, update=10e9, copy=9e9),
            ThreadRate(threads=2, update=18e9, copy=19e9),
        ),
        "link": LinkRates(
            up=8e9,
            down=9e9,
            both=10e9,
            beside_update=5e9,
            update_beside=14e9,
            down_beside_update=4e9,
            update_beside_down=15e9,
        ),
    }
    return Profile(**{**values, **changes})


def _written(tmp_path, data) -> str:
    path = tmp_path / "profile.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return str(path)


def test_a_profile_comes_back_equal(tmp_path):
    full = _profile(
        matrix=(MatrixRate(dtype="bfloat16", size=4096, flops=8e14),),
        device_memory=4e12,
        layer=_layer("bfloat16"),
        node=Node(devices=2, cores=4, device_bytes=1 << 34, host_bytes=1 << 36, uplinks=1),
        drives=Drives(count=2, capacity_bytes=10**12, read=5e9, write=3e9),
        network=Network(inside=2e11, across=None),
        # Where nothing may be locked.
        system=System(huge_pages="never", direct_storage="missing", memlock_bytes=0),
    )
    for profile in (_profile(), full):
        path = _written(tmp_path, profile.as_json())
        assert load_profile(path, device="cpu") == profile
        assert read_profile(path) == profile


def test_rates_are_the_best_that_was_seen():
    rates = _profile().rates()
    assert (rates.host_memory, rates.update) == (19e9, 18e9)
    assert (rates.link_up, rates.link_down) == (8e9, 9e9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "version 99, and this forebay reads version 3"),
        ({"surprise": 1}, "surprise is not known"),
        ({"threads": []}, "at least one entry"),
        ({"threads": [{"threads": 1, "update": -1.0, "copy": 1.0}]}, "update is -1.0"),
        ({"link": {"up": 1.0}}, "is missing"),
        ({"link": 3}, "must be an object"),
        ({"device_memory": float("inf")}, "device_memory is inf; .* between 100000 and 1e\\+18"),
        ({"node": {"devices": 1.5}}, "node: cores is missing"),
        ({"drives": {"count": 0.5, "capacity_bytes": 1, "read": 1, "write": 1}}, "count is 0.5"),
        ({"matrix": [{"dtype": 3, "size": 1, "flops": 1}]}, r"matrix\[0\]: dtype is 3; .* text"),
        ({"machine": {"cpu": "Other", "cpus": 3, "device": "GPU"}}, "another machine: cpu 'Other'"),
    ],
    ids=str,
)
def test_wrong_files_are_refused(tmp_path, change, words):
    data = json.loads(_profile().as_json()) | change
    with pytest.raises(ConfigError, match=words):
        load_profile(_written(tmp_path, data), device="cpu")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("layer", "loss", "backward"), 1e-9, "layer: loss: backward is 1e-09; .* 100000 and"),
        (("layer", "issue", "forward"), 1e12, "layer: issue: forward is .* 1e-09 and 100"),
        (("layer", "norm", "forward"), float("nan"), "norm: forward is nan; .* 100000 and"),
        (("layer", "dtype"), "float16", r"layer: dtype is 'float16'; .* matrix \(float32\)"),
        (("matrix", 1, "size"), 64, r"matrix\[1\]: size is 64, after 128 of float32"),
        (("link", "up"), 1e-300, "link: up is 1e-300; .* 100000 and"),
        (("drives", "both"), 9e9, "drives: both is 9e[+]09; it must be at most 8e[+]09"),
        (("corrections", "compute"), 1e9, "compute is .* between 0.0001 and 10000"),
        (("node", "devices"), 10**12, "devices is 10+; .* between 1 and 1e[+]06"),
    ],
    ids=str,
)
def test_an_absurd_number_is_named_with_its_range(tmp_path, path, value, words):
    profile = _profile(
        matrix=tuple(MatrixRate(dtype="float32", size=size, flops=1e12) for size in (128, 256)),
        layer=_layer("float32"),
        node=Node(devices=2, cores=4, device_bytes=1 << 34, host_bytes=1 << 36, uplinks=1),
        drives=Drives(count=2, capacity_bytes=10**12, read=5e9, write=3e9, both=6e9),
    )
    data = json.loads(profile.as_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError, match=words):
        read_profile(_written(tmp_path, data))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 3}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"profile .*(not JSON|no version|is missing)"):
        load_profile(_written(tmp_path, text), device="cpu")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json", device="cpu")


def test_the_configuration_names_one(tmp_path):
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    path = _written(tmp_path, _profile().as_json())
    engine, *_ = forebay.initialize(
        model=nn.Linear(2, 2), config=config | {"forebay": {"profile": path}}
    )
    with engine:
        assert engine.core.options.rates == _profile().rates()
    other = _written(tmp_path, _profile(machine=Machine(cpu="x", cpus=1, device="cpu")).as_json())
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="another machine"):
        forebay.initialize(model=model, config=config | {"forebay": {"profile": other}})


def test_a_run_whose_torch_has_other_threads_than_were_measured_is_warned(tmp_path):
    def _loaded(threads):
        system = System(huge_pages="never", direct_storage="missing", torch_threads=threads)
        path = _written(tmp_path, _profile(system=system).as_json())
        return measured_profile(SimpleNamespace(profile=path), device="cpu")

    here = torch.get_num_threads()
    words = rf"with {here + 1} threads, and here it does with {here}"
    with pytest.warns(ForebayWarning, match=words):
        assert _loaded(here + 1).system.torch_threads == here + 1
    assert _loaded(here).system.torch_threads == here  # a warning would be an error
    data = json.loads(_profile(system=System(huge_pages="x", direct_storage="missing")).as_json())
    del data["system"]["torch_threads"]  # as profiles were written before
    assert read_profile(_written(tmp_path, json.dumps(data))).system.torch_threads is None
