"""The engine under DeepSpeed's names: windows, boundaries, scaling, forwarding, the end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compat_cases import batches, engine_of, loss_of, same, small, train, weights
from forebay.compat.not_yet import NOT_YET
from forebay.errors import ConfigError, EngineClosedError, GradientError, UnsupportedError

GAS2 = {"gradient_accumulation_steps": 2}
GAS4 = {"gradient_accumulation_steps": 4}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


class Explodes(nn.Module):
    """Raises in backward while `armed`, as an out-of-memory error would."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()
        self.armed = False

    def forward(self, x):
        hidden = self.net[0](x)
        if hidden.requires_grad:
            hidden.register_hook(self._maybe)  # the last layer's gradient is there by then
        return self.net[2](self.net[1](hidden))

    def _maybe(self, grad):
        if self.armed:
            raise torch.OutOfMemoryError("no room")
        return grad


def test_counters_of_windows():
    with engine_of(GAS4) as engine:
        seen = []
        for x in batches(9):
            boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(loss_of(engine, x))
            engine.step()
            seen.append((boundary, engine.was_step_applied(), engine.global_steps))
        assert [boundary for boundary, _, _ in seen] == [False, False, False, True] * 2 + [False]
        assert [applied for _, applied, _ in seen] == [boundary for boundary, _, _ in seen]
        assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (9, 2, 32)
        assert engine.get_batch_info() == (16, 4, 4)
        assert engine.skipped_steps == 0


def test_backward_returns_the_loss_and_divides():
    single, double = engine_of(), engine_of(GAS2)
    (x,) = batches(1)
    loss = loss_of(single, x)
    assert single.backward(loss) is loss
    single.step()
    for _ in range(2):
        double.backward(loss_of(double, x))
        double.step()
    # the mean of two equal gradients is that gradient: halving and doubling change no bit
    assert single.get_global_grad_norm() == double.get_global_grad_norm()
    assert same(weights(single), weights(double))
    single.close()
    double.close()


def test_scale_wrt_gas_false_takes_the_loss_as_it_is():
    divided, plain = engine_of(GAS2), engine_of(GAS2)
    for x in batches(2):
        divided.backward(loss_of(divided, x))
        plain.backward(loss_of(plain, x) / 2, scale_wrt_gas=False)
        divided.step()
        plain.step()
    assert same(weights(divided), weights(plain))
    divided.close()
    plain.close()


def test_retained_graphs_count_again():
    twice, doubled = engine_of({"gradient_clipping": 0.0}), engine_of({"gradient_clipping": 0.0})
    (x,) = batches(1)
    loss = loss_of(twice, x)
    twice.backward(loss, retain_graph=True)
    twice.backward(loss)
    twice.step()
    doubled.backward(loss_of(doubled, x) * 2)
    doubled.step()
    assert twice.get_global_grad_norm() == doubled.get_global_grad_norm()
    assert same(weights(twice), weights(doubled))
    twice.close()
    doubled.close()


@pytest.mark.parametrize("config", [GAS2, GAS2 | FP16], ids=["fp32", "fp16"])
def test_scale_and_a_backward_by_hand(config):
    ours, by_hand = engine_of(config), engine_of(config)
    for x in batches(6):
        ours.backward(loss_of(ours, x))
        by_hand.scale(loss_of(by_hand, x)).backward()
        ours.step()
        by_hand.step()
    assert by_hand.global_steps == 3
    assert same(weights(ours), weights(by_hand))
    ours.close()
    by_hand.close()


def test_step_needs_a_backward():
    with engine_of() as engine:
        with pytest.raises(GradientError, match="without a backward"):
            engine.step()
        (x,) = batches(1)
        scaled = engine.scale(loss_of(engine, x))
        with pytest.raises(GradientError, match="no backward ran on what it returned"):
            engine.step()
        scaled.backward()
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (1, 1)
        with pytest.raises(UnsupportedError, match="the loss is of type float"):
            engine.backward(0.5)


