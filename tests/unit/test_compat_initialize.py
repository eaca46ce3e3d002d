"""What `initialize` takes, and what it refuses before a bit of the model is touched."""

from __future__ import annotations

import argparse
import base64
import copy
import json

import pytest
import torch
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

import forebay
from compat_cases import ON_HOST, engine_of, same, small, train, weights
from forebay.errors import ConfigError
from forebay.ops.adam import DeepSpeedCPUAdam, FusedAdam

DATA = torch.utils.data.TensorDataset(torch.arange(10.0).unsqueeze(1))


def test_the_result_has_deepspeed_s_order():
    model = small()
    result = forebay.initialize(None, model, None, model.parameters(), config=ON_HOST)
    engine, optimizer, loader, scheduler = result
    with engine:
        assert engine.module is model
        assert engine.optimizer is optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert (loader, scheduler) == (None, None)
        assert (engine.training_dataloader, engine.lr_scheduler) == (None, None)


@pytest.mark.parametrize("form", ["dict", "path", "pathlib", "base64", "args", "config_params"])
def test_forms_of_the_configuration(form, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ON_HOST))
    arguments = {
        "dict": {"config": ON_HOST},
        "path": {"config": str(path)},
        "pathlib": {"config": path},
        "base64": {"config": base64.b64encode(json.dumps(ON_HOST).encode()).decode()},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "config_params": {"config_params": ON_HOST},
    }[form]
    before = copy.deepcopy(ON_HOST)
    engine, *_ = forebay.initialize(model=small(), **arguments)
    with engine:
        assert engine.get_lr() == [0.01]
        assert engine.train_batch_size() == 4
    assert before == ON_HOST


def test_the_log_has_the_configuration_that_runs_and_says_what_changes_nothing(caplog):
    caplog.set_level("INFO", logger="forebay")
    engine_of({**ON_HOST, "dump_state": True}).close()
    [said] = [r.message for r in caplog.records if "configuration that runs" in r.message]
    assert "gradient_clipping" in said
    assert "changes nothing: the resolved configuration is always logged" in said


def test_arguments_of_a_command_line(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ON_HOST))
    parser = argparse.ArgumentParser()
    assert forebay.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine, *_ = forebay.initialize(args=args, model=small())
    engine.close()
    assert not parser.parse_args([]).deepspeed
    with pytest.raises(ConfigError, match="no configuration is given"):
        forebay.initialize(args=parser.parse_args([]), model=small())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: AdamW(params, lr=1e-2, weight_decay=0.1),
        AdamW,
        FusedAdam,
        DeepSpeedCPUAdam,
        lambda params: Adam(params, lr=1e-2),
    ],
    ids=["function", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "Adam"],
)
def test_an_optimizer_and_what_makes_one_train_alike(optimizer):
    model = small()
    made, given = engine_of(optimizer=optimizer), None
    given = engine_of(model=model, optimizer=optimizer(model.parameters()))
    assert train(made) == train(given)
    assert same(weights(made), weights(given))
    made.close()
    given.close()


def test_the_configuration_s_optimizer_is_torch_s():
    """`Adam` is L2, `AdamW` decoupled, whoever builds it; losses differ between the two."""
    for name, kind in (("Adam", Adam), ("AdamW", AdamW)):
        params = {"lr": 1e-2, "weight_decay": 0.1}
        own = params | ({"adam_w_mode": False} if name == "Adam" else {})
        configured = engine_of({"optimizer": {"type": name, "params": own}})
        model = small()
        built = engine_of(model=model, optimizer=kind(model.parameters(), **params))
        assert train(configured) == train(built)
        configured.close()
        built.close()


def test_groups_keep_their_order_and_options():
    model = small()
    groups = [
        {"params": (p for p in model[2].parameters()), "lr": 0.3, "weight_decay": 0.0},
        {"params": [model[0].weight], "weight_decay": 0.2},
        {"params": [model[0].bias], "eps": 1e-6},
    ]
    with engine_of(model=model, model_parameters=iter(groups)) as engine:
        found = engine.optimizer.param_groups
        assert [group["lr"] for group in found] == [0.3, 0.01, 0.01]
        assert [group["weight_decay"] for group in found] == [0.0, 0.2, 0.1]
        assert [group["eps"] for group in found] == [1e-8, 1e-8, 1e-6]
        assert [
            [p is q for p, q in zip(a["params"], b, strict=True)]
            for a, b in zip(
                found,
                ([model[2].weight, model[2].bias], [model[0].weight], [model[0].bias]),
                strict=True,
            )
        ] == [[True, True], [True], [True]]
        assert engine.get_lr() == [0.3, 0.01, 0.01]


def test_model_parameters_choose_what_is_trained():
    model = small()
    before = model[0].weight.detach().clone()
    with engine_of(model=model, model_parameters=model[2].parameters()) as engine:
        train(engine, 2)
    assert torch.equal(model[0].weight.cpu(), before)
    named = small()
    with engine_of(model=named, model_parameters=named.named_parameters()) as engine:
        train(engine, 2)
    assert not torch.equal(named[0].weight.cpu(), before)


