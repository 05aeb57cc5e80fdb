"""`weighted`, `gated`, `product` and `per_column`, by values computed by hand and by what must always hold."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.guard.guarded import guarded
from trl_grpo_ext.plugins.loading import RewardList
from trl_grpo_ext.rewards.combinators import Gated, PerColumn, Product, Weighted
from trl_grpo_ext.types import WHOLE, Part, Parts, Place

Reward = Callable[..., list[float | None]]
MATCH = {"name": "regex_match", "pattern": "1"}
GATED = {"reward": MATCH, "gate": "think_format"}


def first(first: Sequence[float | None], **columns: Any) -> list[float | None]:
    """The dataset's column of this name."""
    return list(first)


def second(second: Sequence[float | None], **columns: Any) -> list[float | None]:
    return list(second)


HERE = Place(0, 1)


def spanned(first: Sequence[float | None], **columns: Any) -> list[float | None]:
    return [None if score is None else Parts([Part("a", score, 0.5, (0, 1)), Part("b", None)]) for score in first]


def scored(reward: Reward, first: Sequence[float | None], second: Sequence[Any] = (), **columns: Any) -> Any:
    rows = [str(row) for row in range(len(first))]
    ids = [[int(row)] for row in rows]
    own = {"first": first, "second": second or [0.0] * len(first)}
    return reward(prompts=rows, completions=rows, completion_ids=ids, **own, **columns)


_scores = st.none() | st.floats(-100, 100)
_columns = st.lists(st.tuples(_scores, _scores, st.sampled_from(["a", "b", "c"])), max_size=8)


def test_weighted_is_the_sum_over_those_that_said_something() -> None:
    weighted = Weighted([first, second], weights=[2.0, -0.5])
    assert scored(weighted, [1.0, None, 3.0, None, math.nan], [4.0, 4.0, None, None, 2.0]) == [0.0, -2.0, 6.0, None, -1]
    with pytest.raises(ConfigurationError, match="weights"):
        Weighted(RewardList([first, second], [3.0, 1.0]), weights=[1, 1])


def test_weighted_has_the_parts_of_its_rewards_and_what_has_none_as_parts() -> None:
    [score, silent, plain] = scored(Weighted([spanned, second], [2.0, -1.0]), [3.0, None, 1.0], [1.0, None, None])
    unsaid = Part("spanned/b", None, 2.0, (WHOLE,))
    own, other = Part("spanned/a", 3.0, 1.0, (HERE,)), Part("second", -1.0, 1.0, (WHOLE,))
    assert (score, score.parts) == (5.0, (own, unsaid, other))
    assert silent is None
    assert (plain, plain.parts) == (2.0, (Part("spanned/a", 1.0, 1.0, (HERE,)), unsaid))


def test_gated_counts_only_where_the_gate_holds() -> None:
    reward = Gated(first, second, threshold=0.5, otherwise=-1.0)
    assert scored(reward, [7.0, 7.0, 7.0, None, None], [0.5, 0.4, None, 1.0, 0.0]) == [7.0, -1.0, None, None, -1.0]
    assert scored(Gated(first, second, otherwise=None), [7.0, 7.0], [0.9, 1.0]) == [None, 7.0]
    [inside, outside] = scored(Gated(spanned, second), [2.0, 2.0], [1.0, 0.0])
    assert inside.parts[0] == Part("a", 2.0, 0.5, (HERE,))
    assert (type(outside), outside) == (float, 0.0)


def test_product_is_none_where_any_is_none_and_scales_parts() -> None:
    reward = Product([first, second])
    assert scored(reward, [2.0, 0.0, None, 0.0, None], [3.0, 5.0, 2.0, None, None]) == [6.0, 0.0, None, None, None]
    [score] = scored(Product(RewardList([spanned, second], [2.0, 1.0])), [2.0], [5.0])
    assert score == 20.0
    assert score.parts == (Part("spanned/a", 20.0, 0.5, (HERE,)), Part("spanned/b", None, 1.0, (WHOLE,)))
    assert scored(Product(RewardList([first, second], [0.5, 4.0])), [3.0], [5.0]) == [30.0]


@given(_columns)
def test_per_column_is_each_reward_on_its_rows(rows: list[Any]) -> None:
    routed = PerColumn("task", {"a": first, "b": second}, default=Weighted([first, second]))
    scores = scored(routed, [r[0] for r in rows], [r[1] for r in rows], task=[r[2] for r in rows])
    for value, reward in (("a", first), ("b", second), ("c", Weighted([first, second]))):
        mine = [row for row, entry in enumerate(rows) if entry[2] == value]
        alone = scored(reward, [rows[i][0] for i in mine], [rows[i][1] for i in mine]) if mine else []
        assert [scores[i] for i in mine] == alone


