"""What is advised where nothing fits: the least that does, in words that a command line takes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from forebay.plan.ask import Asked, question_of
from forebay.plan.choose import choose
from forebay.plan.feasible import is_feasible, lacking_least
from forebay.plan.nearest import nearest_changes
from forebay.plan.tiers import capacity, holding

# Deep enough for a pool of two blocks to fit, and few enough blocks for a fast test.
ASKED = Asked(
    model="16e9", layers=20, vocab=8000, machine="4090", host_memory="24GiB", sequence=512
)


def changed(what: str, asked: Asked = ASKED) -> Asked:
    """What was asked, with the options that an advice names."""
    options = {name.replace("-", "_"): value for name, value in re.findall(r"--(\S+) (\w+)", what)}
    return replace(asked, **{n: int(v) if v.isdecimal() else v for n, v in options.items()})


def test_what_is_advised_fits_as_it_is_written_and_takes_as_long() -> None:
    question = question_of(ASKED)
    assert not is_feasible(question)
    changes = nearest_changes(choose(question))
    assert {"host", "nodes"} <= {
        name for one in changes for name in re.findall(r"--(\w+)", one.what)
    }
    for change in changes:
        best = choose(question_of(changed(change.what))).best
        assert best is not None, change.what
        assert best.seconds == pytest.approx(change.seconds), change.what


def test_no_gib_and_no_node_is_advised_in_vain() -> None:
    for change in nearest_changes(choose(question_of(ASKED))):
        again = changed(change.what)
        if again.host_memory != ASKED.host_memory:
            fewer = f"{int(again.host_memory.removesuffix('GiB')) - 1}GiB"
            assert not is_feasible(question_of(replace(again, host_memory=fewer))), change.what
        if again.nodes > 1:
            half = replace(again, nodes=again.nodes // 2, batch=again.batch // 2)
            assert not is_feasible(question_of(half)), change.what


def test_gradients_of_one_pass_need_half_of_what_sums_need() -> None:
    """A batch that fits in one pass is advised beside memory: 2 bytes a parameter and not 4."""
    asked = replace(ASKED, sequence=4096)
    first, *_ = nearest_changes(choose(question_of(asked)))
    assert "in one pass (--batch" in first.what
    assert "--host-memory" in first.what
    again = question_of(changed(first.what, asked))
    needed = capacity(again.profile).host
    assert needed == pytest.approx(2 * again.shape.parameters, rel=0.08)


def test_a_machine_that_holds_what_is_short_gives_it() -> None:
    question = question_of(ASKED)
    found = lacking_least(question)
    needs = holding(question.profile, found.short)
    assert set(needs) == set(found.short)
    node = replace(question.profile.node, host_bytes=needs["host"])
    given = capacity(replace(question.profile, node=node)).host
    assert 0 <= given - found.tiers.total("host") <= 2


def test_passes_that_were_asked_for_are_all_kept_in_a_smaller_micro_batch() -> None:
    asked = replace(ASKED, host_memory="128GiB", sequence=4096, micro_batch=16, batch=32)
    changes = nearest_changes(choose(question_of(asked)))
    assert changes[0].what == "a smaller micro-batch (--micro-batch 1)"
    again = choose(question_of(replace(asked, micro_batch=1))).best
    assert again is not None
    assert again.setup.workload.accumulation == 32
    assert again.seconds == pytest.approx(changes[0].seconds)
