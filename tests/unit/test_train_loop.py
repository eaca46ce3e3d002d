"""The loop's arithmetic: accumulation trains as one large batch, every token weighs the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.data.batches import IGNORED, Batches, BatchShape, Position
from forebay.data.rows import Layout, plan_rows
from forebay.data.samples import CompletionSample
from forebay.data.tokenize import ByteTokenizer
from forebay.data.tokens import build_store
from forebay.errors import BudgetError, GradientError
from forebay.train.evaluate import evaluate
from forebay.train.forward import forward, sum_of_token_losses
from forebay.train.loop import Loop
from forebay.train.signals import StopSignals

CPU = torch.device("cpu")


class PlainEngine:
    """Plain torch under the engine's names; float64, so that only the arithmetic can differ."""

    def __init__(self, *, accumulation: int, router: float | None = None) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(
            torch.nn.Embedding(259, 8, dtype=torch.float64),
            torch.nn.Linear(8, 259, dtype=torch.float64),
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5)
        self.accumulation = accumulation
        self.router = router
        self.micro_steps = 0
        self.gradients: list[torch.Tensor] = []
        self.applied = True

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: Any, use_cache: bool) -> Any:
        assert use_cache is False
        outputs = SimpleNamespace(logits=self.module(input_ids))
        if self.router is not None:
            outputs.aux_loss = torch.tensor(self.router, requires_grad=True)
        return outputs

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> torch.Tensor:
        assert scale_wrt_gas is False
        loss.backward()
        return loss

    def backward_window(self, batches: Any, *, loss: Any, scale_wrt_gas: bool) -> None:
        assert len(batches) == self.accumulation
        for batch in batches:
            self.backward(loss(batch), scale_wrt_gas=scale_wrt_gas)

    def step(self) -> None:
        flat = [param.grad.flatten() for param in self.module.parameters()]
        self.gradients.append(torch.cat(flat))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def get_lr(self) -> list[float]:
        return [0.5]

    def get_global_grad_norm(self) -> float:
        return 1.0

    def was_step_applied(self) -> bool:
        return self.applied

    world_size = 1

    def mean_over_ranks(self, value: float) -> float:
        return value


class Records:
    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.evaluations: list[Any] = []

    def step(self, record: Any) -> None:
        self.steps.append(record)

    def evaluation(self, record: Any) -> None:
        self.evaluations.append(record)


def batches(rows: int, accumulation: int) -> Batches:
    """Samples of very different lengths, so that a mean of means would show."""
    samples = [
        CompletionSample(where="f:1", prompt="p" * (n % 3 + 1), completion="abcdefg"[: n % 7] + "!")
        for n in range(24)
    ]
    tokenizer = ByteTokenizer()
    store = build_store(samples, tokenizer)
    plan = plan_rows(store, layout=Layout.PAD, length=32)
    shape = BatchShape(rows, accumulation)
    return Batches(store, rows=plan, shape=shape, seed=1, pad_id=tokenizer.pad_id)


def loop(engine: PlainEngine, data: Batches, **changes: Any) -> Loop:
    values: dict[str, Any] = {
        "engine": engine, "batches": data, "held_out": None, "device": CPU, "total_steps": 3,
        "eval_every": 2, "save_every": None, "most_skips": None, "router_weight": 0.5,
        "reporter": Records(), "stop": StopSignals(lambda name: None), "save": lambda: None,
    }  # fmt: skip
    return Loop(**{**values, **changes})


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_one_large_batch(rows: int, accumulation: int) -> None:
    """The same gradient up to rounding: both are sums of the same terms, in another order.

    A sum of n doubles taken in two orders differs by at most 2 (n - 1) 2^-53 times the sum of
    the magnitudes. n is at most 8 rows x 12 tokens; the magnitudes are bounded by twice the
    largest gradient here, since a softmax's entries have one sign each.
    """
    whole, split = PlainEngine(accumulation=1), PlainEngine(accumulation=accumulation)
    one, other = loop(whole, batches(8, 1)), loop(split, batches(rows, accumulation))
    one.run()
    other.run()
    assert one.position == other.position
    assert len(whole.gradients) == len(split.gradients) == 3
    for expected, found in zip(whole.gradients, split.gradients, strict=True):
        bound = 2 * 96 * 2.0**-53 * 2 * float(expected.abs().max())
        # Later steps start from weights that differ by that much already.
        assert float((expected - found).abs().max()) <= 8 * bound
    for expected, found in zip(one.reporter.steps, other.reporter.steps, strict=True):
        assert expected.loss == pytest.approx(found.loss, rel=1e-6)
        assert expected.label_tokens == found.label_tokens


