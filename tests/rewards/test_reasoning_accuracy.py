"""`ReasoningAccuracy`: only what follows the reasoning counts, as with TRL's `reasoning_accuracy_reward`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl_grpo_ext.rewards.reasoning_accuracy import ReasoningAccuracy, reasoning_accuracy

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.outcomes import Outcome

pytestmark = pytest.mark.filterwarnings("ignore:reasoning_accuracy cannot read the reference")


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningAccuracy]:
    reward = ReasoningAccuracy(timeout=5.0, budget=20.0)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [
        ("18", "<think>9*2</think> \\boxed{18}", Outcome.RIGHT),
        ("18", "<think>\\boxed{18}</think> \\boxed{17}", Outcome.WRONG),
        ("18", "<think>\\boxed{17}</think> \\boxed{18}", Outcome.RIGHT),
        ("18", "<think>\\boxed{18}</think>", Outcome.NO_ANSWER),
        ("18", "<think>\\boxed{18}", Outcome.NO_ANSWER),
        ("18", "\\boxed{18}", Outcome.NO_ANSWER),
        ("18", "</think>\\boxed{17}</think>\\boxed{18}", Outcome.RIGHT),
        ("$x+1$", "<think></think>\\boxed{1+x}", Outcome.RIGHT),
        ("no number", "<think></think>\\boxed{1+x}", Outcome.UNPARSEABLE),
        ("no number", "\\boxed{1+x}", Outcome.NO_ANSWER),
        (None, "\\boxed{1+x}", Outcome.NO_ANSWER),
        ("18", None, Outcome.NO_ANSWER),
        ("18", "9" * 300_000 + "</think>\\boxed{18}", Outcome.RIGHT),
        ("18", "</think>" + "9" * 300_000 + "\\boxed{18}", Outcome.REFUSED),
    ],
)
def test_only_what_follows_the_reasoning_counts(
    reward: ReasoningAccuracy, reference: Any, completion: Any, expected: Outcome
) -> None:
    [judgement] = reward.judge(completions=[completion], solution=[reference])
    assert judgement.outcome is expected


def test_reasoning_that_does_not_end_is_zero_even_where_the_reference_cannot_be_read(reward: ReasoningAccuracy) -> None:
    completions = ["\\boxed{18}", "</think>\\boxed{18}"]
    assert reward(completions=completions, solution=["no number"] * 2) == [0.0, None]


def test_of_several_delimiters_the_first_of_the_list_that_occurs_counts() -> None:
    reward = ReasoningAccuracy(reasoning_delimiters=["</think>", "<answer>"])
    assert reward(completions=["<answer>\\boxed{17}</think>\\boxed{18}"], solution=["18"]) == [1.0]
    assert reward(completions=["</think>\\boxed{17}<answer>\\boxed{18}"], solution=["18"]) == [0.0]
    assert reward(completions=["\\boxed{17}<answer>\\boxed{18}"], solution=["18"]) == [1.0]


parts = st.sampled_from(
    ["</think>", "<think>", "<answer>", "\\boxed{18}", "\\boxed{17}", "\\boxed{x}", " so ", "$", "answer is $x$", "\n"]
)


@given(
    completion=st.lists(parts, max_size=8).map("".join),
    reference=st.sampled_from(["18", "$x$", "none", "$18$"]),
    delimiters=st.sampled_from([None, ["</think>"], ["<answer>", "</think>"], ["</think>", "<answer>"]]),
)
@settings(max_examples=200, deadline=None)
def test_it_is_trls_verdict(completion: str, reference: str, delimiters: list[str] | None) -> None:
    rewards = pytest.importorskip("trl.rewards.accuracy_rewards", reason="TRL's own reward is the oracle here")
    ours = ReasoningAccuracy(reasoning_delimiters=delimiters)
    ours._verifier = reasoning_accuracy._verifier  # one set of processes for all examples
    theirs = rewards.reasoning_accuracy_reward([[{"content": completion}]], [reference], delimiters)
    assert ours(completions=[completion], solution=[reference]) == theirs


@pytest.mark.parametrize("delimiters", [[], "</think>", [""], ["</think>", None], 3, True])
def test_delimiters_that_cannot_work_are_refused_at_construction(delimiters: Any) -> None:
    with pytest.raises(ConfigurationError, match="reasoning_delimiters must be a list of strings that are not empty"):
        ReasoningAccuracy(reasoning_delimiters=delimiters)


def test_the_other_parameters_are_those_of_math_accuracy() -> None:
    with pytest.raises(ConfigurationError, match="reasoning_accuracy: timeout must be a positive number"):
        ReasoningAccuracy(timeout=-1)
    with pytest.raises(RewardError, match="reasoning_accuracy needs the dataset column 'solution'"):
        reasoning_accuracy(completions=["18"], answer=["18"])
    copy = pickle.loads(pickle.dumps(ReasoningAccuracy(reasoning_delimiters=["#"], outcomes={"wrong": -1})))
    assert copy(completions=["#\\boxed{17}", "# \\boxed{18}"], solution=["18", "18"]) == [-1.0, 1.0]
    assert copy.__name__ == "reasoning_accuracy"