def test_boundaries_by_hand_stay_until_set_again():
    """As in DeepSpeed: one `step()` after the passes whose last has the boundary set."""
    by_hand, counted = engine_of(GAS2), engine_of(GAS2)
    for index, x in enumerate(batches(4)):
        by_hand.set_gradient_accumulation_boundary(index % 2 == 1)
        assert by_hand.is_gradient_accumulation_boundary() is (index % 2 == 1)
        by_hand.backward(loss_of(by_hand, x))
        if index % 2:
            by_hand.step()
            assert by_hand.is_gradient_accumulation_boundary()
        counted.backward(loss_of(counted, x))
        counted.step()
    assert by_hand.global_steps == counted.global_steps == 2
    assert same(weights(by_hand), weights(counted))
    by_hand.close()
    counted.close()


def test_no_sync_holds_the_window_open():
    stage1 = {"zero_optimization": {"stage": 1}}
    with engine_of(stage1) as engine:
        first, second = batches(2)
        with engine.no_sync():
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(loss_of(engine, first))
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, second))
        engine.step()
        assert engine.global_steps == 1
        norm = engine.get_global_grad_norm()
    with engine_of(stage1 | GAS2) as reference:
        for x in (first, second):
            reference.backward(loss_of(reference, x) * 2)
            reference.step()
        assert reference.get_global_grad_norm() == norm
    with engine_of() as engine, pytest.raises(UnsupportedError, match="needs stage 0 or 1"):
        engine.no_sync().__enter__()


def test_flush_averages_over_what_is_there():
    """Ten micro-batches, windows of four: the last update is the mean of two (report 66)."""
    with engine_of(GAS4) as engine, engine_of(GAS4) as reference:
        train(engine, 10)
        engine.flush()
        assert (engine.global_steps, engine.global_samples) == (3, 40)
        train(reference, 8)
        reference.set_train_batch_size(8)
        for x in list(batches(10))[8:]:
            reference.backward(loss_of(reference, x))
            reference.step()
        assert engine.get_global_grad_norm() == reference.get_global_grad_norm()
        assert same(weights(engine), weights(reference))
        engine.flush()  # nothing is left
        assert engine.global_steps == 3


def test_flush_takes_a_backward_that_no_step_followed():
    with engine_of(GAS4) as engine:
        for x in batches(2):
            engine.backward(loss_of(engine, x))
            if engine.micro_steps == 0:
                engine.step()
        engine.flush()
        assert (engine.micro_steps, engine.global_samples) == (2, 8)


def test_batch_sizes_change_between_windows():
    with engine_of(GAS2) as engine:
        engine.set_train_batch_size(16)
        assert engine.gradient_accumulation_steps() == 4
        train(engine, 3)
        with pytest.raises(GradientError, match="3 of 4 micro-batches are done"):
            engine.set_train_batch_size(8)
        with pytest.raises(GradientError, match="micro-batch size cannot change"):
            engine.set_train_micro_batch_size(2)
        train(engine, 1)
        assert engine.global_steps == 1
        engine.set_train_micro_batch_size(2)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
        engine.set_train_batch_size(2)
        train(engine, 2)
        assert (engine.global_steps, engine.global_samples) == (3, 20)
        with pytest.raises(ConfigError, match="not a multiple") as caught:
            engine.set_train_batch_size(7)
        assert caught.value.hint == "6 and 8 are"
        for wrong in (0, -2, 2.0, True, "4"):
            with pytest.raises(ConfigError, match="positive whole number"):
                engine.set_train_batch_size(wrong)


@pytest.mark.parametrize("by_hand", [False, True])
def test_training_goes_on_after_a_backward_that_raised(by_hand):
    def one(engine, x):
        loss = loss_of(engine, x)
        if by_hand:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()

    model = Explodes()
    with engine_of(GAS2, model=model) as engine, engine_of(GAS2, model=Explodes()) as reference:
        data = list(batches(4))
        one(engine, data[0])
        model.armed = True
        with pytest.raises(torch.OutOfMemoryError):
            one(engine, data[1])
        model.armed = False
        with pytest.raises(GradientError, match="incomplete"):
            engine.step()
        with pytest.raises(GradientError, match="incomplete"):
            engine.flush()
        engine.zero_grad()
        for x in data:
            one(engine, x)
            one(reference, x)
        assert engine.global_steps == 2
        assert same(weights(engine), weights(reference))


