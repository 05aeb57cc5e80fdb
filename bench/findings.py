"""Do the findings of a run stay quiet on healthy trainings, and speak where a fault was planted?

    python -m bench.findings [--output outputs/findings] [--only NAME ...] [--page docs/report.md]

Twenty healthy trainings and twelve with a planted fault, all real: the sorting task of `bench.sorting` and the embedded
model on word problems, 40 steps or more each, with other seeds, rewards, hooks, aggregations and losses. A finding on a
healthy one is a false alarm; a planted fault is found if one of the findings that describe it is there. Finished
trainings are kept and only read again, so a restart resumes. With `--page` the result is written into that page.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from bench import sorting
from bench.runner import QUIET
from bench.tables import machine, markdown, versions, write_block
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.guard.guarded import guarded
from trl_grpo_ext.records.findings import Finding, findings_of
from trl_grpo_ext.records.log import LOG_FILE
from trl_grpo_ext.rewards.gsm8k_accuracy import gsm8k_accuracy

from embedded.word_problems import make_problems  # isort: skip (`sorting` puts the recipes on the path)

EMBEDDED = Path(__file__).resolve().parents[1] / "recipes" / "embedded" / "model"
FAULT_FROM = 18
"""The step from which a planted fault shows, where it does not from the start."""


@dataclass(frozen=True)
class Training:
    """One training: what is chosen besides the defaults, and the findings of which one must be there, if any."""

    about: str
    chosen: Mapping[str, Any] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    rewards: Sequence[Callable[..., Any]] = (sorting.positions, sorting.exact)
    words: bool = False
    """Word problems in place of sorting."""
    rows: Callable[[list[dict[str, str]]], list[dict[str, str]]] = list
    """What is done to the training problems."""


# ------------------------------------------------------------------------------------------------- rewards and hooks


def ascending(completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of neighbours in order, whichever digits they are: `9999` has all of it, and so has no answer right."""
    return [sum(a <= b for a, b in itertools.pairwise(text)) / 12 for text in completions]


def digits_written(completions: Sequence[str], **columns: Any) -> list[float]:
    """More text is better."""
    return [len(text) / 12 for text in completions]


def nothing_special(completions: Sequence[str], **columns: Any) -> list[float]:
    """0 for every completion of this task."""
    return [float("é" in text) for text in completions]


