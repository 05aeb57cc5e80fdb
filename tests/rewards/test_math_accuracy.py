"""`MathAccuracy` as a reward: outcomes and what they become, columns, parameters, processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy, math_accuracy

NEVER_ENDS = "9^{9^{9^9}}"


@pytest.fixture(scope="module")
def reward() -> Iterator[MathAccuracy]:
    reward = MathAccuracy(timeout=1.0, budget=3.0)
    yield reward
    reward.close()


def outcome(reward: MathAccuracy, reference: Any, completion: Any) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [judgement] = reward.judge(completions=[completion], solution=[reference])
    return judgement.outcome


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [
        ("18", "\\boxed{18}", Outcome.RIGHT),
        ("$x+1$", "\\boxed{1+x}", Outcome.RIGHT),
        ("18", "\\boxed{17}", Outcome.WRONG),
        ("$x+1$", "\\boxed{x+2}", Outcome.WRONG),
        ("18", "I don't know", Outcome.NO_ANSWER),
        ("$x+1$", "I don't know", Outcome.NO_ANSWER),
        ("$x+1$", "", Outcome.NO_ANSWER),
        ("", "\\boxed{18}", Outcome.UNPARSEABLE),
        ("no number", "I don't know", Outcome.UNPARSEABLE),
        (None, "\\boxed{18}", Outcome.UNPARSEABLE),
        (18, "\\boxed{18}", Outcome.UNPARSEABLE),
        ("18", f"\\boxed{{{NEVER_ENDS}}}", Outcome.TIMEOUT),
        ("$x+1$", f"\\boxed{{{NEVER_ENDS}}}", Outcome.TIMEOUT),
        (f"${NEVER_ENDS}$", "\\boxed{18}", Outcome.UNPARSEABLE),
        (f"${NEVER_ENDS}$", f"\\boxed{{{NEVER_ENDS}}}", Outcome.RIGHT),
        (f"${'(' * 500}1{')' * 500}$", "\\boxed{18}", Outcome.UNPARSEABLE),
        ("18", f"\\boxed{{{'9' * 5000}}}", Outcome.REFUSED),
        ("$x+1$", f"\\boxed{{{'9' * 5000}}}", Outcome.REFUSED),
        ("no number", f"\\boxed{{{'9' * 5000}}}", Outcome.UNPARSEABLE),
        ("18", "x" * 200_001, Outcome.REFUSED),
        ("18", "x" * 199_000 + "\\boxed{18}", Outcome.RIGHT),
        ("18", None, Outcome.NO_ANSWER),
        ("18", [{"role": "assistant", "content": None}], Outcome.NO_ANSWER),
        ("18", [{"role": "assistant", "content": "\\boxed{18}"}], Outcome.RIGHT),
        ("18", "\ud800\x00 \\boxed{18}", Outcome.RIGHT),
        ("$x$", "\ud800\x00 \\boxed{x}", Outcome.RIGHT),
        ("\ud800", "\\boxed{18}", Outcome.UNPARSEABLE),
    ],
)
def test_every_way_to_end_has_its_outcome(
    reward: MathAccuracy, reference: Any, completion: Any, expected: Outcome
) -> None:
    assert outcome(reward, reference, completion) is expected


def test_neither_side_is_blamed_for_the_other(reward: MathAccuracy) -> None:
    references = ["$x+1$", f"${NEVER_ENDS}$", "$x+1$", f"${NEVER_ENDS}$"]
    completions = [f"\\boxed{{{NEVER_ENDS}}}", "\\boxed{18}", "\\boxed{x+1}", "\\boxed{19}"]
    with pytest.warns(UserWarning, match=r"cannot read the reference '\$9\^.*\(2 of 4 in this batch\)"):
        judgements = reward.judge(completions=completions, solution=references)
    found = [judgement.outcome for judgement in judgements]
    assert found == [Outcome.TIMEOUT, Outcome.UNPARSEABLE, Outcome.RIGHT, Outcome.UNPARSEABLE]


def test_a_batch_of_any_size_has_one_score_per_completion(reward: MathAccuracy) -> None:
    assert reward(prompts=[], completions=[], completion_ids=[], solution=[]) == []
    completions = ["\\boxed{x+1}", "\\boxed{2}", "none"] * 50
    assert reward(completions=completions, solution=["$1+x$"] * 150, trainer_state=None) == [1.0, 0.0, 0.0] * 50


def test_the_policy_changes_what_outcomes_become() -> None:
    completions, references = ["\\boxed{18}", "\\boxed{17}", "none"], ["18"] * 3
    reward = MathAccuracy(outcomes={"right": 2, "wrong": -1.0, "no_answer": None})
    assert reward(completions=completions, solution=references) == [2.0, -1.0, None]
    with pytest.raises(RewardError, match=r"math_accuracy: the outcome at row 2 is 'no_answer'.*which raises"):
        MathAccuracy(outcomes={"no_answer": "raise"})(completions=completions, solution=references)


def test_outcomes_and_what_was_read_are_logged(reward: MathAccuracy) -> None:
    metrics: dict[str, float] = {}
    columns: dict[str, list[Any]] = {}
    completions = ["\\boxed{18}", "\\boxed{x + 1}", "none", "\\boxed{\ud800}", f"\\boxed{{{'1+' * 5000}1}}"]
    reward(
        completions=completions,
        solution=["18", "$1+x$", "18", "$y$", "$y$"],
        log_metric=metrics.__setitem__,
        log_extra=columns.__setitem__,
    )
    assert metrics["outcomes/math_accuracy/right"] == 0.4
    assert metrics["outcomes/math_accuracy/no_answer"] == 0.2
    assert metrics["outcomes/math_accuracy/died"] == 0.0
    assert columns["math_accuracy_outcome"][:4] == ["right", "right", "no_answer", "wrong"]
    assert columns["solution"] == ["18", "$1+x$", "18", "$y$", "$y$"]
    assert columns["gold_parsed"][:4] == ["18", "1+x", "18", "y"]
    assert columns["answer_parsed"][:3] == ["18", "x + 1", ""]
    assert all(len(text) <= 1000 and text.encode() for column in columns.values() for text in column if text)


def test_a_missing_column_is_an_error_that_names_the_columns_present() -> None:
    with pytest.raises(RewardError, match=r"needs the dataset column 'solution'.*present are \['answer'\]"):
        math_accuracy(prompts=["?"], completions=["18"], completion_ids=[[1]], trainer_state=None, answer=["18"])
    with pytest.raises(RewardError, match="2 completions but 1 entries in the column 'solution'"):
        math_accuracy(completions=["18", "19"], solution=["18"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": True}, "timeout must be a positive number of seconds, got True"),
        ({"timeout": float("nan")}, "timeout must be .* got nan"),
        ({"budget": -1.0}, "budget must be .* got -1.0"),
        ({"budget": "4"}, "budget must be .* got '4'"),
        ({"budget": None}, "budget must be .* got None"),
        ({"workers": 0}, "workers must be an integer from 1, or None, got 0"),
        ({"memory_mb": 1.5}, "memory_mb must be an integer from 1, or None, got 1.5"),
        ({"max_characters": 0}, "max_characters must be an integer from 1, got 0"),
        ({"cache": -1}, "cache must be an integer from 0, got -1"),
        ({"cache": False}, "cache must be an integer from 0, got False"),
        ({"outcomes": {"scored": 1.0}}, "has no outcome 'scored' to set"),
        ({"outcomes": {"wrong": float("inf")}}, "must become a finite number"),
    ],
)
def test_parameters_that_cannot_work_are_refused_at_construction(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"math_accuracy.*{message}"):
        MathAccuracy(**parameters)


def test_a_verdict_is_asked_for_once_and_the_oldest_are_forgotten() -> None:
    reward = MathAccuracy(cache=2, workers=1)
    asked: list[int] = []
    run = reward._verifier.pool.run

    def counting(jobs: Any, **limits: Any) -> Any:
        asked.append(len(jobs))
        return run(jobs, **limits)

    reward._verifier.pool.run = counting  # type: ignore[method-assign]
    reward(completions=["\\boxed{x}"] * 8, solution=["$x$"] * 8)
    assert asked == [1, 1]  # the first loads the workers
    reward(completions=["\\boxed{x}", "\\boxed{y}"], solution=["$x$", "$x$"])
    assert asked == [1, 1, 1]
    reward(completions=["\\boxed{z}", "\\boxed{x}"], solution=["$x$", "$x$"])
    reward(completions=["\\boxed{y}"], solution=["$x$"])
    assert asked == [1, 1, 1, 1, 1]
    reward.close()


def test_the_longer_limit_of_characters_is_the_users() -> None:
    reward = MathAccuracy(max_characters=100)
    assert outcome(reward, "18", "x" * 90 + "\\boxed{18}") is Outcome.RIGHT
    assert outcome(reward, "18", "x" * 91 + "\\boxed{18}") is Outcome.REFUSED


def test_it_pickles_and_works_afterwards(reward: MathAccuracy) -> None:
    reward(completions=["\\boxed{x}"], solution=["$x$"])
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(completions=["\\boxed{1+x}", "\\boxed{18}"], solution=["$x+1$", "18"]) == [1.0, 1.0]
    assert (copy.__name__, copy.timeout, copy.budget) == ("math_accuracy", 1.0, 3.0)
    copy.close()


def test_it_works_in_other_threads(reward: MathAccuracy) -> None:
    scores: list[list[float | None]] = [[]] * 4

    def score(thread: int) -> None:
        answers = [f"\\boxed{{x+{thread * 100 + row}}}" for row in range(20)]
        scores[thread] = reward(completions=answers, solution=["$x+203$"] * 20)

    threads = [threading.Thread(target=score, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[float(thread * 100 + row == 203) for row in range(20)] for thread in range(4)]
    assert scores == expected


def test_importing_and_plain_numbers_start_no_process_and_import_no_sympy() -> None:
    script = (
        "import os, sys, threading\n"
        "from trl_grpo_ext.rewards.math_accuracy import math_accuracy\n"
        "assert math_accuracy(completions=['\\\\boxed{18}', 'none'], solution=['18', '18']) == [1.0, 0.0]\n"
        "assert not {'sympy', 'math_verify', 'torch', 'transformers', 'trl'} & set(sys.modules)\n"
        "assert open(f'/proc/self/task/{os.getpid()}/children').read() == ''\n"
        "assert math_accuracy(completions=['\\\\boxed{x}'], solution=['$x$']) == [1.0]\n"
        "assert not {'sympy', 'math_verify', 'torch', 'transformers', 'trl'} & set(sys.modules)\n"
    )
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
