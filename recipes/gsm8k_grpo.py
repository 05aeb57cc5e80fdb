"""GRPO on grade-school maths, with reward, advantage and loss plugins.

    accelerate launch recipes/gsm8k_grpo.py                                   # the default of this machine
    accelerate launch recipes/gsm8k_grpo.py --config recipes/configs/qwen2.5_0.5b.yaml --learning_rate 2e-6
    accelerate launch recipes/gsm8k_grpo.py --dataset_path train.jsonl --use_peft --load_in_4bit
    accelerate launch recipes/gsm8k_grpo.py --loss_aggregation seq_mean_token_mean \\
        --rewards gsm8k_accuracy '{name: think_format, weight: 0.2}' --advantage_hooks leave_one_out

Without a model and a data set: on a CUDA machine Qwen2.5-0.5B-Instruct on openai/gsm8k, anywhere else a tiny model and
generated word problems that are part of this repository. Held-out problems are scored before and after.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.errors import RecipeError, exit_with_message
from common.flow import train_and_report
from common.problems import as_dataset, embedded_problems, has_chat_template, problems_from_file, problems_from_hub
from common.progress import quiet_libraries
from common.results import save_curve
from common.settings import (
    RecipeParser,
    asked_for,
    check_setup,
    config_of,
    embedded_or_hub,
    machine_defaults,
    measure,
    print_task,
    read_yaml,
)

from accelerate import PartialState
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.engine import ENGINES

HERE = Path(__file__).resolve().parent
EMBEDDED_MODEL = HERE / "embedded" / "model"
EMBEDDED_DEFAULTS = HERE / "embedded" / "defaults.yaml"
GPU_DEFAULTS = HERE / "configs" / "qwen2.5_0.5b.yaml"
SCRIPT_DEFAULTS: dict[str, object] = {
    "output_dir": "outputs/gsm8k_grpo",
    "report_to": "none",
    "compact_updates": "exact",
}
ACCURACY = "gsm8k_accuracy"
SYSTEM_PROMPT = (
    "Solve the problem. Reason inside <think> </think>, then give the final number alone inside <answer> </answer>."
)


@dataclass
class RecipeArguments:
    """What to train on; everything else is TRL's."""

    embedded: bool | None = field(
        default=None,
        metadata={
            "help": "Use this repository's settings, model and problems. Default: without CUDA and a model.",
            "nargs": "?",
            "const": True,
        },
    )
    dataset_path: str | None = field(default=None, metadata={"help": "JSON Lines file with GSM8K's columns."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the hub. Default: openai/gsm8k, if nothing else is given."}
    )
    dataset_config: str | None = field(default="main", metadata={"help": "Its configuration."})
    train_problems: int = field(default=4096, metadata={"help": "Generated training problems (embedded only)."})
    eval_problems: int = field(default=512, metadata={"help": "Most held-out problems."})
    system_prompt: str = field(default=SYSTEM_PROMPT, metadata={"help": "For models with a chat template."})
    user_prompt: str = field(
        default="{question}", metadata={"help": "The user's message, with the problem in place of {question}."}
    )
    eval_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of evaluations. Default: that of the training."}
    )
    engine: str | None = field(
        default=None,
        metadata={
            "help": "The engine that the settings are made for; the run stops if another one runs.",
            "choices": ENGINES,
        },
    )
    processes: int | None = field(
        default=None,
        metadata={
            "help": "The number of processes on all nodes that the settings are made for; the run stops otherwise."
        },
    )


def main() -> None:
    """Choose, load, evaluate, train, evaluate, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    asked = asked_for(model_args, recipe.engine, recipe.processes)
    check_setup(args, model_args, PartialState(), asked)
    measure(args, ACCURACY)  # whatever is trained on

    model = str(model_args.model_name_or_path)
    conversational = has_chat_template(model, model_args.model_revision, args.trust_remote_code)
    if recipe.dataset_path is not None:
        rows = problems_from_file(recipe.dataset_path, recipe.eval_problems)
    elif recipe.dataset_name is not None:
        rows = problems_from_hub(recipe.dataset_name, recipe.dataset_config, recipe.eval_problems)
    else:
        rows = embedded_problems(recipe.train_problems, recipe.eval_problems, args.seed)
    if "{question}" not in recipe.user_prompt:
        raise RecipeError(
            f"--user_prompt must contain {{question}}, the place of the problem; got {recipe.user_prompt!r}."
        )
    system_prompt = recipe.system_prompt if conversational else None
    train_and_report(
        args,
        model_args,
        asked,
        rows,
        what="problems",
        dataset=lambda problems: as_dataset(problems, system_prompt, recipe.user_prompt),
        curve=partial(save_curve, reward=ACCURACY),
        eval_temperature=recipe.eval_temperature,
    )


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over the defaults of this machine."""
    words = sys.argv[1:]
    embedded, why = embedded_or_hub(words, config_of(words))
    file = EMBEDDED_DEFAULTS if embedded else GPU_DEFAULTS
    defaults = {**SCRIPT_DEFAULTS, **read_yaml(file), **machine_defaults(embedded)}
    if embedded:
        defaults["model_name_or_path"] = str(EMBEDDED_MODEL)
    recipe, args, model_args = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig]).parse(words, defaults)

    if not embedded and recipe.dataset_path is None and recipe.dataset_name is None:
        recipe.dataset_name = "openai/gsm8k"
    data = recipe.dataset_path or recipe.dataset_name or "generated word problems"
    print_task(model_args.model_name_or_path, EMBEDDED_MODEL, data, why)
    return recipe, args, model_args


if __name__ == "__main__":
    with exit_with_message():
        main()
