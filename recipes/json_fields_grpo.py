"""GRPO on a real language model, on the CPU: SmolLM2-135M-Instruct learns to write fields of a short text as JSON.

    accelerate launch recipes/json_fields_grpo.py                        # paid for the share of right fields
    accelerate launch recipes/json_fields_grpo.py --reward spans         # each field's tokens for that field alone
    accelerate launch recipes/json_fields_grpo.py --reward schema        # only valid JSON is paid, as in many recipes

Each row has its values and a schema of its own, which `json_fields` and `json_schema` read from columns. Whatever is
trained on, the other reward is measured beside it with weight 0: valid JSON may well hold other values than the text.
Defaults are in `recipes/configs/json_fields.yaml`.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import RecipeError, exit_with_message
from common.flow import train_and_report
from common.problems import has_chat_template
from common.progress import quiet_libraries
from common.results import save_curve
from common.settings import RecipeParser, asked_for, check_setup, measure, read_yaml

import torch
from accelerate import PartialState
from json_fields.task import REWARD, make_problems
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig

HERE = Path(__file__).resolve().parent
DEFAULTS = HERE / "configs" / "json_fields.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {"output_dir": "outputs/json_fields_grpo", "report_to": "none"}
SCHEMA = {"name": "json_schema", "extract": "whole"}
REWARDS: dict[str, Any] = {"spans": REWARD, "fields": REWARD, "schema": SCHEMA}


@dataclass
class RecipeArguments:
    """The task and its reward; everything else is TRL's."""

    reward: str = field(default="fields", metadata={"help": "What is paid.", "choices": tuple(REWARDS)})
    train_problems: int = field(default=2048, metadata={"help": "Training problems."})
    eval_problems: int = field(default=200, metadata={"help": "Held-out problems."})
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of evaluations. Default: that of the training."}
    )


def main() -> None:
    """Choose, load, evaluate, train, evaluate, save."""
    quiet_libraries()
    recipe: RecipeArguments
    args: GRPOExtConfig
    parser = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig])
    on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True}
    recipe, args, model_args = parser.parse(sys.argv[1:], {**SCRIPT_DEFAULTS, **read_yaml(DEFAULTS), **on_cpu})
    if args.rewards is None:
        measured: list[Any] = [] if recipe.reward == "schema" else [{**SCHEMA, "weight": 0.0}]
        args.rewards = [REWARDS[recipe.reward], *measured]
        hooks: list[Any] = [{"name": "part_credit", "normalise": True}]
        args.advantage_hooks = args.advantage_hooks or (hooks if recipe.reward == "spans" else None)
    measure(args, REWARD)
    asked = asked_for(model_args, None, None)
    check_setup(args, model_args, PartialState(), asked)
    model = str(model_args.model_name_or_path)
    if not has_chat_template(model, model_args.model_revision, args.trust_remote_code):
        raise RecipeError(f"The tokenizer of {model!r} has no chat template, and each text is asked as a conversation.")
    train_and_report(
        args,
        model_args,
        asked,
        (make_problems("train", recipe.train_problems, args.seed), make_problems("heldout", recipe.eval_problems, 0)),
        what="texts",
        curve=partial(save_curve, reward="json_fields"),
        notes=[f"reward: {recipe.reward}"],
        eval_temperature=recipe.eval_temperature,
        facts={"recipe": vars(recipe)},
    )


if __name__ == "__main__":
    with exit_with_message():
        main()
