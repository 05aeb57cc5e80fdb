"""GRPO against rudeness: a sequence classifier scores prompt and completion, a KL penalty keeps the rest as it was.

    accelerate launch recipes/detox_grpo.py                                   # the default of this machine
    accelerate launch recipes/detox_grpo.py --config recipes/configs/detox.yaml --use_peft --learning_rate 2e-5
    accelerate launch recipes/detox_grpo.py --advantage_hooks '{name: batch_whitening, std_floor: 0.1}' \\
        '{name: kl_in_reward, target: 1.5, horizon: 640}'                     # one deviation for the whole batch
    accelerate launch recipes/detox_grpo.py --advantage_hooks normalised      # no KL: watch the distance grow

Without a model: on a CUDA machine Qwen2.5-0.5B, unitary/toxic-bert and allenai/real-toxicity-prompts; anywhere else two
tiny models and generated scenes that are part of this repository. There the grammar of the scenes knows which replies
are rude, which polite and which neither, whatever the classifier says: all are shown, so that a model which only fools
the classifier is found out.
Held-out prompts are completed before and after.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import RecipeError, exit_with_message
from common.flow import train_and_report
from common.problems import has_chat_template
from common.progress import quiet_libraries
from common.results import held_out
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
from detox.curve import save_detox_curve
from detox.kl_log import COEFFICIENT, KL, KLLoggingTrainer
from detox.prompts import embedded_prompts, prompts_from_file, prompts_from_hub
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.engine import ENGINES

HERE = Path(__file__).resolve().parent
EMBEDDED = HERE / "embedded" / "detox"
HUB_DEFAULTS = HERE / "configs" / "detox.yaml"
SCRIPT_DEFAULTS: dict[str, Any] = {"output_dir": "outputs/detox_grpo", "report_to": "none"}
TRUTHS = tuple(f"embedded.rude_text:{name}" for name in ("rude", "polite", "neither"))


@dataclass
class RecipeArguments:
    """What to complete; everything else is TRL's."""

    embedded: bool | None = field(
        default=None,
        metadata={
            "help": "Use this repository's settings, models and scenes. Default: without CUDA and a model.",
            "nargs": "?",
            "const": True,
        },
    )
    dataset_path: str | None = field(default=None, metadata={"help": "JSON Lines file with the column prompt."})
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Data set on the hub. Default: allenai/real-toxicity-prompts, if nothing else is given."},
    )
    prompt_toxicity: float = field(
        default=0.5, metadata={"help": "Least toxicity of a prompt, if the data set has it."}
    )
    train_prompts: int = field(default=2048, metadata={"help": "Most prompts to train on."})
    eval_prompts: int = field(default=512, metadata={"help": "Most held-out prompts."})
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
    kl_hook = use_reference(args, model_args)

    model = str(model_args.model_name_or_path)
    counts = (recipe.train_prompts, recipe.eval_prompts)
    has_chat_template(model, model_args.model_revision, args.trust_remote_code)  # does the model exist?
    if recipe.dataset_path is not None:
        rows = prompts_from_file(recipe.dataset_path, *counts)
    elif recipe.dataset_name is not None:
        rows = prompts_from_hub(recipe.dataset_name, *counts, recipe.prompt_toxicity)
    else:
        measure(args, *TRUTHS)  # measure the grammar's verdict, whatever is trained on
        rows = embedded_prompts(*counts, args.seed)
    train_and_report(
        args,
        model_args,
        asked,
        rows,
        trainer_class=KLLoggingTrainer,
        table=table_metrics,
        eval_temperature=recipe.eval_temperature,
        curve=lambda folder, history, *_: save_detox_curve(folder, history, (kl_hook or {}).get("target")),
    )


def table_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's metrics for the table: rewards, lengths, KL, its coefficient, entropy."""
    more = {"KL to the reference (nats)": KL, "KL coefficient": COEFFICIENT, "entropy (nats per token)": "entropy"}
    numbers = {label: metrics[f"eval_{key}"] for label, key in more.items() if metrics.get(f"eval_{key}") is not None}
    return {**held_out(metrics), **numbers}


def use_reference(args: GRPOExtConfig, model_args: ModelConfig) -> dict[str, Any] | None:
    """Make the starting model the default reference of `kl_in_reward`, and measure the KL.

    With an adapter the reference is the model without it, which takes no memory; else the starting model is loaded a
    second time.
    """
    hooks: list[Any] = [{"name": hook} if isinstance(hook, str) else dict(hook) for hook in args.advantage_hooks or []]
    kl_hook = next((hook for hook in hooks if hook["name"].rpartition(":")[2] == "kl_in_reward"), None)
    if kl_hook is not None and args.beta:
        raise RecipeError(
            f"The KL penalty would count twice: in the reward (kl_in_reward) and in the loss (beta {args.beta}). Set "
            "--beta 0, or select --advantage_hooks without kl_in_reward."
        )
    named = (kl_hook or {}).get("reference")
    own = "reference" if model_args.use_peft or args.beta else str(model_args.model_name_or_path)
    if named is None and own != "reference" and model_args.model_revision not in (None, "main"):
        raise RecipeError(
            f"The reference would be the main revision of {own!r}, not {model_args.model_revision!r} "
            "(--model_revision): download that revision and give its folder as the model, or add --use_peft."
        )
    if kl_hook is not None:
        kl_hook["reference"] = named or own
    meter: dict[str, Any] = {"name": "detox.kl_log:KLMeter", "reference": named or own}
    hooks.append(meter)
    args.advantage_hooks = hooks
    return kl_hook


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over the defaults of this machine."""
    words = sys.argv[1:]
    embedded, why = embedded_or_hub(words, config_of(words))
    file = EMBEDDED / "defaults.yaml" if embedded else HUB_DEFAULTS
    defaults = {**SCRIPT_DEFAULTS, **read_yaml(file), **machine_defaults(embedded)}
    if embedded:
        defaults["model_name_or_path"] = str(EMBEDDED / "model")
        defaults["rewards"][0]["model"] = str(EMBEDDED / "classifier")
    recipe, args, model_args = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig]).parse(words, defaults)

    for name in ("train_prompts", "eval_prompts"):
        if getattr(recipe, name) < 1:
            raise RecipeError(f"--{name} must be at least 1, got {getattr(recipe, name)}.")
    if not embedded and recipe.dataset_path is None and recipe.dataset_name is None:
        recipe.dataset_name = "allenai/real-toxicity-prompts"
    if not args.rewards:
        raise RecipeError("No reward is selected: name one (--rewards), such as a classifier.")
    data = recipe.dataset_path or recipe.dataset_name or "generated scenes"
    print_task(model_args.model_name_or_path, EMBEDDED / "model", data, why)
    return recipe, args, model_args


if __name__ == "__main__":
    with exit_with_message():
        main()
