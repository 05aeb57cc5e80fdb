"""The rewards and the prompt of `configs/smollm2_1.7b_tutorial.yaml`."""

import yaml
from tutorial.rewards import tutorial_accuracy, tutorial_format

from tests.recipes.launching import RECIPES
from trl_grpo_ext import load_rewards

SETTINGS = yaml.safe_load((RECIPES / "configs" / "smollm2_1.7b_tutorial.yaml").read_text())

# The reference is 18. Completion, correctness, format.
TABLE = [
    ("<think>a\nb\n\nc</think>\n\nSo:\n<answer>The answer is 18.</answer>", 1.0, 0.5),
    ("<think>x</think><answer>-18</answer> and 19 more", 1.0, 0.5),  # the sign is no digit
    ("<think>x</think><answer>17</answer>", 0.0, 0.5),
    ("<think>x</think><answer>18.0</answer>", 0.0, 0.0),
    ("<think>x</think><answer>18", 0.0, 0.0),
    ("\n<think>x</think><answer>18</answer>", 0.0, 0.0),  # not from the beginning
    ("<think>x</think><answer>none</answer><answer>18</answer>", 1.0, 0.5),  # the first that matches
    ("<think>x</think><answer>19</answer><answer>18</answer>", 0.0, 0.5),
    ("", 0.0, 0.0),
]


def test_the_table_of_completions() -> None:
    for form in (lambda text: text, lambda text: [{"role": "assistant", "content": text}]):
        completions = [form(text) for text, *_ in TABLE]
        answers = ["9 + 9 = 18\n#### 18"] * len(TABLE)
        assert tutorial_accuracy(completions, answer=answers) == [right for _, right, _ in TABLE]
        assert tutorial_format(completions) == [points for *_, points in TABLE]


def test_both_rewards_pay_the_worked_example_of_the_run_file() -> None:
    prompt = SETTINGS["system_prompt"]
    example = [prompt[prompt.rindex("<think>") :]]
    scores = [reward(completions=example, answer=["6"]) for reward in load_rewards(SETTINGS["rewards"])]
    assert scores == [[1.0], [0.5]]
