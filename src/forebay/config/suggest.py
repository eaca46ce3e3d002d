"""Did you mean: the valid keys nearest to one that is not known.

The distance is the number of deletions, insertions, substitutions and swaps of neighbours
(optimal string alignment), upper and lower case taken as one and "-" as "_".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forebay.config.keys import Key

__all__ = ["distance", "join", "nearest", "suggestion"]

# More neighbours than this help nobody.
_MOST_SUGGESTIONS: Final = 4
_MOST_LISTED: Final = 12

# What the same things are called elsewhere (transformers, other trainers), where no letters help.
_ELSEWHERE: Final = {
    "learning_rate": "lr",
    "warmup_steps": "warmup_num_steps",
    "num_warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
    "max_steps": "total_num_steps",
    "max_grad_norm": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "adam_epsilon": "eps",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "stage",
}


def distance(first: str, second: str) -> int:
    """Optimal string alignment distance.

    Example:
        >>> distance("stge", "stage"), distance("satge", "stage")
        (1, 1)
    """
    before: list[int] = []
    last = list(range(len(second) + 1))
    for row, char in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            cost = min(
                last[column] + 1,
                current[column - 1] + 1,
                last[column - 1] + (char != other),
            )
            if row > 1 and column > 1 and char == second[column - 2] and first[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, last = last, current
    return last[-1]


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """The candidates at the smallest distance, if that is small for the name's length.

    Candidates within one edit as typed are always among them, so that of two keys as alike as
    `fp16` and `bf16` both are named.
    """
    folded = _fold(name)
    limit = max(1, len(name) // 3)
    near: dict[str, int] = {}
    for candidate in candidates:
        # The lengths alone are a lower bound, and spare most of the work.
        if abs(len(candidate) - len(name)) > limit:
            continue
        edits = distance(folded, _fold(candidate))
        if edits <= limit:
            near[candidate] = edits
    best = min(near.values(), default=0)
    return sorted(
        (c for c, edits in near.items() if edits == best or distance(name, c) <= 1),
        key=lambda c: (near[c], distance(name, c), c),
    )


def suggestion(name: str, *, level: str, levels: Mapping[str, Mapping[str, Key]]) -> str:
    """The hint for a name that the level does not know.

    The level's own keys come first, those among them that begin with it or have its words inside,
    then the same name or path elsewhere, then near ones elsewhere.

    Args:
        name: The key as written.
        level: Path of the section that it stands in.
        levels: Section path -> accepted name -> row.
    """
    folded, own = _fold(name), nearest(name, levels[level])
    typed = [known for known in own if distance(_fold(name), _fold(known)) <= 1]
    meant = _ELSEWHERE.get(_fold(name))
    is_own = any(_fold(known) == _fold(name) for known in levels[level])
    if meant is not None and not is_own:
        others = [other for other, known in levels.items() if meant in known]
        places = [level] if meant in levels[level] else others
        if places:
            found = [join(level, known) for known in typed]
            return _question([*found, *(join(place, meant) for place in places)])
    exact = [
        join(other, name) for other, names in levels.items() if other != level and name in names
    ]
    exact = exact or [path for path in _paths(levels) if _fold(path).replace(".", "_") == folded]
    longer = [known for known in levels[level] if _fold(known).startswith(f"{folded}_")]
    if "_" in name and not exact and not longer:
        # two words or more, inside a longer name
        longer = [known for known in levels[level] if f"_{folded}_" in f"_{_fold(known)}_"]
    if typed or (own and not exact and not longer):
        return _question(join(level, known) for known in own)
    if longer:
        return _question(join(level, known) for known in longer)
    if exact:
        return _question(exact)
    elsewhere = nearest(name, {known for names in levels.values() for known in names})
    found = [
        join(other, known)
        for known in elsewhere
        for other, names in levels.items()
        if known in names
    ]
    if found:
        return _question(found)
    listed = ", ".join(list(levels[level])[:_MOST_LISTED])
    more = ", ..." if len(levels[level]) > _MOST_LISTED else ""
    return f"the keys of {level or 'the top level'} are {listed}{more}"


def join(level: str, name: str) -> str:
    """Full path of a key."""
    return f"{level}.{name}" if level else name


def _paths(levels: Mapping[str, Mapping[str, Key]]) -> list[str]:
    return [join(level, known) for level, names in levels.items() for known in names]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")


def _question(paths: Iterable[str]) -> str:
    unique = list(dict.fromkeys(paths))[:_MOST_SUGGESTIONS]
    return f"did you mean {' or '.join(unique)}?"
