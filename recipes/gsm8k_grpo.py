"""GRPO on grade-school maths, with reward, advantage and loss plugins.

    accelerate launch recipes/gsm8k_grpo.py                                   # the default of this machine
    accelerate launch recipes/gsm8k_grpo.py --config recipes/configs/qwen2.5_0.5b.yaml --learning_rate 2e-6
    accelerate launch recipes/gsm8k_grpo.py --dataset_path train.jsonl --use_peft --load_in_4bit
    accelerate launch recipes/gsm8k_grpo.py --loss_aggregation seq_mean_token_mean \\
        --rewards gsm8k_accuracy '{name: think_format, weight: 0.2}' --advantage_hooks leave_one_out

Without a model and a data set: on a CUDA machine Qwen2.5-0.5B-Instruct on openai/gsm8k, anywhere else a tiny model and
generated word problems that are part of this repository. Held-out problems are scored before and after.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from common.errors import loading_errors, told_in_a_sentence
from common.problems import (
    as_dataset,
    embedded_problems,
    has_chat_template,
    problems_from_file,
    problems_from_hub,
    whole_batches,
)
from common.processes import leave
from common.progress import SUMMARY, quiet_libraries
from common.results import held_out, print_places, print_table, save_curve, save_metrics
from common.settings import (
    RecipeParser,
    asked_for,
    check_setup,
    config_of,
    embedded_or_hub,
    machine_defaults,
    measure,
    read_yaml,
    samples_per_problem,
)
from common.trainer import RecipeTrainer, train_and_score
from transformers import set_seed
from trl import ModelConfig, get_peft_config, get_quantization_config

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
    **SUMMARY,
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
        default=None, metadata={"help": "Data set on the hub. Default: openai/gsm8k, where nothing else is given."}
    )
    dataset_config: str | None = field(default="main", metadata={"help": "Its configuration."})
    train_problems: int = field(default=4096, metadata={"help": "Generated training problems (embedded only)."})
    eval_problems: int = field(default=512, metadata={"help": "Held-out problems, at most."})
    system_prompt: str = field(default=SYSTEM_PROMPT, metadata={"help": "For models with a chat template."})
    engine: str | None = field(
        default=None,
        metadata={"help": "What the settings are made for; the run stops if another engine runs.", "choices": ENGINES},
    )
    processes: int | None = field(default=None, metadata={"help": "Likewise: how many processes, on all nodes."})


def main() -> None:
    """Choose, load, evaluate, train, evaluate, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    state = PartialState()
    asked = asked_for(model_args, recipe.engine, recipe.processes)
    check_setup(args, model_args, state, asked)
    measure(args, ACCURACY)  # whatever is trained on
    model = str(model_args.model_name_or_path)

    conversational = has_chat_template(model, model_args.model_revision, args.trust_remote_code)
    if recipe.dataset_path is not None:
        train_rows, eval_rows = problems_from_file(recipe.dataset_path, recipe.eval_problems)
    elif recipe.dataset_name is not None:
        train_rows, eval_rows = problems_from_hub(recipe.dataset_name, recipe.dataset_config, recipe.eval_problems)
    else:
        train_rows, eval_rows = embedded_problems(recipe.train_problems, recipe.eval_problems, args.seed)
    samples = samples_per_problem(args)
    eval_rows = whole_batches(
        train_rows,
        eval_rows,
        train_batch=args.generation_batch_size // args.num_generations,
        eval_batch=args.per_device_eval_batch_size * state.num_processes // samples,
    )
    system_prompt = recipe.system_prompt if conversational else None

    set_seed(args.seed)  # adapters start alike on all ranks
    with loading_errors(model):
        trainer = RecipeTrainer(
            model=model,
            args=args,
            train_dataset=as_dataset(train_rows, system_prompt),
            eval_dataset=as_dataset(eval_rows, system_prompt),
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    counts = f"{len(train_rows)} training problems, {len(eval_rows)} held out; {state.num_processes} process(es)"
    done = train_and_score(trainer, asked, counts)
    if trainer.is_world_process_zero():
        folder, history = Path(args.output_dir), trainer.state.log_history
        run = {"model": model, "training_seconds": done.seconds, **done.facts}
        before, after = held_out(done.before), held_out(done.after)
        print_table(before, after, f"{len(eval_rows)} held-out problems, {samples} sample(s) each")
        print(f"step {trainer.state.global_step} reached in {done.seconds:.0f} s of training")
        metrics = save_metrics(folder, {"before": before, "after": after, "run": run}, history)
        curve = save_curve(folder, history, before.get(ACCURACY), after[ACCURACY], ACCURACY)
        print_places(folder, metrics=metrics, curve=curve)
    leave(trainer.accelerator)


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over the defaults of this machine."""
    words = sys.argv[1:]
    embedded, why = embedded_or_hub(words, config_of(words))
    defaults = {**SCRIPT_DEFAULTS, **read_yaml(EMBEDDED_DEFAULTS if embedded else GPU_DEFAULTS), **machine_defaults()}
    if embedded:
        defaults["model_name_or_path"] = str(EMBEDDED_MODEL)
    recipe, args, model_args = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig]).parse(words, defaults)

    if not embedded and recipe.dataset_path is None and recipe.dataset_name is None:
        recipe.dataset_name = "openai/gsm8k"
    model = model_args.model_name_or_path
    model = "The embedded tiny model" if model == str(EMBEDDED_MODEL) else model
    problems = recipe.dataset_path or recipe.dataset_name or "generated word problems"
    if os.environ.get("RANK", "0") == "0":
        print(f"{model} on {problems} ({why})", flush=True)
    return recipe, args, model_args


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
