"""A real model's weights after three steps, against plain TRL's: `python -m bench.real_model --model FOLDER`.

FOLDER holds SmolLM2-135M-Instruct (`python -m recipes.common.models smollm2 FOLDER`). The completions are given: right
answers to the recipe's texts, and others with a wrong value, of another text, or cut off. So the trainers differ in
nothing but the update.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, set_seed
from trl import GRPOConfig, GRPOTrainer

from bench.tables import machine, show, versions
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, load_rewards

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from common.quantised import keep_4_bit_trainable, keep_adapters_in_float32

from json_fields.task import REWARD, make_problems

STEPS = 3
GROUP = 4
PLAIN = "plain TRL"
ARMS: dict[str, dict[str, Any]] = {
    "nothing selected": {},
    "compact": {"compact_updates": "exact"},
    "shared": {"compact_updates": "exact", "share_prompts": True},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32, LoRA": {},
    "bf16 autocast, LoRA": {"bf16": True},
    "float32, LoRA, gradient checkpointing": {"gradient_checkpointing": True},
    "4-bit, LoRA": {"load_in_4bit": True},
}


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` that answers each row of a group in a way of its own."""
    tokenizer = trainer.processing_class
    rows = make_problems("train", STEPS, 0)
    right = {row["prompt"][-1]["content"]: row["fields"] for row in rows}
    asked = [prompt[-1]["content"] for prompt in prompts]
    prompt_ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
    completion_ids = []
    for row, text in enumerate(asked):
        answer = json.loads(right[text])
        name = next(iter(answer))
        other = right[next(one for one in right if one != text)]
        said = [json.dumps(answer), json.dumps({**answer, name: "?"}), other, right[text][: len(right[text]) // 2]]
        end = [] if row % GROUP == GROUP - 1 else [tokenizer.eos_token_id]
        completion_ids.append([*tokenizer(said[row % GROUP])["input_ids"], *end])
    logprobs = [[-1.0] * len(ids) for ids in completion_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def trained(model: Path, folder: Path, arm: str, setting: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The adapter's weights after the steps."""
    four_bit = setting.get("load_in_4bit", False)
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32) if four_bit else None
    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if arm == PLAIN else (GRPOExtTrainer, GRPOExtConfig)
    args = config_class(
        output_dir=str(folder),
        use_cpu=True,
        bf16=setting.get("bf16", False),
        gradient_checkpointing=setting.get("gradient_checkpointing", False),
        model_init_kwargs={"dtype": torch.float32},
        learning_rate=1e-4,
        max_steps=STEPS,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=48,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **ARMS.get(arm, {}),
    )
    set_seed(1)
    trainer = trainer_class(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_list(make_problems("train", STEPS, 0)),
        reward_funcs=load_rewards([REWARD]),
        rollout_func=rollout,
        quantization_config=quantised,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    keep_4_bit_trainable(trainer.model)
    if four_bit:
        keep_adapters_in_float32(trainer.model)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert len(rewards) == 1 or any(rewards), "no completion was right: nothing was trained"
    return {name: p.detach().float().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def gaps(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """The largest difference of a weight, and that of all of `lora_B`, relative to its norm: it started at zero."""
    largest = max(float((ours[name] - weight).abs().max()) for name, weight in theirs.items())
    moved = [name for name in theirs if "lora_B" in name]
    apart, all_of_it = (
        torch.cat([(weights[name] - base[name] if base else weights[name]).flatten() for name in moved]).norm()
        for weights, base in ((ours, theirs), (theirs, None))
    )
    return f"{largest:.0e} ({float(apart / all_of_it):.0e})"


def main() -> None:
    """Train each setting with each trainer, and show the largest differences."""
    parser = argparse.ArgumentParser(prog="python -m bench.real_model", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--docs", type=Path, help="write the table into this page, too")
    asked = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        for name in asked.only:
            theirs = trained(asked.model, Path(folder), PLAIN, SETTINGS[name])
            row = [name]
            for arm in ARMS:
                row.append(gaps(trained(asked.model, Path(folder), arm, SETTINGS[name]), theirs))
                gc.collect()
            print(row, flush=True)
            rows.append(row)
    said = f"{machine()}; {versions('trl', 'transformers', 'torch', 'peft', 'bitsandbytes')}."
    title = f"Weights after {STEPS} steps: largest difference from plain TRL (relative difference of lora_B)"
    show(title, ["setting", *ARMS], rows, said, asked.docs)


if __name__ == "__main__":
    main()