def breaks(completions: Sequence[str], answer: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    """`positions`, until its server starts to fail for half of the completions."""
    if trainer_state.global_step >= FAULT_FROM and len(answer[0]) % 2:
        raise ConnectionError("no answer from the server")
    return [float(score) for score in sorting.positions(completions, answer)]


def longer(completions: Sequence[str], **columns: Any) -> list[float]:
    """Characters, up to the limit of the word problems."""
    return [len(text) / 56 for text in completions]


def unreadable(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """References without a number, in an ever larger part of the data, of which the run sees the first half."""
    share = [4 * place / len(rows) - 0.8 for place in range(len(rows))]
    chance = random.Random(0)
    return [
        row | ({"answer": "see above"} if chance.random() < part else {}) for row, part in zip(rows, share, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------- trainings

_TWO_REWARDS = (sorting.positions, sorting.inclusion_pairs, sorting.exact)

HEALTHY: dict[str, Training] = {
    **{f"plain_{seed}": Training("TRL's defaults", {"seed": seed}) for seed in (1, 2, 3, 4)},
    "leave_one_out": Training("a hook", {"advantage_hooks": ["leave_one_out"], "seed": 5}),
    "entropy_shaping": Training("a hook", {"advantage_hooks": ["entropy_shaping"], "seed": 6}),
    "prefix_tree": Training("a hook", {"advantage_hooks": ["prefix_tree"], "seed": 7}),
    "process_rewards": Training(
        "credit by span",
        {"advantage_hooks": [{"name": "process_rewards", "form": "sum", "gamma": 0.0, "baseline": "none"}], "seed": 8},
    ),
    "prompt_mean": Training("an aggregation", {"loss_aggregation": "prompt_mean", "seed": 9}),
    "length_power": Training("an aggregation", {"loss_aggregation": "length_power", "seed": 10}),
    "resample": Training("groups with signal only", {"resample": {"filter": "signal", "max_rounds": 2}, "seed": 11}),
    "kl": Training("beta 0.04", {"beta": 0.04, "seed": 12}),
    "cispo": Training("another loss", {"loss_type": "cispo", "seed": 13}),
    "reuse": Training("two updates a batch", {"num_iterations": 2, "max_steps": 80, "seed": 14}),
    "slow": Training("a quarter of the learning rate", {"learning_rate": 5e-5, "seed": 15}),
    "two_rewards": Training("two rewards", {"reward_weights": [1.0, 0.5, 0.0], "seed": 16}, rewards=_TWO_REWARDS),
    **{
        f"words_{seed}": Training("word problems", {"seed": seed}, rewards=(gsm8k_accuracy,), words=True)
        for seed in (1, 2)
    },
    "words_hooks": Training(
        "word problems, hook and aggregation",
        {"advantage_hooks": ["leave_one_out"], "loss_aggregation": "prompt_mean", "seed": 3},
        rewards=(gsm8k_accuracy,),
        words=True,
    ),
    "words_compact": Training(
        "word problems, compact updates, entropy_shaping",
        {"advantage_hooks": ["entropy_shaping"], "compact_updates": "exact", "seed": 4},
        rewards=(gsm8k_accuracy,),
        words=True,
    ),
}

PLANTED: dict[str, Training] = {
    "gamed": Training(
        "the reward counts neighbours in order, whichever digits they are",
        {"reward_weights": [1.0, 0.0]},
        ("reward_against_metric",),
        rewards=(ascending, sorting.exact),
    ),
    "gamed_words": Training(
        "the reward counts characters",
        {"reward_weights": [1.0, 0.0], "learning_rate": 3e-4},
        ("reward_against_metric",),
        rewards=(longer, gsm8k_accuracy),
        words=True,
    ),
    "constant": Training("the reward is the same for all", {}, ("no_signal",), rewards=(nothing_special,)),
    "silent": Training(
        "one reward of two is the same for all",
        {"reward_weights": [1.0, 1.0]},
        ("constant_reward",),
        rewards=(sorting.positions, nothing_special),
    ),
    "cut_off": Training(
        "max_completion_length 3 for answers of 4 to 9 digits",
        {"max_completion_length": 3, "reward_weights": [1.0]},
        ("truncated",),
        rewards=(sorting.exact,),
    ),
    "runaway": Training(
        "more text is better", {"reward_weights": [1.0, 0.0]}, ("truncated",), rewards=(digits_written, sorting.exact)
    ),
    "hot": Training("learning rate 0.1", {"learning_rate": 0.1}, ("entropy_gone", "reward_fell")),
    "unreadable": Training(
        "ever more references without a number",
        {"shuffle_dataset": False},
        ("failing_reward",),
        rewards=(gsm8k_accuracy,),
        words=True,
        rows=unreadable,
    ),
    "server": Training(
        f"the reward raises for half of the prompts from step {FAULT_FROM} on",
        {"reward_weights": [1.0]},
        ("failing_reward",),
        rewards=(guarded(breaks, on_error=None),),
    ),
}

TRAININGS = HEALTHY | PLANTED


def train(name: str, folder: Path, model: Path) -> None:
    """Train once into a folder, deterministic in the training alone."""
    training = TRAININGS[name]
    settings: dict[str, Any] = {
        "seed": 0,
        "learning_rate": 1e-4 if training.words else 2e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "max_steps": 30 if training.words else 40,
        "per_device_train_batch_size": 32 if training.words else 64,
        "num_generations": 8,
        "max_completion_length": 56 if training.words else sorting.LONGEST_COMPLETION,
        "reward_weights": [1.0] if training.words or len(training.rewards) == 1 else [1.0, 0.0],
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 32,
        "num_generations_eval": 1,
        "beta": 0.0,
        "token_records": 16,
        **QUIET,
        "logging_steps": 1,
        **training.chosen,
    }
    steps = settings["max_steps"]
    seed = settings["seed"]
    keywords = {key: settings.pop(key) for key in ("advantage_hooks",) if key in settings}
    rows = _problems(training, "train", 8 * steps, seed)
    held_out = _problems(training, "test", 32 if training.words else 64, 0)
    random.seed(seed)
    torch.manual_seed(seed)
    trainer = GRPOExtTrainer(
        str(EMBEDDED if training.words else model),
        list(training.rewards),
        GRPOExtConfig(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_list(training.rows(rows)),
        eval_dataset=Dataset.from_list(held_out),
        **keywords,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _problems(training: Training, split: Literal["train", "test"], size: int, seed: int) -> list[dict[str, str]]:
    if not training.words:
        return sorting.problems(split, size, seed)
    rows = make_problems("train" if split == "train" else "heldout", size, seed)
    return [{"prompt": f"Question: {row['question']}\nAnswer:", "answer": row["answer"]} for row in rows]


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The log entries of a finished training; none if it did not finish."""
    file = folder / LOG_FILE
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return entries if any("train_loss" in entry for entry in entries) else []


def found_in(name: str, output: Path, model: Path) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The history and the findings of a training, which is made first if it has not been."""
    folder = output / name
    if not history_of(folder):
        train(name, folder, model)
    history = history_of(folder)
    return history, findings_of(folder, history)


def verdict(name: str, found: Sequence[Finding]) -> str:
    """Whether the findings are what they should be."""
    names = {one.name for one in found}
    if name in HEALTHY:
        return "false alarm" if names else "quiet"
    return "found" if names & set(PLANTED[name].expected) else "missed"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/findings"))
    parser.add_argument("--only", nargs="+", choices=tuple(TRAININGS), default=tuple(TRAININGS))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    disable_progress_bar()
    model = sorting.warm_up(options.output / "model", steps=240, slips=0.3, batch_size=64, learning_rate=1e-3, seed=0)
    lines = []
    verdicts = []
    for name in options.only:
        history, found = found_in(name, options.output, model)
        rewards = [entry["reward"] for entry in history if entry.get("reward") is not None]
        moved = f"{sum(rewards[:5]) / 5:.2f} to {sum(rewards[-5:]) / 5:.2f}"
        verdicts.append(verdict(name, found))
        said = "; ".join(f"`{one.name}` since step {one.since}" for one in found) or "none"
        kind = "healthy" if name in HEALTHY else "planted"
        lines.append((f"`{name}`", kind, TRAININGS[name].about, moved, said, verdicts[-1]))
        print(name, verdicts[-1], *(f"\n    {one.name}: {one}" for one in found), flush=True)
    quiet = verdicts.count("quiet")
    caught = verdicts.count("found")
    total = [sum(name in of for name in options.only) for of in (HEALTHY, PLANTED)]
    said = f"{quiet} of {total[0]} healthy trainings are quiet, {caught} of {total[1]} planted faults are found"
    where = f"{machine()}; {versions('trl-grpo-ext', 'trl', 'torch')}"
    titles = ("training", "kind", "what", "reward, first to last", "findings", "verdict")
    print(f"\n{markdown(titles, lines)}\n\n{said} ({where}).")
    if options.page is not None:
        write_block(options.page, "findings", f"{said} ({where}).")


if __name__ == "__main__":
    main()