def test_a_scheduler_object_a_function_and_a_section_agree():
    def curve(step: int) -> float:
        return min(step / 4, 1.0)

    model = small()
    own = AdamW(model.parameters(), lr=1e-2)
    built = engine_of(model=model, optimizer=own, lr_scheduler=LambdaLR(own, curve))
    made = engine_of(
        optimizer=lambda params: AdamW(params, lr=1e-2),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, curve),
    )
    section = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    configured = engine_of(section)
    assert [engine.get_lr() for engine in (built, made, configured)] == [[0.0]] * 3
    assert train(built) == train(made) == train(configured)
    assert same(weights(built), weights(made))
    assert same(weights(built), weights(configured))
    assert built.get_lr() == made.get_lr() == configured.get_lr() == [1e-2]
    for engine in (built, made, configured):
        assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        engine.close()


def test_the_first_update_uses_the_schedule_s_first_value():
    """A warm-up from 0 changes no weight in the first update, and does in the second."""
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    no_decay = {"optimizer": {"params": {"weight_decay": 0.0}}}
    with engine_of(section | no_decay) as engine:
        before = weights(engine)
        train(engine, 1)
        assert same(before, weights(engine))
        train(engine, 1)
        assert not same(before, weights(engine))


def test_training_data_becomes_a_loader_of_micro_batches():
    def collate(samples):
        return [x for (x,) in samples]

    torch.manual_seed(3)
    engine, _, loader, _ = forebay.initialize(
        model=small(), config=ON_HOST, training_data=DATA, collate_fn=collate
    )
    with engine:
        assert engine.training_dataloader is loader
        found = list(loader)
        assert [len(batch) for batch in found] == [4, 4, 2]
        values = [float(x) for batch in found for x in batch]
        assert sorted(values) == list(range(10)) != values
        held_out = engine.deepspeed_io(DATA, route="eval", batch_size=3)
        assert [len(batch) for batch in held_out] == [3, 3, 3, 1]
        assert [float(x) for batch in held_out for x in batch] == list(range(10))
        sampler = torch.utils.data.SequentialSampler(range(6))
        picked = engine.deepspeed_io(DATA, data_sampler=sampler, collate_fn=len)
        assert list(picked) == [4, 2]
        with pytest.raises(ConfigError, match="route is 'test'"):
            engine.deepspeed_io(DATA, route="test")


def test_an_incomplete_last_batch_can_be_dropped_and_streams_are_read_in_order():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(9))

    raw = ON_HOST | {"dataloader_drop_last": True}
    engine, _, loader, _ = forebay.initialize(model=small(), config=raw, training_data=DATA)
    with engine:
        assert [len(batch) for (batch,) in loader] == [4, 4]
    engine, _, loader, _ = forebay.initialize(model=small(), config=raw, training_data=Stream())
    with engine:
        assert torch.cat(list(loader)).tolist() == list(range(8))
    endless = iter(forebay.utils.RepeatingLoader(loader))
    assert [next(endless)[0].item() for _ in range(3)] == [0, 4, 0]


@pytest.mark.parametrize(
    ("dtype", "section", "trains_in"),
    [
        (torch.float32, "bf16", torch.bfloat16),
        (torch.float32, "fp16", torch.float16),
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float16, None, torch.float16),
        (torch.float16, "bf16", None),
        (torch.bfloat16, "fp16", None),
    ],
)
def test_precision_of_the_model_and_of_the_configuration(dtype, section, trains_in):
    model = small(dtype)
    raw = {section: {"enabled": True}} if section else {}
    if trains_in is None:
        before = copy.deepcopy(dict(model.state_dict()))
        with pytest.raises(ConfigError, match="and the configuration trains in"):
            engine_of(raw, model=model)
        assert same(before, dict(model.state_dict()))
        return
    with engine_of(raw, model=model) as engine:
        assert {param.dtype for param in model.parameters()} == {trains_in}
        assert engine.loss_scale == (65536.0 if trains_in is torch.float16 else 1.0)
        train(engine, 2)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but WORLD_SIZE is not set"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "two"}, "'two', which is no number"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK is '2' and WORLD_SIZE 2",
        ),
    ],
)
def test_missing_variables_of_torchrun_are_named(monkeypatch, variables, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        forebay.initialize(model=small(), config=ON_HOST)
    with pytest.raises(ConfigError, match=says):
        forebay.init_distributed()


def test_a_world_of_one_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    engine_of().close()


def test_a_group_of_one_for_scripts_that_ask_their_rank():
    from torch import distributed

    forebay.init_distributed(dist_init_required=False)
    assert not distributed.is_initialized()
    try:
        engine, *_ = forebay.initialize(model=small(), config=ON_HOST, dist_init_required=True)
        engine.close()
        assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
        forebay.init_distributed(dist_backend="gloo")  # there is one already
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
