"""GRPO in an environment of several turns, which pays for each: a tiny model learns a game, on the CPU.

    accelerate launch recipes/coins_grpo.py                             # each turn has its own credit
    accelerate launch recipes/coins_grpo.py --credit outcome            # one advantage for all turns, as in TRL
    accelerate launch recipes/coins_grpo.py --credit gigpo
    python -m bench.coins                                               # the measurement of docs/recipes.md

The environment (`coins/task.py`) is TRL's `environment_factory`, made by `record_steps`; the reward is what it paid for
each step. The tiny model starts by playing at random. `of_best`, the share of what the best play takes, is measured
before and after. Defaults are in `recipes/configs/coins.yaml`.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import exit_with_message
from common.flow import train_and_report
from common.progress import quiet_libraries
from common.results import save_curve
from common.supervised import parse_with_credit, start_from
from common.trainer import RecipeTrainer

from coins.task import Coins, draw_rows, load_tokenizer, row_of, supervised_start
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.rewards.environment import record_steps

HERE = Path(__file__).resolve().parent
DEFAULTS = HERE / "configs" / "coins.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {"output_dir": "outputs/coins_grpo"}
CREDIT: dict[str, list[Any] | None] = {
    "turns": [{"name": "turn_rewards", "gamma": 0.5}],
    "gigpo": ["gigpo"],
    "outcome": None,
}


@dataclass
class RecipeArguments:
    """The task and the credit; everything else is TRL's."""

    credit: str = field(default="turns", metadata={"help": "How rewards are credited.", "choices": tuple(CREDIT)})
    train_games: int = field(default=1024, metadata={"help": "Training games."})
    eval_games: int = field(default=256, metadata={"help": "Most held-out games."})
    supervised_steps: int = field(
        default=300, metadata={"help": "Steps of the supervised start, if no model is named."}
    )


class CoinsTrainer(RecipeTrainer):
    """The recipes' trainer, with the environment."""

    def __init__(self, model: str, **settings: Any) -> None:
        super().__init__(
            model, processing_class=load_tokenizer(model), environment_factory=record_steps(Coins), **settings
        )


def main() -> None:
    """Start supervised, train between two evaluations, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    make = partial(supervised_start, steps=recipe.supervised_steps, seed=args.seed)
    asked = start_from(args, model_args, make)
    sizes = {"train": recipe.train_games, "heldout": recipe.eval_games}
    train, held = (
        [row_of(coins) for coins in draw_rows(split, size, random.Random(f"{split}/{args.seed}"))]
        for split, size in sizes.items()
    )
    train_and_report(
        args,
        model_args,
        asked,
        (train, held),
        what="games",
        curve=partial(save_curve, reward="of_best"),
        trainer_class=CoinsTrainer,
        notes=[f"credit: {recipe.credit}"],
        facts={"recipe": vars(recipe)},
    )


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """The settings, and the hooks of the chosen credit."""
    return parse_with_credit(RecipeArguments, DEFAULTS, SCRIPT_DEFAULTS, CREDIT)


if __name__ == "__main__":
    with exit_with_message():
        main()
