"""The GSM8K recipe beside plain TRL's `trl grpo` with the same settings, each started as a person would, on one GPU.

    python -m bench.launches_gpu [--cells "7B QLoRA"] [--arms "trl grpo" "ours, exact"] [--out FOLDER]
    python -m bench.launches_gpu --tiny --cells "0.5B full" --steps 2

NO GPU HAS RUN THIS YET: only `--tiny`, on the CPU.

Models of the shapes of Qwen2.5-0.5B and 7B with random weights, in full and as QLoRA. Three arms: `trl grpo`, the
recipe with `compact_updates: exact` (its default), and with `off`. Nothing is downloaded. Settings are those of the run
configurations in `recipes/configs`, on both sides; changed are batch and length, to be quick, and for 7B in full the
weights (bfloat16) and the optimizer (`adamw_8bit`), to fit on one GPU.

Random weights answer nothing right, so both sides are given a reward with a signal, the share of even token ids.
Completions run to the limit and all have a signal, so compact updates have nothing to save here: what they save where
rows differ is measured by `compact_updates_gpu`. The recipe's evaluations are not among the steps. A step lasts from
the end of one optimizer step to the end of the next; the first is left out. Two arms whose optimizers were given other
weights, or that made another number of steps, are no comparison: their line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
sys.path.append(str(RECIPES))

from common.problems import PLAIN_PROMPT  # noqa: E402
from embedded.word_problems import make_problems  # noqa: E402

PLAIN, EXACT, OFF = "trl grpo", "ours, exact", "ours, off"
DEFAULTS, QLORA = "qwen2.5_0.5b.yaml", "qwen2.5_7b_qlora_24gb.yaml"
SHAPES: dict[str, dict[str, int]] = {  # as published
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
MORE_OF_SHAPE = {
    "0.5B": {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "tiny": {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Cell:
    """One model in one kind of training: its shape, its run configuration, and what differs from that on both sides."""

    shape: str
    config: str
    changes: Mapping[str, Any] = field(default_factory=dict)


CELLS = {
    "0.5B full": Cell("0.5B", DEFAULTS),
    "7B QLoRA": Cell("7B", QLORA),
    "7B full": Cell("7B", DEFAULTS, {"dtype": "bfloat16", "optim": "adamw_8bit"}),  # 49 GB; in float32 it were 122
    "0.5B QLoRA": Cell("0.5B", QLORA),
}


def save_model(folder: Path, shape: str, device: str) -> Path:
    """Make a model with random weights and a tokenizer of word problems, whose other words are unused ones."""
    config = Qwen2Config(**SHAPES[shape], **MORE_OF_SHAPE[shape], max_position_embeddings=2048)
    texts = (PLAIN_PROMPT.format(question=row["question"]) for row in make_problems("train", 512, seed=0))
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=480, show_progress=False)
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = written["model"]["vocab"]
    known.update({f"unused{number}": number for number in range(len(known), config.vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # this process keeps what it does not give back, and the runs need it
    return folder


def command(cell: Cell, arm: str, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """The command line of one run, which writes to `folder/output`."""
    launcher, own = str(RECIPES / "accelerate" / "one_process.yaml"), RECIPES / "configs" / cell.config
    rows = make_problems("train", 257, seed=0)
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    given += ["--output_dir", str(folder / "output")]
    if arm != PLAIN:
        problems = folder / "problems.jsonl"  # the recipe holds the last row out
        problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher]
        start += [str(RECIPES / "gsm8k_grpo.py"), "--config", str(own), "--dataset_path", str(problems), *given]
        start += ["--rewards", "bench.launches_probe:even_share", "--eval_problems", "1"]
        return [*start, "--compact_updates", "exact" if arm == EXACT else "off"]
    (folder / "prompts").mkdir()
    prompts = [{"prompt": PLAIN_PROMPT.format(question=row["question"]), "answer": row["answer"]} for row in rows[:-1]]
    text = "".join(f"{json.dumps(row)}\n" for row in prompts)
    (folder / "prompts" / "train.jsonl").write_text(text, encoding="utf-8")
    files = [yaml.safe_load(file.read_text("utf-8")) for file in (RECIPES / "configs" / DEFAULTS, own)]
    merged = {name: value for one in files for name, value in one.items()}
    ours = ("engine", "processes", "rewards")
    (folder / "trl.yaml").write_text(yaml.safe_dump({n: v for n, v in merged.items() if n not in ours}), "utf-8")
    start = [sys.executable, "-c", "from trl.cli import main; raise SystemExit(main())", "grpo"]
    start += ["--accelerate_config", launcher, "--config", str(folder / "trl.yaml")]
    start += ["--dataset_name", str(folder / "prompts"), *given]
    # The recipe measures accuracy whatever is trained on, with weight 0: so does this.
    rewards = ["bench.launches_probe.even_share", "trl_grpo_ext.rewards.gsm8k_accuracy.gsm8k_accuracy"]
    return [*start, "--reward_funcs", *rewards, "--reward_weights", "1", "0"]


def measure(words: list[str], folder: Path, completions: int, out: Path, tiny: bool) -> dict[str, Any]:
    """Run a command and read its marks; what it said goes to a file."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TRL_GRPO_EXT_"))}
    clean |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    clean |= {"LAUNCH_BENCH_MARKS": str(folder / "marks.jsonl"), "CUDA_VISIBLE_DEVICES": "" if tiny else "0"}
    with out.open("wb") as said:
        status = subprocess.run(words, cwd=ROOT, env=clean, stdout=said, stderr=said, check=False).returncode
    if status:
        return {"problem": f"ended with status {status}, see {out}"}
    marks = [json.loads(line) for line in (folder / "marks.jsonl").read_text(encoding="utf-8").splitlines()]
    steps: list[tuple[float, float, int]] = []
    before, batch, peaks, facts = None, None, [], {}
    for mark in marks:
        if mark["what"] == "generated":
            batch = mark if mark["rows"] == completions else batch  # others are the recipe's evaluations
        else:
            if before is not None and batch is not None:
                steps.append((batch["at"] - before, mark["at"] - batch["at"], batch["tokens"]))
                peaks.append(mark["peak"])
            before, batch = mark["at"], None
            facts = {"trained": mark["trained"], "dtypes": mark["dtypes"]}
    generation, update = (statistics.fmean(step[n] for step in steps) for n in (0, 1))
    tokens = statistics.fmean(step[2] for step in steps)
    figures = {"steps": len(steps), "tokens_per_second": tokens / (generation + update)}
    return {**figures, "generation": generation, "update": update, "peak_gb": max(peaks) / 1e9, **facts}


