"""How often training solved each prompt (`OUTPUT_DIR/prompt_rates.jsonl`), and how often the next run draws it.

    prompt_rates: true                             # this run writes the file
    prompt_weights: earlier/prompt_rates.jsonl     # the next one leaves out what is solved
    prompt_weights: {file: earlier/prompt_rates.jsonl, solved: 0.1, unsolved: 0.5, mixed: 2}

A line is one group: `{"step": 12, "prompt": ..., "solved": 3, "sampled": 8, "rate": 0.375}`, in the order of training.
A completion solves its prompt if it reaches every threshold of `pass_thresholds`; one that a reward left out is not
counted. A resumed run keeps the lines before its checkpoint.

A prompt's weight is how often an epoch draws it: 0 leaves it out, 1 is as usual, 2 is twice, and 0.3 draws three in ten
of such prompts, the same ones in every epoch. The prompt's last line decides, since it shows what the policy can do
now. Prompts that the file lacks keep weight 1. In a file made by hand a line may have a `weight` of its own, which
takes precedence. Prompts are compared by their text, so rows that differ only in an image count as one.

A group in which all or no completions solve the prompt gives no gradient under GRPO. But a prompt that is left out is
never seen again and may be unlearned unnoticed: keep some of them, and evaluate on all.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import ConfigurationError
from .files import write_atomically

RATES_FILE = "prompt_rates.jsonl"

WEIGHTS: Mapping[str, float] = {"solved": 0.0, "unsolved": 1.0, "mixed": 1.0}
"""Default weight by the outcome of a prompt's last group."""


def key_of(prompt: Any) -> str:
    """Identify a prompt by its text or messages; parts that are not text count by their kind alone."""
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=lambda other: type(other).__name__)


def solved_groups(
    rewards_N_K: torch.Tensor, thresholds: Mapping[tuple[int, str], float], group_size: int
) -> list[tuple[int, int]]:
    """For every group, count the completions that solve the prompt and those that were judged.

    Thresholds are by reward column and name.
    """
    columns = [column for column, _ in thresholds]
    judged_N = ~torch.isnan(rewards_N_K[:, columns]).any(dim=1)
    solved_N = judged_N.clone()
    for (column, _), threshold in thresholds.items():
        solved_N &= rewards_N_K[:, column] >= threshold
    pairs_Q_2 = torch.stack([solved_N.view(-1, group_size).sum(1), judged_N.view(-1, group_size).sum(1)], dim=1)
    return [(int(solved), int(judged)) for solved, judged in pairs_Q_2.tolist()]


def shares_of(groups: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The shares of groups in which all, and in which no, completions solve the prompt; empty if none was judged."""
    known = [(solved, judged) for solved, judged in groups if judged]
    if not known:
        return {}
    return {
        "groups/all_solved": sum(solved == judged for solved, judged in known) / len(known),
        "groups/none_solved": sum(solved == 0 for solved, _ in known) / len(known),
    }


class PromptRates(TrainerCallback):
    """Writes the file, on the main process. A full disk costs the file, not the run."""

    def __init__(self, thresholds: Mapping[tuple[int, str], float], group_size: int) -> None:
        self.thresholds, self.group_size = thresholds, group_size
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the lines of earlier steps; drop the rest, which a training after this checkpoint wrote."""
        if not state.is_world_process_zero:
            return
        self._path = path = Path(args.output_dir) / RATES_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(path) if _step_of(line) < state.global_step] if path.is_file() else []
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, prompts: Sequence[Any], groups: Sequence[tuple[int, int]]) -> None:
        """Add a generation batch: one prompt for each of the groups that `solved_groups` returned."""
        if self._path is None:
            return
        lines = []
        for prompt, (solved, judged) in zip(prompts, groups, strict=True):
            if judged:
                entry = {"step": step, "prompt": json.loads(key_of(prompt)), "solved": solved, "sampled": judged}
                lines.append(json.dumps({**entry, "rate": solved / judged}) + "\n")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warnings.warn(f"{self._path} cannot be written: {error}. Training goes on.", stacklevel=3)
        self._path = None


