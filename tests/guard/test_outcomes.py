"""What each outcome becomes, and how outcomes are counted."""

from typing import Any

import pytest

from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import ConfigurationError, PluginParameterError, RewardError
from trl_grpo_ext.guard.outcomes import Judgement, Outcome, OutcomePolicy, shown
from trl_grpo_ext.types import Part, Parts

EVERY = tuple(Outcome)


def judged(*outcomes: Outcome) -> list[Judgement]:
    return [Judgement(outcome) for outcome in outcomes]


def test_each_outcome_has_a_default_and_can_be_changed() -> None:
    outcomes = (Outcome.RIGHT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNPARSEABLE, Outcome.TIMEOUT, Outcome.DIED)
    assert OutcomePolicy("r", EVERY).scores(judged(*outcomes)) == [1.0, 0.0, 0.0, None, 0.0, 0.0]
    changed = {"timeout": None, "wrong": -1, "right": 2.5, "error": 0.0, "died": "raise"}
    policy = OutcomePolicy("r", EVERY, changed)
    changed_ones = judged(Outcome.TIMEOUT, Outcome.WRONG, Outcome.RIGHT, Outcome.ERROR, Outcome.REFUSED)
    assert policy.scores(changed_ones) == [None, -1.0, 2.5, 0.0, 0.0]
    with pytest.raises(RewardError, match="'died'"):
        policy.scores(judged(Outcome.DIED))


def test_parts_keep_a_verdicts_scores_and_get_a_failures_value() -> None:
    policy = OutcomePolicy("r", EVERY, {"wrong": 0.2, "no_answer": -1.0, "timeout": None})
    parts = Parts([Part("a", 1.0, 2.0, (0, 1)), Part("b", 0.0, 1.0, None), Part("c", None, 1.0, None)], 0.7)
    outcomes = (Outcome.SCORED, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.TIMEOUT)
    *scores, none = policy.scores([Judgement(outcome, score=parts) for outcome in outcomes])
    assert (scores, none) == ([0.7, 0.2, -1.0], None)
    found = [[part.score for part in score.parts] for score in scores if isinstance(score, Parts)]
    assert found == [[1.0, 0.0, None], [1.0, 0.0, None], [-1.0, -1.0, None]]


def test_a_score_of_the_rewards_own_is_never_replaced() -> None:
    policy = OutcomePolicy("r", EVERY)
    assert policy.scores([Judgement(Outcome.SCORED, score=0.3), Judgement(Outcome.NONE)]) == [0.3, None]
    with pytest.raises(ConfigurationError, match=r"r .*'scored'"):
        OutcomePolicy("r", EVERY, {"scored": 1.0})


def test_policy_refuses_unknown_outcomes() -> None:
    with pytest.raises(PluginParameterError, match=r"gsm8k_accuracy .*'timeout'"):
        load_rewards([{"name": "gsm8k_accuracy", "outcomes": {"timeout": 0.0}}])


def test_policy_logs_every_outcomes_share() -> None:
    policy = OutcomePolicy("r", (Outcome.RIGHT, Outcome.WRONG, Outcome.TIMEOUT))
    metrics: dict[str, float] = {}
    extra: dict[str, list[Any]] = {}
    judgements = judged(Outcome.RIGHT, Outcome.TIMEOUT, Outcome.RIGHT, Outcome.RIGHT)
    policy.log(judgements, metrics.__setitem__, extra.__setitem__)
    assert metrics == {"outcomes/r/right": 0.75, "outcomes/r/wrong": 0.0, "outcomes/r/timeout": 0.25}
    assert extra == {"r_outcome": ["right", "timeout", "right", "right"]}
    policy.log([], metrics.__setitem__, None)  # no completions, no shares


def test_what_a_model_wrote_is_quoted_escaped_and_short() -> None:
    assert shown("a\x1b[31m\n\u202eb\ud800") == r"'a\x1b[31m\n\u202eb\ud800'"
    assert len(shown("x" * 10**6)) < 300
