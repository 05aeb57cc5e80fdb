"""The cells of `launches_gpu`: models, problems, settings, and the two command lines that are compared.

A model has the published shape and random weights. Its tokenizer is of Qwen2's class, trained here on word problems,
with as many unused words behind what it learned as the vocabulary has room for. So a prompt has about 22 tokens, and
what such a model writes is nearly all made of unused words.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen2Tokenizer

from trl_grpo_ext.launch.doctor.model import KNOWN_MODELS, known_config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
sys.path.append(str(RECIPES))

from common.problems import PLAIN_PROMPT  # noqa: E402
from embedded.word_problems import make_problems  # noqa: E402

Settings = dict[str, Any]
PLAIN, EXACT, OFF = "trl grpo", "ours, exact", "ours, off"
ARMS = (PLAIN, EXACT, OFF)
DEFAULTS = "qwen2.5_0.5b.yaml"
"""What the recipe puts under every run configuration."""
NOT_OF_TRL = ("engine", "processes", "rewards")
"""What our run configurations hold besides TRL's settings."""
TRL = "from trl.cli import main; raise SystemExit(main())"
"""The `trl` command, wherever it was installed to."""
PROBE = "bench.launch_cells_probe"
MARKS = "LAUNCH_BENCH_MARKS"
"""Environment variable: the file that the reward writes its marks to."""
TINY: Settings = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Cell:
    """One model in one kind of training.

    Attributes:
        name: In the table and behind `--cells`.
        model: Whose shape it has.
        config: The run configuration, a file of `recipes/configs`.
        bits: Of the base model's linear layers as they are stored, 0 where they are not quantised.
        dtype: Of the other weights.
        changes: What differs from that file, on both sides.
    """

    name: str
    model: str
    config: str
    bits: int
    dtype: str
    changes: Settings = field(default_factory=dict)


SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
ONE_GPU = {"dtype": "bfloat16", "optim": "adamw_8bit"}
"""7B in full on one GPU: 7.6 billion weights and gradients in bfloat16 are 15 GB each, two states of 8 bits for each
weight 14 GB, those of the embedding in float32 4 GB: 49 GB. With the float32 weights and Adam of the smaller model it
would be 122 GB. The recipe for 8 GPUs needs 8 processes, so the settings are the small model's."""
CELLS = (
    Cell("0.5B full", SMALL, DEFAULTS, 0, "float32"),
    Cell("7B QLoRA", LARGE, "qwen2.5_7b_qlora_24gb.yaml", 4, "bfloat16"),
    Cell("7B full", LARGE, DEFAULTS, 0, "bfloat16", ONE_GPU),
    Cell("0.5B QLoRA", SMALL, "qwen2.5_7b_qlora_24gb.yaml", 4, "bfloat16"),
)
"""In the order in which they are measured."""


@dataclass(frozen=True)
class Size:
    """What both sides do in a run."""

    steps: int = 20
    tokens: int = 32
    """Most that a completion may have. Random weights hardly ever end one earlier."""
    rows: int = 16
    """Completions in a micro-batch."""
    parts: int = 2
    """Micro-batches of a step."""
    members: int = 8
    """Completions of a problem."""
    cpu: bool = False

    @property
    def completions(self) -> int:
        return self.rows * self.parts

    @property
    def problems(self) -> int:
        return self.steps * self.completions // self.members


# ------------------------------------------------------------------------------------------------------------- inputs


def shape(model: str, tiny: bool) -> PreTrainedConfig:
    """The published configuration of a known model, or a tiny one."""
    return Qwen2Config(**{**KNOWN_MODELS[model].sizes, **TINY}) if tiny else known_config(model)


def save_model(folder: Path, model: str, tiny: bool, device: str) -> Path:
    """Make a model with random weights in bfloat16, and its tokenizer, as a folder that `from_pretrained` reads."""
    config = shape(model, tiny)
    texts = (PLAIN_PROMPT.format(question=row["question"]) for row in make_problems("train", 512, seed=0))
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=480, show_progress=False)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    known = written["model"]["vocab"]
    known.update({f"unused{number}": number for number in range(len(known), config.vocab_size)})
    file.write_text(json.dumps(written), encoding="utf-8")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    del made
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # this process keeps what it does not give back, and the runs need it
    return folder


