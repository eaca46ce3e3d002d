"""Stores, rows and batches: every token once, every label right, every order repeatable."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.data.batches import IGNORED, Batches, BatchShape, Position, RankShare, collate
from forebay.data.entropy import byte_entropy
from forebay.data.rows import Layout, Overlong, Rows, permutation, plan_rows, split_rows
from forebay.data.samples import CompletionSample, Sample, TextSample
from forebay.data.tokenize import ByteTokenizer
from forebay.data.tokens import TokenStore, build_store
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

BOS, EOS, PAD = 256, 257, 258


def texts(*documents: str) -> list[Sample]:
    return [TextSample(where="f:1", text=document) for document in documents]


def pairs(*documents: tuple[str, str]) -> list[Sample]:
    return [
        CompletionSample(where="f:1", prompt=prompt, completion=completion)
        for prompt, completion in documents
    ]


def store_of(samples: list[Sample], spill: Path | None = None) -> TokenStore:
    return build_store(samples, ByteTokenizer(), spill=spill)


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("on_disk", [False, True])
def test_store_of_text(tmp_path: Path, on_disk: bool) -> None:
    store = store_of(texts("ab", "", "c"), tmp_path if on_disk else None)
    assert store.ids.tolist() == [BOS, *ids("ab"), EOS, BOS, EOS, BOS, *ids("c"), EOS]
    assert store.learned.tolist() == [0, 1, 1, 1, 0, 1, 0, 1, 1]
    assert store.starts.tolist() == [0, 4, 6, 9]
    assert not list(tmp_path.iterdir())


def test_pieces_of_one_document_have_no_seam() -> None:
    pieces = [
        TextSample(where="f:1", text="ab", last=False),
        TextSample(where="f:2", text="cd", first=False),
        *texts("e"),
    ]
    store = store_of(pieces)
    assert store.starts.tolist() == [0, 6, 9]
    assert store.learned.tolist() == [0, 1, 1, 1, 1, 1, 0, 1, 1]


class _NoSpecials(ByteTokenizer):
    bos_id = None  # type: ignore[assignment,misc]
    eos_id = None  # type: ignore[assignment,misc]


@pytest.mark.parametrize("on_disk", [False, True])
def test_documents_without_a_label_are_left_out_and_counted(tmp_path: Path, on_disk: bool) -> None:
    samples = pairs(("only a prompt", ""), ("p", "c"), ("again", ""))
    store = build_store(samples, _NoSpecials(), spill=tmp_path if on_disk else None)
    assert store.num_empty == 2
    assert store.ids.tolist() == ids("pc")
    assert store.starts.tolist() == [0, 2]


def test_empty_store(tmp_path: Path) -> None:
    for spill in (None, tmp_path):
        store = store_of([], spill)
        assert (store.num_documents, store.num_tokens) == (0, 0)
        with pytest.raises(ConfigError, match="nothing to learn: 0 samples with 0 tokens"):
            plan_rows(store, layout=Layout.CUT, length=8)


def test_cut_text_loses_no_token_and_masks_borders() -> None:
    store = store_of(texts("abc", "de"))
    rows = plan_rows(store, layout=Layout.CUT, length=4)
    batch = collate(store, rows, pad_id=PAD)
    flat = [BOS, *ids("abc"), EOS, BOS, *ids("de"), EOS, PAD, PAD, PAD]
    # 9 tokens: the last row is one token, which has no label and is left out.
    assert rows.num_dropped == 1
    assert batch.input_ids.tolist() == [flat[:4], flat[4:8]]
    # eos of "abc" begins a row (the model's shift leaves it out), bos is never predicted.
    assert batch.labels.tolist() == [[IGNORED, *ids("abc")], [EOS, IGNORED, *ids("de")]]
    assert batch.attention_mask is None
    assert rows.label_tokens.tolist() == [3, 2]


def test_padding_is_neither_attended_to_nor_learned() -> None:
    store = store_of(pairs(("ab", "c"), ("a", "")))
    batch = collate(store, plan_rows(store, layout=Layout.PAD, length=8), pad_id=PAD)
    assert batch.input_ids.tolist() == [
        [BOS, *ids("abc"), EOS],
        [BOS, *ids("a"), EOS, PAD, PAD],
    ]
    assert batch.labels.tolist() == [
        [IGNORED, IGNORED, IGNORED, *ids("c"), EOS],
        [IGNORED, IGNORED, EOS, IGNORED, IGNORED],
    ]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert (batch.tokens, batch.label_tokens) == (8, 3)


def test_packing_keeps_documents_whole() -> None:
    store = store_of(pairs(("a", "b"), ("c", "d"), ("e", "fghij"), ("k", "l")))
    rows = plan_rows(store, layout=Layout.PACK, length=9)
    assert list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True)) == [
        (0, 8),
        (8, 16),
        (16, 20),
    ]
    batch = collate(store, rows, pad_id=PAD)
    assert batch.labels[0].tolist() == [
        IGNORED, IGNORED, ids("b")[0], EOS, IGNORED, IGNORED, ids("d")[0], EOS,
    ]  # fmt: skip


def test_overlong_samples_are_refused_with_the_numbers() -> None:
    store = store_of(pairs(("ab", "c"), ("abcdef", "ghij"), ("abc", "d")))
    with pytest.raises(ConfigError) as caught:
        plan_rows(store, layout=Layout.PAD, length=5)
    assert caught.value.message == (
        "2 of 3 samples are longer than the sequence length of 5 tokens (the longest has 12)"
    )
    assert "--truncate" in str(caught.value.hint)


@pytest.mark.parametrize("layout", [Layout.PAD, Layout.PACK])
def test_truncated_when_asked(layout: Layout) -> None:
    store = store_of(pairs(("ab", "c"), ("abcdef", "ghij"), ("abc", "de")))
    rows = plan_rows(store, layout=layout, length=5, overlong=Overlong.TRUNCATE)
    # The second sample's first five tokens are all prompt, so nothing of it can be learned.
    assert (rows.num_truncated, rows.num_dropped) == (2, 1)
    assert rows.stops.tolist() == [5, 22]
    assert rows.label_tokens.tolist() == [2, 1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    layout=st.sampled_from(Layout),
    length=st.integers(2, 16),
)
def test_every_learnable_token_is_learned_once(
    lengths: list[int], layout: Layout, length: int
) -> None:
    """Labels over all rows = learned tokens, less those that no layout can predict."""
    store = store_of(texts(*("x" * count for count in lengths)))
    rows = plan_rows(store, layout=layout, length=length, overlong=Overlong.TRUNCATE)
    batch = collate(store, rows, pad_id=PAD)
    predicted = batch.labels[:, 1:] != IGNORED
    assert int(predicted.sum()) == batch.label_tokens == int(rows.label_tokens.sum())
    assert (batch.input_ids[:, 1:][predicted] == batch.labels[:, 1:][predicted]).all()
    assert (rows.stops - rows.starts <= length).all()
    assert (rows.label_tokens > 0).all()
    if layout is not Layout.CUT and max(lengths) + 2 <= length:
        assert batch.label_tokens == int(store.learned.sum())


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_permutation_is_one(count: int) -> None:
    order = permutation(count, seed=-3, stream=5)
    assert sorted(order.tolist()) == list(range(count))


def test_permutation_never_changes() -> None:
    """A position in the order is how a run goes on, on any machine and with any version."""
    assert permutation(8, seed=0, stream=0).tolist() == [2, 6, 5, 3, 0, 4, 7, 1]
    assert permutation(8, seed=1, stream=0).tolist() == [7, 1, 0, 3, 5, 6, 4, 2]
    assert permutation(8, seed=0, stream=1).tolist() == [3, 2, 7, 5, 4, 1, 6, 0]


def test_permutation_mixes() -> None:
    """Chi-square of where 1,000 streams put item 0 among 8 places: 7 degrees of freedom."""
    places = np.array([permutation(8, seed=9, stream=e).tolist().index(0) for e in range(1000)])
    counts = np.bincount(places, minlength=8)
    # 24.3 is exceeded by chance in one of 1,000 seeds; this seed is fixed.
    assert ((counts - 125) ** 2 / 125).sum() < 24.3


def many(count: int, length: int = 4) -> tuple[TokenStore, Rows]:
    store = store_of(texts(*(f"{number:0{length - 2}d}" for number in range(count))))
    return store, plan_rows(store, layout=Layout.PAD, length=length)


def test_split_is_repeatable_and_disjoint() -> None:
    _, rows = many(100)
    first = split_rows(rows, fraction=0.1, seed=1)
    again = split_rows(rows, fraction=0.1, seed=1)
    other = split_rows(rows, fraction=0.1, seed=2)
    assert (len(first.train), len(first.held_out)) == (90, 10)
    assert first.held_out.starts.tolist() == again.held_out.starts.tolist()
    assert first.held_out.starts.tolist() != other.held_out.starts.tolist()
    both = [*first.train.starts.tolist(), *first.held_out.starts.tolist()]
    assert sorted(both) == rows.starts.tolist()


def test_split_edges() -> None:
    _, rows = many(3)
    assert len(split_rows(rows, fraction=0.0, seed=0).held_out) == 0
    assert len(split_rows(rows, fraction=0.01, seed=0).held_out) == 1
    with pytest.raises(ConfigError, match="cannot hold out 3 of 3 rows"):
        split_rows(rows, fraction=0.9, seed=0)


@pytest.mark.parametrize(("rows", "micro", "accumulation"), [(10, 3, 2), (1, 4, 1), (7, 7, 3)])
def test_epochs_run_on_without_a_gap(rows: int, micro: int, accumulation: int) -> None:
    store, plan = many(rows)
    batches = Batches(store, rows=plan, shape=BatchShape(micro, accumulation), seed=4, pad_id=PAD)
    position, seen = Position(0, 0), []
    while position.epoch < 3:
        window = batches.window(position)
        assert len(window.micro_batches) == accumulation
        for batch in window.micro_batches:
            assert len(batch.input_ids) == micro
            seen.extend(bytes(row[1:3].tolist()).decode() for row in batch.input_ids)
        position = window.following
    for epoch in range(3):
        assert sorted(map(int, seen[epoch * rows : (epoch + 1) * rows])) == list(range(rows))


def test_a_position_is_enough_to_go_on() -> None:
    store, plan = many(10)

    def fresh() -> Batches:
        return Batches(store, rows=plan, shape=BatchShape(3, 2), seed=4, pad_id=PAD)

    batches, position = fresh(), Position(0, 0)
    for _ in range(4):
        position = batches.window(position).following
    assert position == Position(2, 4)
    there, here = batches.window(position), fresh().window(position)
    for one, other in zip(there.micro_batches, here.micro_batches, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)


def test_window_counts_and_length_of_a_run() -> None:
    store, plan = many(10)
    batches = Batches(store, rows=plan, shape=BatchShape(2, 2), seed=0, pad_id=PAD)
    window = batches.window(Position(0, 0))
    assert (window.tokens, window.label_tokens) == (16, 12)
    assert batches.windows_in(1) == 3
    assert batches.windows_in(0.1) == 1


def test_evaluation_sees_every_row_once() -> None:
    store, plan = many(5)
    batches = Batches(store, rows=plan, shape=BatchShape(2, 9), seed=0, pad_id=PAD)
    assert [len(batch.input_ids) for batch, _ in batches.in_order()] == [2, 2, 1]


def test_ranks_share_a_window_and_an_evaluation() -> None:
    """Together they see what one process with all their rows sees; each passes equally often."""
    store, plan = many(11)
    whole = Batches(store, rows=plan, shape=BatchShape(6, 2), seed=4, pad_id=PAD)
    shared = [
        Batches(
            store,
            rows=plan,
            shape=BatchShape(2, 2),
            seed=4,
            pad_id=PAD,
            share=RankShare(rank=rank, size=3),
        )
        for rank in range(3)
    ]
    expected = whole.window(Position(0, 0))
    windows = [batches.window(Position(0, 0)) for batches in shared]
    for window in windows:
        assert window.label_tokens == expected.label_tokens
        assert window.tokens == expected.tokens
        assert window.following == expected.following
    for micro in range(2):
        rows = [row for w in windows for row in w.micro_batches[micro].input_ids.tolist()]
        assert rows == expected.micro_batches[micro].input_ids.tolist()
    evaluated = [list(batches.in_order()) for batches in shared]
    assert {len(batches) for batches in evaluated} == {2}
    counted = [b for turn in zip(*evaluated, strict=True) for b, counts in turn if counts]
    assert sum(len(batch.input_ids) for batch in counted) == 11
    assert shared[0].windows_in(1.0) == whole.windows_in(1.0)


def test_entropy() -> None:
    uniform = byte_entropy(bytes(range(256)) * 4)
    assert uniform.unigram == pytest.approx(math.log(256))
    # Each byte is always followed by the same one.
    assert uniform.order1 == pytest.approx(0.0, abs=1e-12)
    text = b"aabab"
    # Pairs aa, ab, ba, ab: after a comes b in two of three cases, after b always a.
    after_a = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert byte_entropy(text).order1 == pytest.approx(3 / 4 * after_a)
    assert byte_entropy(text).unigram == pytest.approx(
        -(3 / 5 * math.log(3 / 5) + 2 / 5 * math.log(2 / 5))
    )
    with pytest.raises(ValueError, match="at least 2 bytes"):
        byte_entropy(b"a")
