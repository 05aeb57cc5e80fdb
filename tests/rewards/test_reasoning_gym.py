"""Each task's own answers score as its package says, and an answer that is code runs nowhere and forges nothing."""

from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.reasoning_gym import ReasoningGym, reasoning_gym_rows

DATASETS = pytest.importorskip("reasoning_gym.factory", reason="the extra `reasoning_gym` is not installed").DATASETS

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # that is published
PUBLISHED = sorted({*DATASETS} - NO_ANSWER - {"composite"})
EVALUATED = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]  # by `eval`
WHOLE = ReasoningGym(extract="whole", timeout=20)
# By SymPy.
PARSED = ["simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"]


def made(**parameters: Any) -> ReasoningGym:
    """A reward that uses the workers of another one: to start some takes ten seconds."""
    reward = ReasoningGym(**parameters)
    reward._pool = WHOLE._pool
    return reward


def rows_of(tasks: list[str], size: int) -> list[dict[str, Any]]:
    return [row for task in tasks for row in reasoning_gym_rows(task, 7, size)]


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in ("task", "entry", "config", "answer")}


def judged(rows: list[dict[str, Any]], answers: list[str]) -> list[tuple[str, float | None]]:
    return [(judgement.outcome.value, judgement.score) for judgement in WHOLE.judge(answers, **columns_of(rows))]


def attacks(file: Path) -> list[str]:
    code = f"__import__('pathlib').Path({str(file)!r}).write_text('x')"
    hidden = "+".join(f"chr({ord(character)})" for character in code)
    return [
        f"[{code}]",
        f"exec({hidden})",
        f"eval({hidden})",
        "entry.update(answer='[1]') or [1]",
        "__import__('sys')._getframe(3).f_locals['entry'].update(answer='1') or 1",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['exec']({code!r})",
        "(lambda: 24)()",
    ]


@pytest.mark.parametrize("tasks", [EVALUATED, PARSED[1:], pytest.param(PUBLISHED, marks=pytest.mark.nightly)])
def test_reasoning_gym_never_runs_an_answer(tasks: list[str], tmp_path: Path) -> None:
    file = tmp_path / "planted"
    rows = rows_of(tasks, 1)
    plain = judged(rows, ["(~ ~ ~ ~"] * len(rows))
    pairs = [(row, attack, score or 0) for row, (_, score) in zip(rows, plain, strict=True) for attack in attacks(file)]
    scored = judged([row for row, _, _ in pairs], [attack for _, attack, _ in pairs])
    for (row, attack, harmless), (outcome, score) in zip(pairs, scored, strict=True):
        assert outcome == "error" or (score or 0) <= max(harmless, 0.15), (row["task"], attack, score)
    assert not file.exists()


@pytest.mark.parametrize("tasks", [[*EVALUATED, "countdown"], pytest.param(PUBLISHED, marks=pytest.mark.nightly)])
def test_the_package_s_own_answers_score_one(tasks: list[str]) -> None:
    rows = [row for row in rows_of(tasks, 2) if row["task"] not in ("arc_agi", "rearc")]  # see below
    wrong = [row for row, (_, score) in zip(rows, judged(rows, [r["answer"] for r in rows]), strict=True) if score != 1]
    assert not wrong


def test_what_is_no_answer_and_what_a_verifier_raises() -> None:
    columns = columns_of(reasoning_gym_rows("prime_factorization", 7, 1) * 4)
    right = f"<answer>x</answer> <answer>{columns['answer'][0]}</answer>"
    completions = ["no tag", "<answer>I do not know</answer>", right, ""]
    reward = made(max_characters=1000)
    outcomes = [judgement.outcome.value for judgement in reward.judge(completions, **columns)]
    assert outcomes == ["no_answer", "error", "scored", "no_answer"]
    assert reward(completions, **{**columns, "task": [None, *columns["task"][1:]]}) == [None, None, 1.0, 0.0]
    assert reward(["<answer>" + "9" * 1001 + "</answer>"] * 4, **columns) == [0.0] * 4


def test_problems_that_cannot_be_read() -> None:
    reward = made()
    with pytest.raises(RewardError, match="'task'"):
        reward(["<answer>1</answer>"])
    [right] = reasoning_gym_rows("basic_arithmetic", 1, 1)
    [arc] = reasoning_gym_rows("rearc", 1, 1)  # its verifier compares tuples, which JSON does not have
    changed: list[dict[str, Any]] = [{"config": '{"no_such": 1}'}, {"config": '{"min_terms": -1}'}, {"config": "{"}]
    changed += [{"task": "no_such_task"}, {"entry": "{"}, {"entry": "[]"}, {"entry": 5}, arc]
    rows = [{**right, **one} for one in changed]
    with pytest.warns(UserWarning, match="8 of 8"):
        assert reward([f"<answer>{row['answer']}</answer>" for row in rows], **columns_of(rows)) == [None] * len(rows)
    with pytest.raises(ConfigurationError, match="'no_such_task'"):
        reasoning_gym_rows("no_such_task", 1, 1)