def save_problems(folder: Path, count: int) -> tuple[Path, Path]:
    """Write the same training problems for both sides.

    Returns:
        For the recipe a file with GSM8K's columns, whose last row it holds out; for TRL a folder that
        `datasets.load_dataset` reads, with the prompts as the recipe makes them.
    """
    rows = make_problems("train", count + 1, seed=0)
    ours, theirs = folder / "problems.jsonl", folder / "prompts"
    theirs.mkdir()
    ours.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    prompts = [{"prompt": PLAIN_PROMPT.format(question=row["question"]), "answer": row["answer"]} for row in rows[:-1]]
    (theirs / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts), encoding="utf-8")
    return ours, theirs


# ----------------------------------------------------------------------------------------------------------- commands


def settings_of(cell: Cell, size: Size, model: Path) -> Settings:
    """What is set on both sides over the run configuration."""
    settings: Settings = {
        "model_name_or_path": str(model),
        "max_steps": size.steps,
        "max_completion_length": size.tokens,
        "per_device_train_batch_size": size.rows,
        "gradient_accumulation_steps": size.parts,
        "num_generations": size.members,
        "num_generations_eval": 1,
        "per_device_eval_batch_size": 1,  # the recipe's two evaluations, kept short
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **cell.changes,
    }
    if size.cpu:
        settings |= {"use_cpu": True, "bf16": False, "dtype": "float32"}
    return settings


def words(settings: Mapping[str, Any]) -> list[str]:
    """As on a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def command(cell: Cell, arm: str, settings: Settings, folder: Path, problems: tuple[Path, Path]) -> list[str]:
    """The command line of one run, which writes to `folder/output`; for TRL also its run configuration.

    Args:
        cell: What is trained.
        arm: One of `ARMS`.
        settings: As `settings_of` returns them.
        folder: Of this run; it exists.
        problems: As `save_problems` returns them.
    """
    launcher, given = str(RECIPES / "accelerate" / "one_process.yaml"), words(settings)
    given += ["--output_dir", str(folder / "output")]
    own = RECIPES / "configs" / cell.config
    if arm != PLAIN:
        start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher]
        start += [str(RECIPES / "gsm8k_grpo.py"), "--config", str(own), "--dataset_path", str(problems[0])]
        own_words = {"rewards": f"{PROBE}:even_share", "compact_updates": "exact" if arm == EXACT else "off"}
        return [*start, *given, *words(own_words), "--eval_problems", "1"]
    config = folder / "trl.yaml"
    files = [RECIPES / "configs" / DEFAULTS, own]
    merged = {name: value for file in files for name, value in yaml.safe_load(file.read_text("utf-8")).items()}
    config.write_text(yaml.safe_dump({n: v for n, v in merged.items() if n not in NOT_OF_TRL}), encoding="utf-8")
    start = [sys.executable, "-c", TRL, "grpo", "--accelerate_config", launcher, "--config", str(config)]
    start += ["--dataset_name", str(problems[1])]
    # The recipe measures accuracy whatever is trained on, with weight 0: so does this.
    rewards = [f"{PROBE}.even_share", "trl_grpo_ext.rewards.gsm8k_accuracy.gsm8k_accuracy"]
    return [*start, *given, "--reward_funcs", *rewards, "--reward_weights", "1", "0"]


def environment(folder: Path, cpu: bool) -> dict[str, str]:
    """For one run: no network, no setting left over from another launch, and where the marks go."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TRL_GRPO_EXT_"))}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(path)}
    clean |= {"TOKENIZERS_PARALLELISM": "false", MARKS: str(folder / "marks.jsonl")}
    if cpu:
        return clean | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {"CUDA_VISIBLE_DEVICES": "0"} | clean  # with several, transformers would use them all in one process
