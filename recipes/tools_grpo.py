"""GRPO with a tool: a tiny model learns to use a calculator, with credit by turn or without, on the CPU.

    accelerate launch recipes/tools_grpo.py                             # with turn_rewards
    accelerate launch recipes/tools_grpo.py --credit outcome            # one advantage for all turns, as in TRL
    accelerate launch recipes/tools_grpo.py --seed 3 --max_steps 100

The model starts from `embedded/model` and a supervised training (`calculator/task.py`) that leaves it with the syntax
of a call, which it seldom uses and often breaks. Two rewards: the right answer, and `tool_use` for calls that return
and against calls that fail. Held-out accuracy and the share of failed calls are measured before and after.
Defaults are in `recipes/configs/tools.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import exit_with_message
from common.flow import train_and_report
from common.progress import quiet_libraries
from common.results import held_out, save_curve
from common.supervised import parse_with_credit, start_from
from common.trainer import RecipeTrainer

from calculator.task import calc, draw_problems, load_tokenizer, supervised_start
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig

HERE = Path(__file__).resolve().parent
DEFAULTS = HERE / "configs" / "tools.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {"output_dir": "outputs/tools_grpo"}
ACCURACY = "gsm8k_accuracy"
CREDIT: dict[str, list[Any] | None] = {
    "turns": [{"name": "turn_rewards"}],
    "turns_plus_outcome": [{"name": "turn_rewards", "form": "turn_plus_outcome"}],
    "outcome": None,
}


@dataclass
class RecipeArguments:
    """The task and the credit; everything else is TRL's."""

    credit: str = field(default="turns", metadata={"help": "How rewards are credited.", "choices": tuple(CREDIT)})
    train_problems: int = field(default=2048, metadata={"help": "Training problems."})
    eval_problems: int = field(default=256, metadata={"help": "Most held-out problems."})
    supervised_steps: int = field(
        default=120, metadata={"help": "Steps of the supervised start, if no model is named."}
    )


class CalculatorTrainer(RecipeTrainer):
    """The recipes' trainer, with the calculator as a tool."""

    def __init__(self, model: str, **settings: Any) -> None:
        super().__init__(model, processing_class=load_tokenizer(model), tools=[calc], **settings)


def main() -> None:
    """Start supervised, train between two evaluations, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    make = partial(supervised_start, steps=recipe.supervised_steps, seed=args.seed)
    asked = start_from(args, model_args, make)
    sizes = {"train": recipe.train_problems, "heldout": recipe.eval_problems}
    train, held = ([one.row() for one in draw_problems(split, size, args.seed)] for split, size in sizes.items())
    train_and_report(
        args,
        model_args,
        asked,
        (train, held),
        what="problems",
        curve=partial(save_curve, reward=ACCURACY),
        trainer_class=CalculatorTrainer,
        table=table_metrics,
        notes=[f"credit: {recipe.credit}"],
        facts={"recipe": vars(recipe)},
    )


def table_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's metrics for the table: the rewards, the calls, and the share of calls that failed."""
    calls, failed = (float(metrics.get(f"eval_tool_use/{name}", 0.0)) for name in ("calls", "failed"))
    share = failed / calls if calls else 0.0
    return {**held_out(metrics), "calls per completion": calls, "share of failed calls": share}


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """The settings, and the hooks of the chosen credit."""
    return parse_with_credit(RecipeArguments, DEFAULTS, SCRIPT_DEFAULTS, CREDIT)


if __name__ == "__main__":
    with exit_with_message():
        main()
