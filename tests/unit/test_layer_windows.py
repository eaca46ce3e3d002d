"""Windows at once: the same training in either order, and what is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compat_cases import batches, engine_of, loss_of, same, small, weights
from forebay.accelerators.cpu import CpuAccelerator
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.engine import doors
from forebay.engine.doors import Door
from forebay.engine.layer_order import LayerOrder
from forebay.engine.turns import Turns
from forebay.errors import ConfigError, GradientError, UnsupportedError
from forebay.model.stack import find_stack
from forebay.plan import Lane, UpdatePlace
from forebay.plan.placement import AccumulationOrder
from unit.engine_cases import loss_of as mean_square
from unit.engine_cases import offloaded
from unit.streaming_cases import AWAY, BLOCK, deep, inputs

BY_LAYER = AccumulationOrder.LAYER
LAYER = {"gradient_accumulation_steps": 3, "forebay": {"accumulation_order": "layer"}}
USUAL = {"gradient_accumulation_steps": 3}


def _engine(config=None, model=None, **more):
    return engine_of({**(config or LAYER), **more}, model=model)


def test_train_batch_is_the_loop_in_either_order():
    with _engine(USUAL) as loop, _engine(USUAL) as usual, _engine(LAYER) as layer:
        for seed in range(4):
            for x in batches(3, seed=seed):
                loop.backward(loss_of(loop, x))
                loop.step()
            for engine in (usual, layer):
                given = iter(batches(5, seed=seed))
                engine.train_batch(given, partial(loss_of, engine))
                assert len(list(given)) == 2  # it is left where the window ends
        assert same(weights(loop), weights(usual))
        assert same(weights(loop), weights(layer))
        for engine in (usual, layer):
            assert engine.get_global_grad_norm() == loop.get_global_grad_norm()
            assert (engine.global_steps, engine.micro_steps) == (4, 12)
            assert engine.global_samples == loop.global_samples == 48


def test_what_is_left_at_the_end_is_averaged_over_itself():
    with _engine(USUAL) as loop, _engine(LAYER) as layer:
        for x in batches(2):
            loop.backward(loss_of(loop, x))
            loop.step()
        loop.flush()
        layer.train_batch(iter(list(batches(2))), partial(loss_of, layer))
        assert same(weights(loop), weights(layer))
        with pytest.raises(StopIteration):
            layer.train_batch(iter([]), partial(loss_of, layer))


def test_what_would_begin_anew_with_each_update_is_refused():
    with _engine() as engine, pytest.raises(UnsupportedError, match="an iterator, not a list"):
        engine.train_batch(list(batches(9)), partial(loss_of, engine))


def test_a_hook_on_a_weight_of_several_blocks_would_see_parts_and_is_refused():
    model = small()
    with _engine(model=model) as engine:
        for kind in ("register_hook", "register_post_accumulate_grad_hook"):
            handle = getattr(model[0].weight, kind)(lambda grad: None)
            engine.train_batch(batches(3), partial(loss_of, engine))  # one block alone has it
            handle.remove()
    tied = deep()
    tied[8].weight = tied[2].weight
    with offloaded(tied, replace(AWAY, order=BY_LAYER, backwards=2)) as optimizer:
        layers = LayerOrder(optimizer.engine)
        tied[2].weight.register_hook(lambda grad: grad.clamp(-1, 1))
        with pytest.raises(UnsupportedError, match=r"hook on 2\.weight would be shown parts"):
            layers.backward([lambda: mean_square(tied, inputs(1)[0])] * 2)


def test_a_model_that_computes_its_loss_needs_no_other():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x, target):
            return {"loss": (self.net(x) - target).square().mean()}

    with _engine(model=Model()) as engine:
        rows = [{"x": x, "target": torch.ones(3)} for x in batches(3)]
        assert engine.train_batch(iter(rows)) > 0
        assert engine.train_batch(iter([(row["x"], row["target"]) for row in rows])) > 0
    with _engine() as engine, pytest.raises(UnsupportedError, match="pass loss="):
        engine.train_batch(batches(3))


def test_a_micro_batch_alone_is_refused():
    with _engine() as engine:
        (x,) = batches(1)
        loss = loss_of(engine, x)
        for call in (engine.backward, engine.scale):
            with pytest.raises(ConfigError, match=r"one was given[\s\S]*train_batch"):
                call(loss)
        with pytest.raises(ConfigError, match="2 micro-batches was given, and an update has 3"):
            engine.backward_window(list(batches(2)), loss=partial(loss_of, engine))
    # one micro-batch is a window
    with _engine({"forebay": {"accumulation_order": "layer"}}) as engine:
        engine.backward(loss_of(engine, x))
        engine.step()
        assert engine.global_steps == 1


def test_a_model_without_blocks_is_refused_at_the_start():
    with pytest.raises(UnsupportedError, match="needs a stack of blocks"):
        _engine(model=nn.Linear(7, 3))


def test_several_processes_are_told_whose_bits_they_get():
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "forebay": {"accumulation_order": "layer"},
    }
    shown = resolve(raw, facts=Facts(world_size=2)).table()
    assert "the bits of stages 0 and 1" in shown
    assert "the bits of stages" not in resolve(raw).table()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, start, x):
        return start + x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class _Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x + getattr(self, "start", 0.0))


class _Stack(nn.Module):
    """Blocks, and what may go wrong between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(_Reads(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 3)
        self.how = how
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        call = self.calls
        x = start = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.how == "drops" and number == 1 and call == 2:
                continue
            if self.how == "fewer" and number == 2 and call == 2:
                continue
            if self.how == "own_function" and number == 2:
                x = _Doubled.apply(start, x)
            if self.how == "stashes":
                block.start = start
            if self.how == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.how == "non_reentrant":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x).tanh()
        if self.how == "raises" and call == 2:
            raise ValueError("bad row")
        return self.last(x)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("drops", "micro-batch 1 calls other blocks"),
        ("fewer", "micro-batch 1 calls 2 blocks and the first one 3"),
        ("reentrant", "inside a reentrant checkpoint"),
        ("stashes", "passes over a block and is read where nobody sees it"),
        ("own_function", "passes over a block and is read where nobody sees it"),
    ],
)
def test_forwards_that_cannot_be_cut_are_refused(how, says):
    with _engine(model=_Stack(how)) as engine:
        before = weights(engine)
        with pytest.raises(UnsupportedError, match=says) as refused:
            engine.train_batch(batches(3), partial(loss_of, engine))
        assert "microbatch" in refused.value.hint
        engine.zero_grad()
        assert same(before, weights(engine))
        assert type(engine.module.blocks[0]) is _Reads


