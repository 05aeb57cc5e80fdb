"""Worked examples of the prompt samplers: six prompts that TRL takes in order, two or three a round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_grpo_ext.plugins.loading import load_prompt_sampler
from trl_grpo_ext.types import PromptOutcome, PromptPool

from .worked import Worked

_SIX = [f"prompt {number}" for number in range(1, 7)]
_SUCCESS = (1.0, 0.0, 0.5, 1.0, 0.0, 0.5)
_SOURCES = ("a", "a", "a", "b", "b", "b")
_RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROUNDS = (0, 25, 50, 100)


def _pool(rows: Sequence[Mapping[str, Any]]) -> PromptPool:
    return PromptPool(rows=rows, seed=0, order=lambda passes: range(len(rows)))


def _outcome(row: int, success: float) -> PromptOutcome:
    return PromptOutcome(
        row=row, means={"right": success}, deviations={"right": 0.0}, reward=success, deviation=0.0, length=1.0
    )


def _drawn(count: int, rounds: int, rows: Sequence[Mapping[str, Any]]) -> Callable[[Any], Mapping[str, Any]]:
    """In which rounds each of the six prompts is drawn."""

    def run(selection: Any) -> Mapping[str, Any]:
        sampler, found = load_prompt_sampler(selection), [list[int]() for _ in _SIX]
        sampler.start(_pool(rows))
        for number in range(rounds):
            drawn = sampler.draw(count, number)
            for row in drawn:
                found[row].append(number + 1)
            sampler.observe([_outcome(row, _SUCCESS[row]) for row in drawn])
        return {"drawn in rounds": found}

    return run


def _weights(selection: Any) -> Mapping[str, Any]:
    sampler = load_prompt_sampler(selection)
    sampler.start(_pool([{}] * len(_RATES)))
    sampler.observe([_outcome(row, success) for row, success in enumerate(_RATES)])
    return {"weight": [sampler.weight(sampler.estimates[row]) for row in range(len(_RATES))]}


def _opened(selection: Any) -> Mapping[str, Any]:
    sampler, shares = load_prompt_sampler(selection), []
    sampler.start(_pool([{"level": level} for level in range(10)]))
    for number in _ROUNDS:
        sampler.draw(1, number)
        shares.append(sampler.metrics()["open"])
    return {"share of the data": shares}


_PLAIN: Sequence[Mapping[str, Any]] = [{}] * 6

EXAMPLES: dict[str, Worked] = {
    "in_order": Worked("in_order", _SIX, {}, _drawn(2, 4, _PLAIN), "Two prompts a round."),
    "retire_solved": Worked(
        {"name": "retire_solved", "kept_back": 0.0},
        _SIX,
        {"success rate": _SUCCESS},
        _drawn(2, 5, _PLAIN),
        "Two prompts a round. After the first pass, prompts 1 and 4 are solved.",
    ),
    "difficulty_pool": Worked(
        {"name": "difficulty_pool", "target": 0.5},
        [f"prompt {number}" for number in range(1, len(_RATES) + 1)],
        {"success rate": _RATES},
        _weights,
        "All have been seen. The distance from the target, 0.5 at most, counts from 0 to 1.",
    ),
    "curriculum": Worked(
        {"name": "curriculum", "column": "level", "rounds": 100, "start": 0.2},
        [f"round {number}" for number in _ROUNDS],
        {},
        _opened,
        "The easiest prompts are open first: sqrt(0.04 + 0.96 · n / 100) of them in round n.",
    ),
    "mixture": Worked(
        {"name": "mixture", "column": "source", "weights": {"a": 2, "b": 1}},
        _SIX,
        {"source": _SOURCES},
        _drawn(3, 3, [{"source": source} for source in _SOURCES]),
        "Three prompts a round: two of `a` and one of `b`.",
    ),
}
