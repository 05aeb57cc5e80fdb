"""GRPO on tasks of reasoning-gym, one or a weighted mixture, with a real language model on the CPU.

    accelerate launch recipes/reasoning_gym_grpo.py
    accelerate launch recipes/reasoning_gym_grpo.py --tasks '{name: gcd, weight: 2, max_value: 30}' spell_backward
    accelerate launch recipes/reasoning_gym_grpo.py --tasks countdown --extract answer --max_completion_length 512 \
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct

The reward is `reasoning_gym`, the task's own verifier. `solved_<task>` is measured beside it with weight 0: many
verifiers give part of the score to a wrong answer. Defaults are in `recipes/configs/reasoning_gym.yaml`.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.errors import exit_with_message
from common.flow import train_and_report
from common.problems import has_chat_template
from common.progress import quiet_libraries
from common.results import save_curve
from common.settings import RecipeParser, asked_for, check_setup, measure, read_yaml

import torch
from accelerate import PartialState
from procedural.task import make_problems
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig

DEFAULTS = Path(__file__).resolve().parent / "configs" / "reasoning_gym.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {"output_dir": "outputs/reasoning_gym_grpo", "report_to": "none"}


@dataclass
class RecipeArguments:
    """The tasks; everything else is TRL's."""

    tasks: list[str] = field(
        default_factory=list, metadata={"help": "Names, or mappings of name, weight and the task's own settings."}
    )
    extract: str = field(
        default="whole", metadata={"help": "Where the answer stands: in tags or alone.", "choices": ("answer", "whole")}
    )
    examples: int = field(default=3, metadata={"help": "Answered problems in each prompt."})
    train_problems: int = field(default=2048, metadata={"help": "Training problems, of all tasks together."})
    eval_problems: int = field(default=200, metadata={"help": "Held-out problems, of all tasks together."})
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of evaluations. Default: that of the training."}
    )


def main() -> None:
    """Draw problems, load, evaluate, train, evaluate, save."""
    quiet_libraries()
    recipe: RecipeArguments
    args: GRPOExtConfig
    parser = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig])
    on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True}
    recipe, args, model_args = parser.parse(sys.argv[1:], {**SCRIPT_DEFAULTS, **read_yaml(DEFAULTS), **on_cpu})
    asked = asked_for(model_args, None, None)
    check_setup(args, model_args, PartialState(), asked)
    sizes = recipe.train_problems, recipe.eval_problems
    chat = has_chat_template(str(model_args.model_name_or_path), model_args.model_revision, False)
    rows = make_problems(recipe.tasks, sizes, args.seed, examples=recipe.examples, extract=recipe.extract, chat=chat)
    names = sorted({row["task"] for row in rows[1]})
    extract = {"extract": recipe.extract}
    solved = [{"name": "procedural.task:Solved", "task": name, **extract} for name in names]
    measure(args, {"name": "reasoning_gym", **extract}, *solved)
    train_and_report(
        args,
        model_args,
        asked,
        rows,
        what="problems",
        curve=partial(save_curve, reward="reasoning_gym"),
        eval_temperature=recipe.eval_temperature,
        facts={"recipe": vars(recipe)},
    )


if __name__ == "__main__":
    with exit_with_message():
        main()
