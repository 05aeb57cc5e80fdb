"""How much longer a step takes than with plain TRL and the same loss: prints a table. docs/how_it_works.md names it.

    python -m bench.step_time [--steps 150] [--threads 1]

Each arm is a real training on the same scripted completions, and the arms take turns step by step, in a new order each
time, so that a machine that slows down slows all of them. Nothing is generated, so all of the time is the update and
what is ours is as large a part as it can be. Reported is the median over the steps of the ratio to plain TRL's step of
the same turn, with the quartiles. Time is that of the processor: other work on the machine counts less than on a clock.
"""

import argparse
import random
import statistics
import tempfile
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, TrainerState
from trl import GRPOConfig, GRPOTrainer

from bench.tables import machine, markdown, versions
from bench.turns import TakingTurns, Turns, save_llama
from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.credit.flow import calling
from trl_grpo_ext.guard.reward_watch import RewardWatch
from trl_grpo_ext.testing import make_rollout

PLAIN = "plain TRL, `dapo`"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ours, nothing selected": {},
    "ours, `token_mean`": {"loss_aggregation": "token_mean"},
    "ours, `tail_mean` (a `reduce`)": {"loss_aggregation": "tail_mean"},
    "ours, `token_mean` and `smooth_clip`": {"loss_aggregation": "token_mean", "token_losses": ["smooth_clip"]},
}
WARM_UP = 5


def trainer_of(model: Path, folder: Path, arm: str, steps: int, turns: Turns) -> Any:
    settings: dict[str, Any] = {"loss_type": "dapo", "beta": 0.04, "max_completion_length": 128, "max_steps": steps + 1}
    settings |= {"per_device_train_batch_size": 16, **ARMS[arm]}
    plain = arm == PLAIN
    return (GRPOTrainer if plain else GRPOExtTrainer)(
        str(model),
        length_reward,
        arguments(folder, GRPOConfig if plain else GRPOExtConfig, **settings),
        train_dataset=prompts(8),
        callbacks=[turns],
        rollout_func=scripted_rollout,
    )


def measure(model: Path, folder: Path, steps: int) -> dict[str, list[float]]:
    """Seconds of every step of every arm, the warm-up left out."""
    arms = TakingTurns(ARMS, lambda arm, turns: trainer_of(model, folder, arm, steps, turns))
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(steps):
        for arm in random.Random(number).sample(list(ARMS), len(ARMS)):
            seconds[arm].append(arms.turn(arm).seconds)
    arms.close()
    return {arm: times[WARM_UP:] for arm, times in seconds.items()}


def fingerprint_seconds(rows: int = 64, tokens: int = 1024, calls: int = 200) -> dict[str, float]:
    """What one call of a reward or a hook pays for being watched, its inputs looked at before and after."""
    said = [[{"role": "assistant", "content": "word " * tokens}] for _ in range(rows)]
    asked = [[{"role": "user", "content": "What is 17 + 1?"}] for _ in range(rows)]
    columns = {"prompts": asked, "completions": said, "answer": ["18"] * rows}
    columns |= {"completion_ids": [list(range(tokens)) for _ in range(rows)]}
    state: Any = TrainerState(global_step=1)

    def reward(completions: list[Any], **more: Any) -> list[float]:
        return [0.0] * len(completions)

    watched = RewardWatch().wrap(reward, "reward")
    rollout = make_rollout([tokens] * rows, step=1, completions=said, prompts=asked, columns={"answer": ["18"] * rows})
    advantages_B_T = torch.zeros(rows, tokens)

    def look_at_a_rollout() -> None:
        with calling(look_at_a_rollout, "hook", rollout, advantages_B_T=advantages_B_T):
            pass

    def seconds(call: Callable[[], Any]) -> float:
        return min(timeit.repeat(call, number=calls, repeat=7)) / calls

    plain = seconds(lambda: reward(**columns, trainer_state=state))
    return {
        "a reward": seconds(lambda: watched(**columns, trainer_state=state)) - plain,
        "a hook": seconds(look_at_a_rollout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    with tempfile.TemporaryDirectory() as folder:
        model = save_llama(Path(folder) / "model", hidden_size=128, intermediate_size=512, max_position_embeddings=256)
        parameters = LlamaForCausalLM.from_pretrained(model).num_parameters()
        seconds = measure(model, Path(folder) / "run", options.steps)

    print(f"\n{parameters / 1e6:.1f}M parameters, 16 completions of up to 128 tokens, KL penalty; ", end="")
    print(f"{options.steps} steps of each; {options.threads} thread(s), {machine()}, {versions('torch', 'trl')}\n")
    rows = []
    for arm, times in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(times, seconds[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append([arm, f"{1000 * statistics.median(times):.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
    print(markdown(("arm", "step, ms: median", "ratio to plain TRL: median", "quartiles"), rows))
    print("\nWatching the inputs, 64 completions of 1,024 tokens, microseconds a call: ", end="")
    print(", ".join(f"{what} {1e6 * cost:.0f}" for what, cost in fingerprint_seconds().items()))


if __name__ == "__main__":
    main()