def test_a_call_inside_a_checkpoint_that_is_not_reentrant_is_cut_too():
    with (
        _engine(USUAL, model=_Stack("non_reentrant")) as usual,
        _engine(model=_Stack("non_reentrant")) as layer,
    ):
        for engine in (usual, layer):
            for seed in range(3):
                engine.train_batch(batches(3, seed=seed), partial(loss_of, engine))
        assert same(weights(usual), weights(layer))


def test_a_forward_that_raises_ends_the_window_and_the_next_one_is_fine():
    with _engine(model=_Stack("raises")) as engine, _engine(model=_Stack("")) as twin:
        with pytest.raises(ValueError, match="bad row"):
            engine.train_batch(batches(3), partial(loss_of, engine))
        with pytest.raises(GradientError):
            engine.step()
        engine.zero_grad()
        for one in (engine, twin):
            one.train_batch(batches(3), partial(loss_of, one))
        assert same(weights(engine), weights(twin))


def test_autocast_around_a_window_reaches_its_forwards():
    seen = []
    with _engine() as engine:

        def _loss(x):
            out = engine(x)
            seen.append(out.dtype)
            return out.float().square().mean()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.train_batch(batches(3), _loss)
    assert seen == [torch.bfloat16] * 3


def test_dropout_is_said_to_differ(caplog):
    model = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.1), nn.Linear(7, 3))
    with _engine(model=model):
        assert "dropout (1) drops others" in caplog.text


def test_blocks_are_those_of_the_largest_container_on_the_way_down():
    experts = nn.ModuleList(nn.Linear(50, 50) for _ in range(8))
    model = nn.Module()
    model.few = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), experts]), nn.Linear(2, 2)])
    assert find_stack(model) == tuple(model.blocks)
    assert find_stack(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == ()


def test_jobs_stop_where_one_fails_and_threads_end():
    turns: Turns[int] = Turns(CpuAccelerator())
    trail: list[str] = []

    def _job(number: int) -> int:
        for place in range(2):
            trail.append(f"{number}{place}")
            turns.pause()
            if number == 1 and place == 1:
                raise KeyError("lost")
        return number

    done: list[tuple[int, int]] = []
    functions = [partial(_job, number) for number in range(3)]
    with pytest.raises(KeyError, match="lost"):
        turns.run(functions, done=lambda *found: done.append(found))
    assert trail == ["00", "10", "20", "01", "11", "21"]
    assert done == [(0, 0)]
    assert turns.number is None


def test_a_door_keeps_no_data():
    import weakref

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    door = Door(y)
    inside = door.enter(y, anchor=torch.ones((), requires_grad=True))
    held = weakref.ref(y.untyped_storage())
    (inside * 3).sum().backward()
    assert door.gradient is not None
    del y, inside
    assert held() is None
    root = door.root()
    assert root is not None
    root.backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize("blocks_in_pool", [2, 4])
@pytest.mark.parametrize("place", [UpdatePlace.HOST, UpdatePlace.STREAMED])
def test_bytes_are_those_of_the_program(blocks_in_pool, place):
    """Loads of one backward, whatever the micro-batches; sums leave once, from the first window."""
    options = replace(AWAY, pool_bytes=blocks_in_pool * BLOCK, update=place, order=BY_LAYER)
    planned = set()
    for micro in (2, 5):
        model = deep()
        with offloaded(model, replace(options, backwards=micro)) as optimizer:
            engine = optimizer.engine
            layers, seen = LayerOrder(engine), []
            for _ in range(3):
                before = dict(engine.traffic)
                rows = [x.requires_grad_() for x in inputs(micro)]
                layers.backward([partial(mean_square, model, x) for x in rows])
                optimizer.step()
                optimizer.zero_grad()
                engine.synchronize()
                seen.append({lane: engine.traffic[lane] - before[lane] for lane in before})
            program = engine.current_program()
            up, down = (program.traffic(lane) for lane in (Lane.UP, Lane.DOWN))
            assert [one[Lane.UP] for one in seen[1:]] == [up] * 2
            assert [one[Lane.DOWN] for one in seen] == [down] * 3
            planned.add((up, down))
    assert len(planned) == 1


def test_torch_without_edges_refuses_a_second_use(monkeypatch):
    monkeypatch.setattr(doors, "_BEGINS_AT_EDGES", False)
    door = Door(torch.ones(3, requires_grad=True) * 2)
    door.use(1)
    door.use(1)
    with pytest.raises(UnsupportedError, match=r"torch 2\.7 can"):
        door.use(2)