def line(cell: str, arm: str, run: Mapping[str, Any], plain: Mapping[str, Any] | None) -> str:
    if "problem" in run:
        return f"| {cell} | {arm} | {run['problem']} | | | | |"
    alike = plain is not None and all(run[name] == plain.get(name) for name in ("steps", "trained", "dtypes"))
    ratio = f"{run['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain and alike else "not comparable"
    numbers = f"{run['generation']:.3g} | {run['update']:.3g} | {run['peak_gb']:.2f}"
    return f"| {cell} | {arm} | {run['tokens_per_second']:.0f} | {ratio} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--arms", nargs="+", default=[PLAIN, EXACT, OFF], choices=[PLAIN, EXACT, OFF])
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first one is not counted")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that the script works")
    parser.add_argument("--out", type=Path, default=Path("outputs/launches_gpu"), help="for figures and logs")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device here; --tiny runs on the CPU, to see that the script works")
    rows, tokens = (4, 8) if options.tiny else (16, 32)
    settings: dict[str, Any] = {
        "max_steps": options.steps,
        "max_completion_length": tokens,
        "num_generations": rows // 2,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 2,
        "num_generations_eval": 1,
        "per_device_eval_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    on_cpu = {"use_cpu": True, "bf16": False, "dtype": "float32"} if options.tiny else {}
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    print("| cell | arm | tokens/s | times plain TRL's | generation, s | update, s | peak memory, GB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.cells:
        cell = CELLS[name]
        with tempfile.TemporaryDirectory() as work:
            shape = "tiny" if options.tiny else cell.shape
            model = save_model(Path(work) / "model", shape, "cpu" if options.tiny else "cuda")
            for arm in options.arms:
                folder = Path(work) / arm.replace(" ", "_")
                folder.mkdir()
                words = command(cell, arm, {**settings, **cell.changes, **on_cpu, "model_name_or_path": model}, folder)
                run = measure(words, folder, 2 * rows, options.out / f"{name} {arm}.txt", options.tiny)
                found[f"{name}, {arm}"] = run
                print(line(name, arm, run, found.get(f"{name}, {PLAIN}")), flush=True)
    machine = f"{platform.machine()} CPU, tiny shapes" if options.tiny else torch.cuda.get_device_name()
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")}
    content = {"machine": machine, "versions": versions, "settings": settings, "runs": found}
    (options.out / "launches_gpu.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"\n{options.steps} steps; {2 * rows} completions of up to {tokens} tokens each. {machine}; {said}.")


if __name__ == "__main__":
    main()
