"""What sampling with vLLM costs on the CPU, and how far it is from the trainer: prints a table.

    python -m recipes.common.models smollm2 /tmp/smollm2
    .venv-vllm/bin/python -m bench.vllm_sampling /tmp/smollm2 [--steps 2] [--completions 16] [--tokens 64]

Each arm is a training of a few steps by itself, in a process of its own, with the same prompts and sizes: transformers
samples, or vLLM in the trainer's process. Seconds are those of the processor, so other work counts less than on a
clock, and vLLM does not compile its model, which takes minutes before the first step. The gap is between the engine's
log-probability of a sampled token and the trainer's, in nats; what a correction would mask is at TRL's bound of 3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # vLLM's own: no compilation
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.tables import machine, markdown, versions

ARMS = {  # name: the trainer's data type, the engine's
    "transformers, float32": ("float32", None),
    "vLLM float32, trainer float32": ("float32", "float32"),
    "vLLM bfloat16, trainer float32": ("float32", "bfloat16"),
    "transformers, bfloat16": ("bfloat16", None),
    "vLLM bfloat16, trainer bfloat16": ("bfloat16", "bfloat16"),
}
BOUND = 3.0
HEADER = ["sampler and trainer", "generation, s", "rest of a step, s", "mean gap", "largest"]
HEADER += ["tokens masked by `token_mask`", "completions masked by `sequence_mask`"]


def measure(model: str, trainer_dtype: str, engine_dtype: str | None, sizes: dict[str, int], folder: str) -> Any:
    """One training; CPU seconds of each step's generation and of the rest, and the gaps of its tokens."""
    import torch
    from datasets import Dataset

    from tests.support import arguments, length_reward
    from trl_grpo_ext import GRPOExtTrainer

    class Timed(GRPOExtTrainer):
        """Times generation and steps, and keeps the two log-probabilities of every token."""

        generated: list[float]
        whole: list[float]
        ratios: list[Any]

        def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
            started = time.process_time()
            try:
                return super()._generate_single_turn(*arguments, **keywords)
            finally:
                self.generated.append(time.process_time() - started)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            if "sampling_per_token_logps" in batch:
                mask = batch["completion_mask"].bool()
                gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).float() * mask
                self.ratios.append((gaps, mask))
            return batch

        def training_step(self, *arguments: Any, **keywords: Any) -> Any:
            started = time.process_time()
            loss = super().training_step(*arguments, **keywords)
            self.whole.append(time.process_time() - started)
            return loss

    if engine_dtype is not None:
        from trl.generation import vllm_generation

        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=engine_dtype)
    questions = [f"What is {a} plus {a + 7}? Explain in one sentence." for a in range(10, 10 + 8 * sizes["steps"])]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": sizes["completions"],
        "num_generations": 8,
        "max_completion_length": sizes["tokens"],
        "max_steps": sizes["steps"],
        "learning_rate": 1e-5,
        "compact_updates": "exact",
        "model_init_kwargs": {"dtype": getattr(torch, trainer_dtype)},
    }
    if engine_dtype is not None:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.15}
        settings |= {"vllm_max_model_length": 128 + sizes["tokens"]}
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]})
    trainer = Timed(model, length_reward, arguments(Path(folder), **settings), train_dataset=data)
    trainer.generated = []
    trainer.whole = []
    trainer.ratios = []
    trainer.train()
    generation = sum(trainer.generated) / sizes["steps"]
    found: dict[str, Any] = {"generation": generation, "rest": sum(trainer.whole) / sizes["steps"] - generation}
    if trainer.ratios:
        nats = torch.cat([gaps[mask] for gaps, mask in trainer.ratios])
        sequences = torch.cat([gaps.sum(1) for gaps, _ in trainer.ratios])
        found |= {"mean": float(nats.abs().mean()), "largest": float(nats.abs().max())}
        found |= {"token_mask": float((nats.exp() > BOUND).float().mean())}
        found |= {"sequence_mask": float((sequences.exp() > BOUND).float().mean())}
    return found


def row(name: str, found: dict[str, Any]) -> list[str]:
    """One row of the table."""
    cells = [name, f"{found['generation']:.1f}", f"{found['rest']:.1f}"]
    if "mean" not in found:
        return [*cells, "0", "0", "", ""]
    shares = [f"{100 * found[mode]:.1f} %" for mode in ("token_mask", "sequence_mask")]
    return [*cells, f"{found['mean']:.4f}", f"{found['largest']:.2f}", *shares]


def main() -> None:
    """Run every arm and print the table; with `--arm`, one of them as JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sizes = {name: getattr(asked, name) for name in ("steps", "completions", "tokens")}
    if asked.arm is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(asked.model, *ARMS[asked.arm], sizes, folder)), flush=True)
        return
    rows = []
    for name in ARMS:
        command = [sys.executable, "-m", "bench.vllm_sampling", *sys.argv[1:], "--arm", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(row(name, json.loads(done.stdout.strip().splitlines()[-1])))
        print(rows[-1], file=sys.stderr, flush=True)
    print(markdown(HEADER, rows))
    print(f"{machine()}; {versions('torch', 'transformers', 'trl', 'vllm')}; {sizes}.")


if __name__ == "__main__":
    main()
