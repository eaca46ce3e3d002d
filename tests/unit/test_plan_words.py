"""The words of a plan: what is used is explained, and what lies on each other is named together."""

from __future__ import annotations

import re

import pytest

from forebay.observe.plan_picture import _COLORS, _alike, draw_comparison
from forebay.plan.ask import Asked, question_of
from forebay.plan.choose import choose
from forebay.plan.compare import comparison
from forebay.plan.explain import as_text
from forebay.plan.words import ROLES, meanings
from plan_cases import LLAMA_3B, LLAMA_8B, LLAMA_405B, question

# What a person who has never trained a model would not know.
TRADE = (
    "activations|bf16|devices?|drives?|fp16|GiB|gradients|gradient sums|hosts?|layer order|link|"
    "loss scale|masters|nodes?|nvme|offload|optimizer state|optimizer|page-locked|parameters|"
    "pass|recomputation|sequences?|stage|staging|steps?|TFLOP/s|tokens?|updates?|weights"
)


@pytest.mark.parametrize(
    ("model", "machine", "sequence"),
    [(LLAMA_3B, "h200", 2048), (LLAMA_8B, "4090", 1024), (LLAMA_405B, "4090", 1024)],
    ids=["fits", "fits with offload", "does not fit"],
)
def test_every_word_of_the_trade_is_explained_where_it_is_used(model, machine, sequence):
    text = as_text(choose(question(model, machine, sequence=sequence)))
    said, _, words = text.partition("Words:\n")
    explained = [line.partition(":")[0] for line in words.splitlines()]
    for word in set(re.findall(rf"(?<![\w-])(?:{TRADE})(?![\w-])", said)):
        assert any(word in one or word.rstrip("s") in one for one in explained), word


def test_every_role_of_the_table_has_a_meaning():
    for name in ROLES.values():
        assert any(one.startswith(f"{name}:") or name == "weights" for one in meanings(name)), name


def test_every_role_of_the_table_is_in_the_picture():
    assert set(_COLORS) == set(ROLES)


def test_words_that_are_not_used_are_not_explained():
    assert list(meanings("nothing of the trade, unhosted")) == []


def test_the_comparison_says_of_what_it_is_and_marks_the_recommended_way():
    table = comparison(question(LLAMA_8B, "4090", sequence=1024))
    first, *rest = table.as_text().splitlines()
    assert first == (
        "8.03 billion parameters on 1 device (NVIDIA GeForce RTX 4090), 8 x 1,024 tokens an update"
    )
    (marked,) = [line for line in rest if line.startswith("-> stage")]
    assert table.choice.best.setup.label in marked


def test_curves_that_lie_on_each_other_have_one_line_with_all_their_names(tmp_path):
    table = comparison(question(LLAMA_8B, "4090", sequence=1024))
    drawn = _alike(table)
    named = [label for _, labels in drawn for label in labels]
    known = [
        label
        for label, points in table.curves.items()
        if any(point.tokens_per_second for point in points)
    ]
    assert sorted(named) == sorted(known)
    assert len(drawn) < len(known)
    draw_comparison(tmp_path / "compare.svg", table)


def test_shares_that_are_hardly_anything_are_not_told_as_none_of_it():
    asked = Asked(model="30B", machine="4090", sequence=512, batch=16)
    text = as_text(choose(question_of(asked)))
    assert "the state of the first (1% of it) stays on the device" in text
    assert "hardly any stays in host memory; the rest comes from drives" in text
    assert "one more drive in each node: saves 36" in text
    assert "forebay train --gradient-checkpointing" in text