def test_every_token_weighs_the_same() -> None:
    """The window's loss is the mean over its tokens, not a mean of the micro-batches' means."""
    engine, data = PlainEngine(accumulation=4), batches(2, 4)
    window = data.window(Position(0, 0))
    sums = [
        forward(engine, batch, device=CPU, router_weight=0.0).loss_sum.item()
        for batch in window.micro_batches
    ]
    training = loop(engine, data, total_steps=1)
    training.run()
    assert training.reporter.steps[0].loss == pytest.approx(sum(sums) / window.label_tokens)
    means = [s / batch.label_tokens for s, batch in zip(sums, window.micro_batches, strict=True)]
    assert training.reporter.steps[0].loss != pytest.approx(sum(means) / 4, rel=1e-3)


def test_sum_of_token_losses_shifts_and_masks() -> None:
    logits = torch.randn(2, 4, 11)
    labels = torch.tensor([[5, IGNORED, 3, 4], [1, 2, IGNORED, IGNORED]])
    # Position t predicts the label at t + 1; the first label is nobody's.
    picked = [(0, 1, 3), (0, 2, 4), (1, 0, 2)]
    expected = -sum(logits.log_softmax(-1)[at] for at in picked)
    assert float(sum_of_token_losses(logits, labels)) == pytest.approx(float(expected), rel=1e-6)
    halves = logits.to(torch.bfloat16)
    assert sum_of_token_losses(halves, labels).dtype is torch.float32


def test_router_loss_is_shared_out_by_tokens() -> None:
    engine = PlainEngine(accumulation=1, router=3.0)
    result = forward(engine, batches(2, 1).window(Position(0, 0)).micro_batches[0], device=CPU,
                     router_weight=0.25)  # fmt: skip
    assert result.router_loss is not None
    assert result.router_loss.item() == 0.75
    # It is no part of the reported loss.
    with_router = loop(engine, batches(2, 1), total_steps=1)
    without = loop(PlainEngine(accumulation=1), batches(2, 1), total_steps=1)
    with_router.run()
    without.run()
    assert with_router.reporter.steps[0].loss == without.reporter.steps[0].loss


def test_evaluation_is_a_mean_over_tokens_whatever_the_batch() -> None:
    engine = PlainEngine(accumulation=1)
    one = evaluate(engine, batches(1, 1), device=CPU)
    assert evaluate(engine, batches(5, 1), device=CPU) == pytest.approx(one, rel=1e-6)
    assert engine.module.training


def test_order_of_a_run() -> None:
    saves: list[int] = []
    training = loop(
        PlainEngine(accumulation=1), batches(8, 1), held_out=batches(8, 1), total_steps=5,
        save_every=2, save=lambda: saves.append(training.steps_done),
    )  # fmt: skip
    training.run()
    assert [record.step for record in training.reporter.evaluations] == [0, 2, 4, 5]
    assert [record.step for record in training.reporter.steps] == [1, 2, 3, 4, 5]
    assert saves == [2, 4]
    assert training.tokens_done == sum(record.tokens for record in training.reporter.steps)


def test_stops_between_updates() -> None:
    training = loop(PlainEngine(accumulation=1), batches(8, 1), held_out=batches(8, 1))
    report = training.reporter.step

    def stop_at_two(record: Any) -> None:
        report(record)
        if record.step == 2:
            import signal

            training.stop.requested = signal.SIGTERM

    training.reporter.step = stop_at_two
    training.run()
    assert training.steps_done == 2
    # Whoever stops a run is in a hurry: no evaluation after it.
    assert [record.step for record in training.reporter.evaluations] == [0]


def test_out_of_memory_is_said_with_a_way_out() -> None:
    engine = PlainEngine(accumulation=1)

    def fails(loss: torch.Tensor, *, scale_wrt_gas: bool) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")

    engine.backward = fails
    with pytest.raises(BudgetError, match="step 1 ran out of device memory") as caught:
        loop(engine, batches(8, 1)).run()
    assert "--gradient-checkpointing" in str(caught.value.hint)


def test_skips_in_a_row_are_counted_from_the_last_update() -> None:
    engine = PlainEngine(accumulation=1)
    training = loop(engine, batches(8, 1), total_steps=9, most_skips=3)
    report = training.reporter.step

    def pattern(record: Any) -> None:
        report(record)
        engine.applied = record.step in (1, 4)

    training.reporter.step = pattern
    with pytest.raises(GradientError, match="3 updates in a row were skipped, the last at step 7"):
        training.run()
