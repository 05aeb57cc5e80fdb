"""Every start of the recipe that the tests look at, by name: `LAUNCHES` succeed, `FAILURES` end in one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.launching import GSM8K, MODEL, RECIPES, Finished, Launch


def take_checkpoint(folder: Path, finished: Callable[[str], Finished]) -> None:
    """Put the checkpoint in the middle of the run `default` where a run that was interrupted would have left it."""
    shutil.copytree(finished("default").output / "checkpoint-2", folder / "output" / "checkpoint-2")


def add_chat_template(folder: Path, finished: Callable[[str], Finished]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    shutil.copytree(MODEL, folder / "chat")
    tokenizer.save_pretrained(folder / "chat")


def save_adapter(folder: Path, finished: Callable[[str], Finished]) -> None:
    """transformers would load its base model below it, all of it frozen: nothing would be trained."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "adapter")


PLUGINS_YAML = """
learning_rate: 0.0003
max_steps: 1
rewards:
  - gsm8k_accuracy
  - {name: tag_format, weight: 0.5}
  - {name: soft_overlong, max_completion_length: 40, cache: 20, weight: 0.25}
advantage_hooks:
  - leave_one_out
  - {name: entropy_shaping, alpha: 0.2}
loss_aggregation: {name: constant_length, length: 50}
"""

LAUNCHES = {
    "default": Launch(sizes={"max_steps": 4, "save_steps": 2}),
    "overridden": Launch(
        [
            *("--config={folder}/plugins.yaml", "--rewards", "gsm8k_accuracy", "{name: think_format, weight: 0.2}"),
            *("--advantage_hooks", "{name: entropy_shaping, alpha: 0.3, kappa: 3}"),
            *("--loss_aggregation", "seq_mean_token_mean"),
        ],
        files={"plugins.yaml": PLUGINS_YAML},
    ),
    "qlora": Launch(
        [
            "--use_peft",
            "--load_in_4bit",
            "--lora_target_modules",
            "q_proj",
            "--dtype",
            "bfloat16",
            "--learning_rate",
            "0.01",
        ],
        sizes={"max_steps": 1},
    ),
    "chat": Launch(
        [
            *["--model_name_or_path", "{folder}/chat", "--embedded", "--log_completions"],
            *["--rewards", "tag_format", "--reward_weights", "2.0", "--system_prompt"],
            "Do sums.",
        ],
        sizes={"max_steps": 1},
        prepare=add_chat_template,
    ),
    "resumed": Launch(
        ["--resume_from_checkpoint", "true"], sizes={"max_steps": 4, "save_steps": 2}, prepare=take_checkpoint
    ),
    "gsm8k": Launch(["--dataset_path", f"{GSM8K}/train.jsonl", "--log_completions"], sizes={"num_generations_eval": 1}),
}

for _name, _launch in LAUNCHES.items():
    _launch.forked = _name != "default"

GOOD = '{"question": "Ana has 2 pens and buys 3. How many?", "answer": "2+3 = 5\\n#### 5"}\n'


def failing(*arguments: str, says: tuple[str, ...], **keywords: Any) -> Launch:
    alone = not keywords.keys() & {"launcher", "forked"}
    return Launch(list(arguments), **{"launcher": None, "forked": alone, "says": says, **keywords})


FAILURES = {
    "unknown key": failing(
        "--config",
        "{folder}/a.yaml",
        files={"a.yaml": "lerning_rate: 1"},
        says=("'lerning_rate'", "Did you mean 'learning_rate'"),
    ),
    "unknown option": failing("--lerning_rate", "1", says=("'--lerning_rate'", "Did you mean 'learning_rate'")),
    "answer without reference": failing(
        "--dataset_path",
        "{folder}/rows.jsonl",
        files={"rows.jsonl": GOOD + "\n" + '{"question": "?", "answer": "no idea"}\n'},
        says=("rows.jsonl, line 3", "no number", "'no idea'", "#### 18"),
    ),
    "not JSON": failing(
        "--dataset_path",
        "{folder}/rows.jsonl",
        files={"rows.jsonl": GOOD + "question,answer\n"},
        says=("rows.jsonl, line 2", "not JSON", "'question,answer'"),
    ),
    "unknown reward": failing("--rewards", "gsm8k_acuracy", says=("'gsm8k_acuracy'", "Did you mean 'gsm8k_accuracy'")),
    "evaluation batch not divisible": failing(
        "--per_device_eval_batch_size", "10", says=("batch of 10", "groups of 4", "per_device_eval_batch_size")
    ),
    "too few problems": failing("--train_problems", "3", says=("3 training problem(s)", "takes 4", "batch_size")),
    "LoRA of no module": failing("--use_peft", "--lora_target_modules", "nope", says=("nope", "not found")),
    "model neither here nor cached": failing(
        "--model_name_or_path",
        "Qwen/Qwen2.5-0.5B-Instruct",
        says=("'Qwen/Qwen2.5-0.5B-Instruct'", "cannot be downloaded", "--embedded"),
    ),
    "nothing to resume": failing(
        "--resume_from_checkpoint", "true", says=("no complete checkpoint", "output'", "remove --resume")
    ),
    "checkpoint of the other kind": failing(
        "--resume_from_checkpoint",
        "{folder}/checkpoint-1",
        "--use_peft",
        files={"checkpoint-1/trainer_state.json": "{}"},
        says=("checkpoint-1'", "all weights", "remove --use_peft"),
    ),
    "made for another engine": failing(
        "--engine", "zero3", says=("made for engine zero3", "the launch is one_process", "--config_file")
    ),
    "an adapter as the model": failing(
        *("--model_name_or_path", "{folder}/adapter", "--embedded"),
        prepare=save_adapter,
        says=("holds an adapter, not a model", "name its base model", "--resume_from_checkpoint"),
    ),
    "two that never meet": failing(
        "--use_cpu", "false", launcher="{folder}/a.yaml", says=("started 2 processes", "run alone", "--use_cpu")
    ),
}
FAILURES["two that never meet"].files["a.yaml"] = (
    (RECIPES / "accelerate" / "cpu_2_processes.yaml").read_text().replace("use_cpu: false", "use_cpu: true")
)
