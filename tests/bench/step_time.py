"""How much longer a step takes than with plain TRL and the same loss: prints the table of docs/how_it_works.md.

    python -m tests.bench.step_time [--rounds 15] [--steps 12] [--threads 2]

The arms take turns, in a new order each round, each with a short training of its own on the same scripted completions.
Nothing is generated, so all of the time is the update and what is ours is as large a part as it can be. An arm's time
in a round is its fastest step; the ratio to plain TRL's in the same round is what is reported.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.support import arguments, length_reward, prompts, save_tiny_model, scripted_rollout
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

PLAIN = "plain TRL, `dapo`"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ours, nothing selected": {},
    "ours, `token_mean`": {"loss_aggregation": "token_mean"},
    "ours, `prefix_share`": {"loss_aggregation": "prefix_share"},
    "ours, `tail_mean` (a `reduce`)": {"loss_aggregation": "tail_mean"},
}
WARM_UP = 2


class Stopwatch(TrainerCallback):
    """Seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def save_model(folder: Path) -> Path:
    """About a million parameters, with the tests' character tokenizer."""
    save_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def fastest_step(model: Path, folder: Path, arm: str, steps: int) -> float:
    """Train for some steps and return the fastest one's seconds."""
    plain = arm == PLAIN
    settings: dict[str, Any] = {"loss_type": "dapo", "beta": 0.04, "max_completion_length": 128, "max_steps": steps}
    settings |= {"per_device_train_batch_size": 16, "logging_steps": 10_000, **ARMS[arm]}
    stopwatch = Stopwatch()
    trainer = (GRPOTrainer if plain else GRPOExtTrainer)(
        str(model),
        length_reward,
        arguments(folder, GRPOConfig if plain else GRPOExtConfig, **settings),
        train_dataset=prompts(8),
        callbacks=[stopwatch],
        rollout_func=scripted_rollout,
    )
    trainer.train()
    assert len(stopwatch.seconds) == steps
    return min(stopwatch.seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 8))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        parameters = LlamaForCausalLM.from_pretrained(model).num_parameters()
        for number in range(options.rounds + 1):
            for arm in random.Random(number).sample(list(ARMS), len(ARMS)):
                measured = fastest_step(model, Path(folder) / "run", arm, options.steps)
                if number:  # the first round warms up
                    seconds[arm].append(measured)

    print(f"\n{parameters / 1e6:.1f}M parameters, 16 completions of up to 128 tokens, KL penalty; ", end="")
    print(f"{options.rounds} rounds of {options.steps} steps; {options.threads} threads, ", end="")
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}, trl {version('trl')}\n")
    print("| arm | step, ms | ratio to plain TRL: median | lowest to highest |\n| --- | --- | --- | --- |")
    for arm, times in seconds.items():
        ratios = sorted(mine / theirs for mine, theirs in zip(times, seconds[PLAIN], strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"| {arm} | {1000 * min(times):.1f} | {statistics.median(ratios):.3f} | {spread} |")


if __name__ == "__main__":
    main()
