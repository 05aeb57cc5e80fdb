"""GRPO from scratch: a tiny model with random weights learns to sort numbers, from rewards alone, on the CPU.

    accelerate launch recipes/sort_grpo.py                                    # about a minute on two cores
    accelerate launch recipes/sort_grpo.py --reward sort_distance --variant max_only --objective naive
    accelerate launch recipes/sort_grpo.py --beta 0.05                        # with a KL penalty to the model at first
    accelerate launch recipes/sort_grpo.py --numbers 4 --max_steps 1200
    python recipes/sorting/compare.py                                         # all variants, in a table and a picture

After the sorting example of Stanford's CS336 (spring 2025, lecture 17). What can be chosen there can be chosen here:
one of two rewards, one of four advantages, one of three objectives, and KL on or off. Held-out prompts are scored
before and after. Defaults are in `recipes/configs/sort.yaml`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import exit_with_message, loading_errors
from common.flow import train_and_report
from common.progress import quiet_libraries
from common.settings import RecipeParser, asked_for, check_setup, config_of, read_yaml, value_of

from accelerate import PartialState
from sorting.choices import OBJECTIVES, REWARDS, VARIANTS, check_numbers, choose_objective, choose_plugins
from sorting.curves import save_curves
from sorting.task import check_vocabulary, prompts, save_untrained_model
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig

HERE = Path(__file__).resolve().parent
DEFAULTS = HERE / "configs" / "sort.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {"output_dir": "outputs/sort_grpo"}


@dataclass
class RecipeArguments:
    """The task, the lecture's choices and the model's shape; everything else is TRL's (KL on is its `beta`)."""

    reward: str = field(default="sort_inclusion", metadata={"help": "To train on.", "choices": REWARDS})
    variant: str = field(default="normalised", metadata={"help": "Of the advantages.", "choices": tuple(VARIANTS)})
    objective: str = field(default="clipped", metadata={"help": "Of the update.", "choices": OBJECTIVES})
    numbers: int = field(default=3, metadata={"help": "Numbers in a prompt."})
    largest: int = field(default=9, metadata={"help": "They are from 0 to this one."})
    train_prompts: int = field(default=4096, metadata={"help": "Training prompts, at most."})
    eval_prompts: int = field(default=128, metadata={"help": "Held-out prompts, at most."})
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Evaluations sample at it. Default: the temperature of the training."}
    )
    hidden_size: int = field(default=64, metadata={"help": "Width of the untrained model; a multiple of 8."})
    layers: int = field(default=2, metadata={"help": "Layers of the untrained model."})


def main() -> None:
    """Choose, make a model, train between two evaluations, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    state = PartialState()
    asked = asked_for(model_args, None, None)
    untrained = Path(args.output_dir) / "untrained"
    named = model_args.model_name_or_path
    model = model_args.model_name_or_path or str(untrained)
    check_setup(args, model_args, state, asked)

    size = {"numbers": recipe.numbers, "largest": recipe.largest, "seed": args.seed}
    rows = prompts("train", recipe.train_prompts, **size), prompts("held out", recipe.eval_prompts, **size)
    with loading_errors(model), state.main_process_first():
        if named is None and state.is_main_process:
            shape = {"hidden_size": recipe.hidden_size, "num_hidden_layers": recipe.layers}
            save_untrained_model(untrained, largest=recipe.largest, seed=args.seed, **shape)
        check_vocabulary(model, [*rows[0], *rows[1]])
    model_args.model_name_or_path = model
    train_and_report(
        args,
        model_args,
        asked,
        rows,
        curve=save_curves,
        notes=[f"{recipe.reward}, {recipe.variant} advantages, {recipe.objective} objective, KL {args.beta:g}"],
        eval_temperature=recipe.eval_temperature,
        facts={"recipe": vars(recipe), "beta": args.beta},
    )


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over `configs/sort.yaml`, and the plugins that the choices come down to."""
    words = sys.argv[1:]
    config = config_of(sys.argv[1:])
    recipe: RecipeArguments
    args: GRPOExtConfig
    parser = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig])
    recipe, args, model_args = parser.parse(words, {**SCRIPT_DEFAULTS, **read_yaml(DEFAULTS)})
    check_numbers(recipe)
    choose_plugins(args, recipe.reward, recipe.variant)
    given = [name for name in ("epsilon", "epsilon_high") if value_of(name, words, config) is not None]
    choose_objective(args, recipe.objective, given)
    if value_of("max_completion_length", words, config) is None:
        args.max_completion_length = recipe.numbers + 1  # the numbers and an end
    return recipe, args, model_args


if __name__ == "__main__":
    with exit_with_message():
        main()
