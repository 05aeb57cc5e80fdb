"""The verdicts of `gsm8k_accuracy`: right, wrong, nothing to compare with, and a wrong call."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.guard.test_messages import MESSAGES
from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

SOLUTION = "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def score(completion: Any, answer: Any = SOLUTION) -> float | None:
    [value] = gsm8k_accuracy(prompts=["How much?"], completions=[completion], completion_ids=[[1]], answer=[answer])
    return value


RIGHT = [
    *(("#### 18", SOLUTION), ("#### 18.00", "18"), ("The answer is $18.", "$18"), ("18%", 18), ("36/2", 18.0)),
    *(("The answer is 1,234 eggs", "#### 1234"), ("The answer is 1234 eggs", "#### 1,234"), ("one half is 0.5", "1/2")),
    *((r"\boxed{\frac{1}{2}}", 0.5), ("The answer is 17.999999999999996", 18), ("#### 0.30000000000000004", 0.3)),
    *(("The answer is 33.33", "33.33"), ("The answer is -5", "#### -5"), ("0 are left", 0)),
    *(("The club has $60 million.", "#### 60"), ("The club has $60 million.", "#### 60,000,000")),
    ("The answer is 17. No: the answer is 18.", 18),
]
WRONG = [
    *(("#### 17", SOLUTION), ("The answer is 7.41", "7"), ("The answer is 7", "7.41"), ("The answer is 17.99", 18)),
    *(("The answer is 33.333", "33.33"), ("The answer is -18", 18), ("The answer is 181", 18), ("", SOLUTION)),
    *(("The answer is 1,800", 18), ("The answer is 18.5", 18), ("The answer is 12:30", 12), ("", 0)),
    *(("The answer is 1e-30", 0), ("9" * 200_000, 18), ("I don't know.", SOLUTION), ("\x00\ud800", SOLUTION)),
    ("The answer is 18. No: the answer is 17.", 18),
]


def test_the_same_number_scores_one_another_or_none_scores_zero() -> None:
    assert [pair for pair in RIGHT if score(*pair) != 1.0] == []
    assert [pair for pair in WRONG if score(*pair) != 0.0] == []


@pytest.mark.parametrize(
    "answer", ["", "#### none", "9 eggs for 18 dollars", "#### 18!", "#### 18j", None, float("nan"), True, [18]]
)
def test_a_reference_without_a_number_scores_none_and_warns(answer: object) -> None:
    with pytest.warns(UserWarning, match="1 of 2 "):
        scores = gsm8k_accuracy(completions=["#### 18", "#### 18"], answer=[answer, "#### 18"])
    assert scores == [None, 1.0]


def test_gsm8k_reads_the_last_message() -> None:
    assert [score(completion) for completion, _ in MESSAGES] == [float("18" in text) for _, text in MESSAGES]


SEVERAL = [
    *("{0}:{1}", "{1}:{0}", "{1} : {0}", "{0} or {1}", "{1} or {0}", "{0} (or {1})", "{0} eggs or {1} eggs"),
    *("{0}; {1}", "{0}, {1}", "{1}, {0}", "{0}, {1}, 5", "{0} and {1}", "{1} and {0}", "{0} vs {1}", "{0} & {1}"),
    *("${0} or ${1}", "{1}-{0}", "{1} to {0}", "{0} to {1}", "between {1} and {0}", "x = {0} or x = {1}", "{0} ± 1"),
    *("{0} +/- 1", "> {0}", "x < {0}", "{0}+", "{0} or more", "{0} or fewer", "{0} and up", "{0} hours 30 minutes"),
    "{0} feet 6 inches",
]
"""What says more than the number {0}."""
EXPLICIT = ("#### {}", "\\boxed{{{}}}", "The answer is {}.", "**Answer:** {}", "<answer>{}</answer>")


def test_a_number_that_is_one_of_several_is_not_the_answer() -> None:
    for several in SEVERAL:
        for explicit in EXPLICIT:
            completion = "Some work.\n" + explicit.format(several.format(4, 5))
            assert (score(completion, "#### 4"), score(completion, "#### 5")) == (0.0, 0.0), completion
    assert (score("So she has 4 or 5.", "4"), score("The ratio is 4:5.", "5")) == (0.0, 0.0)
    with pytest.warns(UserWarning, match="cannot read"):
        assert score("4", "#### 4 or more") is None


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_scores_the_whole_data_set(split: str) -> None:
    folder = os.environ.get("TRL_GRPO_EXT_GSM8K")
    if not folder:
        pytest.skip("TRL_GRPO_EXT_GSM8K names no directory with GSM8K's train.jsonl and test.jsonl")
    lines = (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    references = [int(answer.rpartition("####")[2].replace(",", "")) for answer in answers]
    solutions = [answer.rpartition("####")[0] for answer in answers]
    renderings = {
        "{solution}\nThe answer is ${answer:,}.00.": 0,
        "<think>{solution}</think>\n\\boxed{{{answer}}}": 0,
        "{solution}#### {answer}\n\nQuestion: How many?\nAnswer: {solution}#### 1234567": 0,
        "{solution}The answer is {answer} eggs, from 2 ducks.": -1,
        "{solution}**Answer:** {answer:.1f}": 10,
    }
    for rendering, offset in renderings.items():
        pairs = zip(solutions, references, strict=True)
        completions = [rendering.format(solution=text, answer=number + offset) for text, number in pairs]
        scores = gsm8k_accuracy(completions=completions, answer=answers)
        assert set(scores) == {0.0 if offset else 1.0}, rendering