def test_per_column_calls_each_reward_once() -> None:
    calls = []

    def note(completions: list[str], extra: list[str], other: str, **columns: Any) -> list[float]:
        calls.append((completions, extra, other, columns["trainer_state"]))
        return [1.0] * len(completions)

    columns = {"task": ["x", "z", "x"], "extra": ["p", "q", "r"], "other": "abc", "trainer_state": (1, 2, 3)}
    with pytest.warns(UserWarning, match="'z'"):
        assert scored(PerColumn("task", {"x": note, "y": note}), [0.0] * 3, **columns) == [1.0, None, 1.0]
    assert calls == [(["0", "2"], ["p", "r"], "abc", (1, 2, 3))]


def test_values_are_compared_as_text_and_those_without_a_reward_counted() -> None:
    for key, value in ((1, "1"), ("1", 1), (True, True)):
        assert scored(PerColumn("task", {key: first}), [3.0], task=[value]) == [3.0]
    metrics = []
    columns: dict[str, Any] = {"log_metric": lambda name, value: metrics.append((name, value))}
    with pytest.warns(UserWarning, match=r"'c', 'x\\ny' .*'task'"):
        scores = scored(PerColumn("task", {"a": first}), [1.0] * 4, task=["c", "a", "x\ny", "c"], **columns)
    assert scores == [None, 1.0, None, None]
    scored(PerColumn("task", {"a": first}, default=second), [1.0, 2.0], task=["c", "a"], **columns)
    assert metrics == [("per_column/task/unrouted", share) for share in (0.75, 0.5)]


def test_per_column_keeps_logs_and_parts_in_rows() -> None:
    def logs(first: list[float], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("seen", [f"saw {value}" for value in first])
        return first

    logged = {}
    reward = PerColumn("task", {"a": logs, "b": logs, "c": second})
    scored(reward, [1.0, 2.0, 3.0], task=["b", "c", "a"], log_extra=lambda name, values: logged.update({name: values}))
    assert logged == {"seen": ["saw 1.0", None, "saw 3.0"]}
    [score] = scored(PerColumn("task", {"a": spanned}), [2.0], task=["a"])
    assert score.parts[0] == Part("a", 2.0, 0.5, (HERE,))


class Early:
    """Notes what it was started with."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start_workers(self) -> None:
        self.started.append("workers")

    def start_scoring(self, completions: list[str], **columns: Any) -> None:
        self.started.append(completions)

    def __call__(self, **columns: Any) -> Any: ...


def test_combinators_begin_early_with_their_rows() -> None:
    columns = {"completions": ["x", "y", "z"], "task": ["a", "b", "a"], "first": [1.0] * 3}
    for make, rows in (
        (lambda early: Product([first, early]), ["x", "y", "z"]),
        (lambda early: Gated(early, first), ["x", "y", "z"]),
        (lambda early: PerColumn("task", {"a": early, "c": first}), ["x", "z"]),
        (lambda early: PerColumn("task", {"a": first}, default=guarded(early, batch_size=None)), ["y"]),
    ):
        early = Early()
        reward: Any = make(early)
        reward.start_scoring(**columns)
        assert early.started == [rows]
    load_rewards([Weighted([early := Early()])])
    assert early.started == ["workers"]


def test_combinators_count_outcomes_apart() -> None:
    inside = {"name": "per_column", "column": "task", "rewards": {"math": MATCH, "code": {"name": "gated", **GATED}}}
    metrics: dict[str, float] = {}
    extras: dict[str, Any] = {}
    columns = {"task": ["math", "code", "math", "code"], "log_metric": metrics.__setitem__}
    for reward in load_rewards([MATCH, inside]):
        reward(completions=["1", "1", "no", "no"], log_extra=extras.__setitem__, **columns)
    names = ("regex_match", "per_column.math.regex_match", "per_column.code.gated.regex_match")
    assert {name for name in metrics if name.endswith("/scored")} == {f"outcomes/{name}/scored" for name in names}
    assert extras == {
        "regex_match_outcome": ["scored"] * 4,
        "per_column.math.regex_match_outcome": ["scored", None, "scored", None],
        "per_column.code.gated.regex_match_outcome": [None, "scored", None, "scored"],
    }