def test_learning_rates_and_momenta():
    groups = [
        {"params": list(small()[0].parameters()), "lr": 0.1, "type": "first"},
        {"params": list(small()[2].parameters()), "betas": (0.5, 0.6)},
    ]
    model = small()
    for group, layer in zip(groups, (model[0], model[2]), strict=True):
        group["params"] = list(layer.parameters())
    with engine_of(model=model, model_parameters=groups) as engine:
        assert engine.get_lr() == [0.1, 0.01]
        assert engine.get_mom() == [(0.9, 0.999), (0.5, 0.6)]
        assert engine.get_type() == ["first", None]
        engine.set_lr(0.5)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]
        assert (engine.gradient_clipping(), engine.get_global_grad_norm()) == (1.0, None)


def test_loss_scale_and_overflow():
    with engine_of(
        {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    ) as engine:
        assert engine.fp16_enabled()
        assert not engine.bfloat16_enabled()
        assert engine.loss_scale == engine.optimizer.loss_scale == engine.optimizer.cur_scale == 16
        (x,) = batches(1)
        before = weights(engine)
        engine.backward(loss_of(engine, x) * float("inf"))
        engine.step()
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert engine.optimizer.overflow
        assert not engine.was_step_applied()
        assert engine.optimizer.cur_scale == 8
        assert same(before, weights(engine))
        train(engine, 1)
        assert engine.was_step_applied()
        assert not engine.optimizer.overflow


def test_a_skipped_update_moves_no_schedule():
    def halve(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    with engine_of(FP16, lr_scheduler=halve) as engine:
        (x,) = batches(1)
        engine.backward(loss_of(engine, x) * float("inf"))
        engine.step()
        assert engine.get_lr() == [0.01]
        train(engine, 2)
        assert engine.get_lr() == [0.0025]


def test_schedulers_that_want_a_metric_and_replaced_ones():
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    with engine_of(lr_scheduler=plateau) as engine:
        for x in batches(2):
            engine.backward(loss_of(engine, x))
            engine.step(lr_kwargs={"metrics": 1.0})
        assert engine.get_lr() == [pytest.approx(1e-3)]
        engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=0.5)
        train(engine, 1)
        assert engine.lr_scheduler.last_epoch == 1
        engine.lr_scheduler = None
        train(engine, 1)


def test_attributes_of_the_module_are_the_engine_s():
    model = small()
    model.label = "mine"
    with engine_of(model=model) as engine:
        assert engine.label == "mine"
        assert engine.module is model
        assert next(name for name, _ in engine.named_parameters()) == "0.weight"
        assert engine.eval() is engine
        assert not model.training
        assert engine.train().training
        assert engine.forward(torch.ones(1, 7, device=engine.device)).shape == (1, 3)
        assert (engine.world_size, engine.local_rank, engine.global_rank) == (1, 0, 0)
        assert engine.zero_optimization_stage() == 2
        engine.empty_partition_cache()
        with pytest.raises(AttributeError, match="neither the engine nor its Sequential"):
            getattr(engine, "nonsense")  # noqa: B009 - as a script would ask
        assert not hasattr(engine, "__wrapped__")


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_not_there_yet_is_refused_by_name(name):
    with engine_of() as engine:
        assert hasattr(engine, name)
        with pytest.raises(UnsupportedError, match=rf"engine\.{name}\(\)") as caught:
            getattr(engine, name)("argument")
        assert caught.value.hint


def test_closed_engines_keep_the_weights():
    model = small()
    engine = engine_of(model=model)
    train(engine, 2)
    expected = weights(engine)
    engine.destroy()
    engine.close()
    assert all(torch.equal(expected[n], v.cpu()) for n, v in model.state_dict().items())
    left = {row.role.value for row in engine.ledger.table() if row.nbytes}
    assert left <= {"lp_params"}  # the model's own weights
    with pytest.raises(EngineClosedError):
        train(engine, 1)
    again = engine_of(model=model)
    train(again, 1)
    again.close()


def test_state_dicts_pass_the_barrier_and_load():
    with engine_of() as engine, engine_of() as other:
        train(engine, 3)
        other.load_state_dict(engine.state_dict())
        assert same(weights(engine), weights(other))
        other.optimizer.load_state_dict(engine.optimizer.state_dict())
        train(engine, 2)
        train(other, 2)
        assert same(weights(engine), weights(other))