@dataclass(frozen=True)
class PromptWeights:
    """How often an epoch draws each prompt, as the setting `prompt_weights` says."""

    file: str
    solved: float = WEIGHTS["solved"]
    unsolved: float = WEIGHTS["unsolved"]
    mixed: float = WEIGHTS["mixed"]

    def __post_init__(self) -> None:
        for name in WEIGHTS:
            _checked(getattr(self, name), f"prompt_weights: {name}")

    def read(self) -> dict[str, float]:
        """Return the weights of the file's prompts, by `key_of`."""
        try:
            lines = _lines(Path(self.file))
        except OSError as error:
            raise ConfigurationError(f"prompt_weights: {self.file!r} cannot be read: {error}.") from error
        weights: dict[str, float] = {}
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                key = key_of(entry["prompt"])
                weight = entry["weight"] if "weight" in entry else self._weight_of(entry["rate"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(
                    f"prompt_weights: line {number} of {self.file!r} must be {{prompt, rate}} or {{prompt, weight}}, "
                    f"got {line[:80]!r} ({type(error).__name__}: {error})."
                ) from error
            weights[key] = _checked(weight, f"prompt_weights: the weight in line {number} of {self.file!r}")
        return weights

    def _weight_of(self, rate: float) -> float:
        if not 0 <= rate <= 1:
            raise ValueError(f"a rate of {rate!r}")
        return self.solved if rate == 1 else self.unsolved if rate == 0 else self.mixed

    def rows(self, prompts: Sequence[Any], seed: int, at_least: int) -> list[int]:
        """Return the rows of an epoch: each as often as its weight says, duplicates next to each other.

        The seed, the same on all ranks, decides which rows a fractional weight draws. `at_least` is the number of
        prompts that a generation batch takes.
        """
        weights = self.read()
        known = [weights.get(key_of(prompt)) for prompt in prompts]
        if all(weight is None for weight in known):
            raise ConfigurationError(
                f"prompt_weights has no effect: none of the {len(weights)} prompts of {self.file!r} is among the "
                f"{len(prompts)} of train_dataset. Take the file of a run on the same prompts."
            )
        drawn = torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
        rows: list[int] = []
        for row, (weight, chance) in enumerate(zip(known, drawn, strict=True)):
            whole, rest = divmod(1.0 if weight is None else weight, 1.0)
            rows += [row] * (int(whole) + (chance < rest))
        if len(rows) < at_least:
            raise ConfigurationError(
                f"prompt_weights leaves {len(rows)} of {len(prompts)} prompts, and a generation batch takes "
                f"{at_least}. Raise the weights solved, unsolved or mixed."
            )
        if rows == [*range(len(prompts))]:
            warnings.warn(f"prompt_weights changes nothing: {self.file!r} gives every prompt weight 1.", stacklevel=4)
        return rows


def read_prompt_weights(value: Any) -> PromptWeights | None:
    """Read the setting: None, a file, or a mapping with `file` and weights."""
    if value is None:
        return None
    if isinstance(value, str):
        return PromptWeights(value)
    names = ("file", *WEIGHTS)
    if not isinstance(value, dict) or not isinstance(value.get("file"), str) or not set(value) <= set(names):
        raise ConfigurationError(
            f"prompt_weights must be a file, or a mapping with file and any of {', '.join(WEIGHTS)}; got {value!r}."
        )
    return PromptWeights(**value)


def _checked(weight: Any, what: str) -> float:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight < 0:
        raise ConfigurationError(f"{what} must be a finite number from 0 up, got {weight!r}.")
    return float(weight)


def _lines(path: Path) -> list[str]:
    # Not `splitlines`: in a file made by hand a prompt may hold U+2028.
    return [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line that an interrupted run left incomplete."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
