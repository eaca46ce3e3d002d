"""What scripts do whose ranks hold copies of the state, by configuration or by a mesh."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forebay
from distributed import scripts
from distributed.training import digest


def _mesh(how: str) -> DeviceMesh:
    if how == "mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if how == "other meshes":  # whose groups torch would wait for in vain
        rows = [[0, 1, 2, 3]] if os.environ["RANK"] == "1" else [[0, 1], [2, 3]]
        return DeviceMesh("cpu", rows, _init_backend=False)
    return DeviceMesh("cpu", [[0, 3], [1, 2]] if how == "crossed mesh" else [[3, 2], [1, 0]])


def copies(how: str, folder: str) -> dict[str, Any]:
    """Two copies of the state, each over two ranks."""
    torch.manual_seed(1)
    settings, mesh = scripts.config(3), None
    if how == "mics":
        settings["zero_optimization"]["mics_shard_size"] = 2
    else:
        torch.distributed.init_process_group("gloo")
        mesh = _mesh(how)
    with forebay.initialize(model=scripts.mlp(), config=settings, mesh_param=mesh)[0] as engine:
        scripts.steps(engine, 2)
        group = engine.core.options.group
        engine.save_checkpoint(folder)
        weights = digest(list(engine.state_dict().values()))
        scripts.steps(engine, 1)
        engine.load_checkpoint(folder)
        assert digest(list(engine.state_dict().values())) == weights
        return {"sharers": tuple(group.sharers), "weights": weights}


def meshes() -> list[set[str]]:
    """By stage and place: what was trained without a mesh, and with one of two copies."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for stage in (0, 1, 2, 3):
        for place in ("none", "cpu"):
            settings = scripts.config(stage)
            settings["zero_optimization"]["offload_optimizer"]["device"] = place
            trained = set()
            for shape in (None, mesh):
                torch.manual_seed(1)
                model = scripts.mlp()
                engine, *_ = forebay.initialize(model=model, config=settings, mesh_param=shape)
                with engine:
                    scripts.steps(engine, 3)
                    trained.add(digest(list(engine.state_dict().values())))
            found.append(trained)
    return found
