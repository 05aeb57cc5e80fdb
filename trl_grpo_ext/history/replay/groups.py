"""Which completions belong to one prompt, where the file does not say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigurationError


def runs_of_equal(prompts: Sequence[Any]) -> list[int]:
    """The lengths of the runs of equal prompts, in order."""
    return [sum(1 for _ in run) for _, run in itertools.groupby(prompts)]


def infer_num_generations(runs: Sequence[int]) -> int:
    """The number of completions of one prompt, `G`, from all runs of equal prompts.

    TRL writes the `G` completions of a prompt one after the other. A prompt that comes twice in a row makes a run of
    `2 G`, so `G` is the common divisor of the runs. Where every prompt comes twice it is told wrongly, as `2 G`.

    Raises:
        ConfigurationError: The runs have no common divisor but 1.
    """
    size = math.gcd(*runs)
    if size == 1:
        raise ConfigurationError(
            f"How many completions a prompt has cannot be told: the prompts come in runs of {_listed(runs)}, which "
            "have no common divisor. Give --num_generations, or files of whole groups in TRL's order."
        )
    return size


def groups_by_runs(prompts: Sequence[Any], num_generations: int, where: str) -> list[list[int]]:
    """The rows of each group, where the completions of a prompt stand one after the other.

    Raises:
        ConfigurationError: A run of equal prompts is no multiple of `num_generations`.
    """
    runs = runs_of_equal(prompts)
    wrong = [run for run in runs if run % num_generations]
    if wrong:
        raise ConfigurationError(
            f"{where}: {wrong[0]} completions of one prompt stand in a row, which is no multiple of num_generations="
            f"{num_generations}. Give the run's --num_generations."
        )
    return [list(range(first, first + num_generations)) for first in range(0, len(prompts), num_generations)]


def groups_by_number(numbers: Sequence[Any], where: str) -> list[list[int]]:
    """The rows of each group by the file's own numbers, in the order in which they first occur.

    Raises:
        ConfigurationError: The groups have different sizes.
    """
    rows: dict[Any, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(str(number) if isinstance(number, list | dict) else number, []).append(row)
    sizes = {len(members): number for number, members in reversed(rows.items())}
    if len(sizes) > 1:
        shown = ", ".join(f"{sizes[size]!r:.40} has {size}" for size in sorted(sizes))
        raise ConfigurationError(f"{where}: all groups must have as many completions, and group {shown}.")
    return list(rows.values())


def _listed(runs: Sequence[int]) -> str:
    distinct = sorted(set(runs))
    return ", ".join(map(str, distinct[:5])) + (", ..." if len(distinct) > 5 else "")
