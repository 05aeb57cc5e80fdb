"""GRPO with a tool: a tiny model learns to use a calculator, with credit by turn or without, on the CPU.

    accelerate launch recipes/tools_grpo.py                       # with turn_rewards
    accelerate launch recipes/tools_grpo.py --credit outcome      # TRL's advantage for all turns
    accelerate launch recipes/tools_grpo.py --seed 3 --max_steps 100

The model starts from `embedded/model` and a supervised training (`calculator/task.py`) that leaves it with the syntax
of a call, which it seldom uses and often breaks. Two rewards: the right answer, and `tool_use` for calls that return
and against calls that fail. Held-out accuracy and the share of failed calls are measured before and after.
Defaults are in `recipes/configs/tools.yaml`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from calculator.task import calc, draw_problems, load_tokenizer, supervised_start
from common.errors import told_in_a_sentence
from common.progress import SUMMARY, quiet_libraries
from common.settings import RecipeParser, read_yaml
from datasets import Dataset
from transformers import set_seed
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

HERE = Path(__file__).resolve().parent
DEFAULTS = HERE / "configs" / "tools.yaml"
CREDIT = {
    "turns": [{"name": "turn_rewards"}],
    "turns_plus_outcome": [{"name": "turn_rewards", "form": "turn_plus_outcome"}],
    "outcome": None,
}


@dataclass
class RecipeArguments:
    """The task and the credit; everything else is TRL's."""

    credit: str = field(default="turns", metadata={"help": "To whom the rewards go.", "choices": tuple(CREDIT)})
    train_problems: int = field(default=2048, metadata={"help": "Training problems."})
    eval_problems: int = field(default=256, metadata={"help": "Held-out problems."})
    supervised_steps: int = field(default=400, metadata={"help": "Of the supervised start, where there is no model."})
    threads: int = field(default=2, metadata={"help": "Of each process; part of the result."})


def main() -> None:
    """Start supervised, train between two evaluations, save."""
    quiet_libraries()
    recipe, args, model_args = parse()
    torch.set_num_threads(recipe.threads)
    state = PartialState()
    model = model_args.model_name_or_path
    if model is None:
        model = str(Path(args.output_dir) / "supervised")
        with state.main_process_first():
            if state.is_main_process and not (Path(model) / "config.json").exists():
                supervised_start(Path(model), steps=recipe.supervised_steps, seed=args.seed)
    set_seed(args.seed)
    train, held_out = (
        Dataset.from_list([problem.row() for problem in draw_problems(split, size, args.seed)])
        for split, size in (("train", recipe.train_problems), ("heldout", recipe.eval_problems))
    )
    trainer = GRPOExtTrainer(
        model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=load_tokenizer(model),
        tools=[calc],
        advantage_hooks=CREDIT[recipe.credit],
    )
    before = measured(trainer)
    trainer.train()
    after = measured(trainer)
    trainer.save_model(args.output_dir)
    if state.is_main_process:
        print(f"credit {recipe.credit}, seed {args.seed}, {args.max_steps} steps, held out:")
        for name, value in before.items():
            print(f"  {name:24} {value:.3f} -> {after[name]:.3f}")


def measured(trainer: GRPOExtTrainer) -> dict[str, float]:
    """Accuracy, calls of a completion, and the share of them that failed, on the held-out problems."""
    trainer.evaluate()
    logged = trainer.state.log_history[-1]
    calls, failed = (logged[f"eval_tool_use/{name}"] for name in ("calls", "failed"))
    return {
        "accuracy": logged["eval_rewards/gsm8k_accuracy/mean"],
        "calls per completion": calls,
        "share of failed calls": failed / calls if calls else 0.0,
    }


def parse() -> tuple[RecipeArguments, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over `configs/tools.yaml`."""
    parser = RecipeParser([RecipeArguments, GRPOExtConfig, ModelConfig])
    defaults = {"output_dir": "outputs/tools_grpo", **SUMMARY, **read_yaml(DEFAULTS)}
    recipe, args, model_args = parser.parse(sys.argv[1:], defaults)
    return recipe, args, model_args


if __name__ == "__main__":
    with told_in_a_sentence():
        main()
