"""Read saved completions of any format into one `SavedBatch` per generation batch.

| file | what is read |
| --- | --- |
| token records | prompts, completions, each reward; groups, tokens, offsets, loss mask, log-probabilities, truncation |
| TRL's tables | prompts, completions, each reward, columns that rewards logged |
| JSON Lines, parquet | `prompt`, `completion`; if there `step`, `group`, `truncated`, `rewards`, `reward`; columns |
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...guard.messages import joined_text
from ..files import Columns, Say, dataset_file, messages_in, plain_messages, read_columns, rows_of, saved_files

_NOT_READ = ("tokens", "stages", "advantages")
"""Large columns of the token records that the replay does not use."""
_OURS = {"step", "group", "member", "prompt", "completion", "truncated", "rewards", "reward", "advantage", "weight"}
_TOKENS = {"prompt_ids", "token_ids", "starts", "ends", "live", "logp", "entropy"}


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """One generation batch, or the saved part of it; `B` completions in whole groups, one group after the other.

    Attributes:
        step: Optimizer steps done when it was saved.
        where: The file and the step, for messages.
        prompts: Strings or lists of messages.
        completions: As reward functions get them: strings or lists of messages.
        texts: The completions' texts.
        group_names: The file's name for each row's group; a running number if it has none.
        num_generations: `G`.
        rewards: Every column of numbers that may be a reward, by name, `B` values or Nones.
        reward_names: Those used if a selection lists no rewards.
        reward: The saved weighted sum; None if it was not saved.
        columns: Everything else, by name, `B` values each.
        tokens: Columns of the token records, by name; None in other files.
        truncated: Whether each was truncated; None if the file does not say.
    """

    step: int
    where: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    texts: Sequence[str]
    group_names: Sequence[Any]
    num_generations: int
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    reward_names: Sequence[str] = ()
    reward: Sequence[float | None] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tokens: Columns | None = None
    truncated: Sequence[bool] | None = None

    def with_log_probabilities(self) -> SavedBatch:
        """The batch without groups whose records lack log-probabilities; it may be empty."""
        saved, size, count = self.tokens or {}, self.num_generations, len(self.texts)
        both = zip(*(saved.get(name, [None] * count) for name in ("logp", "entropy")), strict=True)
        has = [logps is not None and entropies is not None for logps, entropies in both]
        kept = [row for row in range(count) if all(has[row - row % size : row - row % size + size])]

        def cut(values: Any) -> Any:
            if isinstance(values, Mapping):
                return {name: cut(column) for name, column in values.items()}
            return None if values is None else [values[row] for row in kept]

        of_rows = ("prompts", "completions", "texts", "group_names", "rewards", "reward", "columns", "tokens")
        return replace(self, **{name: cut(getattr(self, name)) for name in (*of_rows, "truncated")})


@dataclass(frozen=True)
class _Part:
    """The rows of one step of one file."""

    where: str
    step: int
    columns: Columns

    @property
    def prompts(self) -> list[str]:
        return [join_key(prompt) for prompt in self.columns["prompt"]]

    @property
    def contents(self) -> tuple[list[str], list[str]]:
        """What distinguishes two parts."""
        return self.prompts, [join_key(completion) for completion in self.columns["completion"]]


def read_saved(
    completions: str | Path,
    say: Say,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    hoped_for: int | None = None,
) -> list[SavedBatch]:
    """Read saved completions in the order of their steps, at most `limit` in whole groups.

    If a file does not say which completions belong together, groups have `num_generations`, or what `hoped_for`, a run
    file, says if it fits the prompts, or what equal prompts in a row suggest.
    """
    parts = [part for file in saved_files(completions, say) for part in _parts(file)]
    parts.sort(key=lambda part: part.step)
    first, last = steps
    seen = sorted({part.step for part in parts})
    parts = [p for p in parts if (first is None or p.step >= first) and (last is None or p.step <= last)]
    if not parts:
        kept = f"the steps are {seen[0]} to {seen[-1]}" if seen else "there are no completions in it"
        raise ConfigurationError(f"{completions}: nothing to replay, {kept}.")
    parts = _without_repetitions(parts, say)
    if num_generations is None and any("group" not in part.columns for part in parts):
        num_generations = _infer(parts, hoped_for, say)
    batches: list[SavedBatch] = []
    left = limit
    for part in parts:
        if "group" in part.columns:
            groups = groups_by_number(part.columns["group"], part.where)
        else:
            assert num_generations is not None
            groups = groups_by_runs(part.prompts, num_generations, part.where)
        if left is not None:
            groups = groups[: max(left // len(groups[0]), 0 if batches else 1)]
            left -= sum(map(len, groups))
        if groups:
            batches.append(_batch(part, groups))
    return batches


def join_key(prompt: Any) -> str:
    """The same string for the same prompt, whether it is text, messages, or messages as JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(plain_messages(prompt), ensure_ascii=False, sort_keys=True, default=str)


def number_of(value: Any) -> float | None:
    """A saved value as a number; None if it is not a number, or NaN."""
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _parts(file: Path) -> list[_Part]:
    columns = read_columns(file, without=_NOT_READ)
    missing = [name for name in ("prompt", "completion") if name not in columns]
    if missing:
        there = ", ".join(sorted(columns)[:12]) or "none"
        raise ConfigurationError(
            f"{file} has no column {' and no '.join(map(repr, missing))}, so it holds no saved completions. Its "
            f"columns: {there}."
        )
    if "token_ids" in columns and (lacking := sorted({"live", "group", "starts", "ends"} - columns.keys())):
        raise ConfigurationError(f"{file} looks like token records and lacks the column {lacking[0]!r}.")
    for name in ("prompt", "completion"):
        for row, value in enumerate(columns[name]):
            if not isinstance(value, str | list):
                raise ConfigurationError(
                    f"{file}, row {row}: the {name} is {value!r:.60}; it must be text or a list of messages."
                )
    rows: dict[int, list[int]] = {}
    for row, step in enumerate(columns.get("step", [0] * len(columns["prompt"]))):
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigurationError(f"{file}: the step {step!r:.60} is no whole number.")
        rows.setdefault(step, []).append(row)
    return [_Part(f"{file.name}, step {step}", step, rows_of(columns, chosen)) for step, chosen in rows.items()]


def _without_repetitions(parts: Sequence[_Part], say: Say) -> list[_Part]:
    """Keep the last copy of a generation batch that was saved for several steps or logged twice."""
    contents = [part.contents for part in parts]
    kept = [part for part, own, after in zip(parts, contents, [*contents[1:], None], strict=True) if own != after]
    if len(kept) < len(parts):
        repeated = len(parts) - len(kept)
        say(f"{repeated} of {len(parts)} tables repeat earlier completions; only the last copy is replayed.")
    return kept


def _infer(parts: Sequence[_Part], hoped_for: int | None, say: Say) -> int:
    runs = [run for part in parts if "group" not in part.columns for run in runs_of_equal(part.prompts)]
    if hoped_for is not None and hoped_for > 1 and not any(run % hoped_for for run in runs):
        say(f"Groups have {hoped_for} completions, the selection's num_generations, which fits the prompts.")
        return hoped_for
    size = infer_num_generations(runs)
    beside = "" if hoped_for is None else f" The selection's num_generations={hoped_for} does not fit."
    say(f"Groups have {size} completions, inferred from equal prompts in a row.{beside} --num_generations changes it.")
    return size


def _batch(part: _Part, groups: Sequence[Sequence[int]]) -> SavedBatch:
    columns = rows_of(part.columns, [row for group in groups for row in group])
    records = "token_ids" in columns
    count, size = len(columns["prompt"]), len(groups[0])
    prompts = [
        messages_in(prompt) if records and isinstance(prompt, str) else plain_messages(prompt)
        for prompt in columns["prompt"]
    ]
    completions: list[Any] = [plain_messages(completion) for completion in columns["completion"]]
    if records:  # these have only text; a reward function saw messages if the prompt is a conversation
        completions = [
            completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    rewards, reward_names = _rewards(columns)
    truncated = columns.get("truncated")
    others = columns.keys() - _OURS - (_TOKENS if records else set()) - rewards.keys()
    return SavedBatch(
        step=part.step,
        where=part.where,
        prompts=prompts,
        completions=completions,
        texts=[joined_text(completion) for completion in completions],
        group_names=columns.get("group", [row // size for row in range(count)]),
        num_generations=size,
        rewards=rewards,
        reward_names=reward_names,
        reward=[number_of(value) for value in columns["reward"]] if "reward" in columns else None,
        columns={name: columns[name] for name in columns if name in others},
        tokens={name: columns[name] for name in _TOKENS if name in columns} if records else None,
        truncated=None if truncated is None or None in truncated else [bool(value) for value in truncated],
    )


def _rewards(columns: Columns) -> tuple[dict[str, list[float | None]], list[str]]:
    """Columns of numbers, and which of them are taken for the run's rewards.

    Token records and similar files have rewards separately, in `rewards`. In TRL's table the rewards are the floating
    point columns, but a reward may have logged such a column too.
    """
    mapped = [dict(value) if value else {} for value in columns.get("rewards", [])]
    rewards = {name: [number_of(row.get(name)) for row in mapped] for row in mapped[:1] for name in row}
    named = list(rewards)
    for name, values in columns.items():
        if name in _OURS | _TOKENS or name in rewards:
            continue
        kinds = {type(value) for value in values if value is not None}
        if kinds and kinds <= {int, float, bool}:
            rewards[name] = [number_of(value) for value in values]
            if float in kinds and "rewards" not in columns and "reward" not in columns:
                named.append(name)
    if not named and "reward" in columns:
        rewards["reward"], named = [number_of(value) for value in columns["reward"]], ["reward"]
    return rewards, named


# ------------------------------------------------------------------------------------------------ rows into groups


def runs_of_equal(prompts: Sequence[Any]) -> list[int]:
    """The lengths of the runs of equal prompts, in order."""
    return [sum(1 for _ in run) for _, run in itertools.groupby(prompts)]


def infer_num_generations(runs: Sequence[int]) -> int:
    """The number of completions of one prompt, `G`, from all runs of equal prompts.

    TRL writes the `G` completions of a prompt one after the other. A prompt that comes twice in a row makes a run of `2
    G`, so `G` is the common divisor of the runs. If every prompt comes twice, the result is wrongly `2 G`.
    """
    size = math.gcd(*runs)
    if size == 1:
        distinct = sorted(set(runs))
        some = ", ".join(map(str, distinct[:5])) + (", ..." if len(distinct) > 5 else "")
        raise ConfigurationError(
            f"The number of completions per prompt is unclear: prompts come in runs of {some}, which have no common "
            "divisor. Give --num_generations, or files of whole groups in TRL's order."
        )
    return size


def groups_by_runs(prompts: Sequence[Any], num_generations: int, where: str) -> list[list[int]]:
    """The rows of each group, if the completions of a prompt are consecutive."""
    if wrong := [run for run in runs_of_equal(prompts) if run % num_generations]:
        raise ConfigurationError(
            f"{where}: {wrong[0]} completions of one prompt stand in a row, which is no multiple of num_generations="
            f"{num_generations}. Give the run's --num_generations."
        )
    return [list(range(first, first + num_generations)) for first in range(0, len(prompts), num_generations)]


def groups_by_number(numbers: Sequence[Any], where: str) -> list[list[int]]:
    """The rows of each group by the file's own numbers, in the order in which they first occur."""
    rows: dict[Any, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(str(number) if isinstance(number, list | dict) else number, []).append(row)
    sizes = {len(members): number for number, members in reversed(rows.items())}
    if len(sizes) > 1:
        shown = ", ".join(f"{sizes[size]!r:.40} has {size}" for size in sorted(sizes))
        raise ConfigurationError(f"{where}: all groups must have as many completions, and group {shown}.")
    return list(rows.values())


# -------------------------------------------------------------------------------------------- columns of a dataset


def join_columns(batches: Sequence[SavedBatch], dataset: str | Path, say: Say) -> list[SavedBatch]:
    """Give every completion the columns of its prompt's row in a `.jsonl` or `.parquet` file.

    A row's prompt is its column `prompt`, or else `question`. It matches a saved prompt that equals it or whose last
    message does. Failing that, the longest one that the saved prompt contains matches (a prompt made from a template).

    Raises:
        ConfigurationError: The file is not there or has neither column, or a prompt is not in it.
    """
    file = dataset_file(dataset, "--dataset")
    columns = read_columns(file)
    key = next((name for name in ("prompt", "question") if name in columns), None)
    if key is None:
        raise ConfigurationError(
            f"--dataset {file} has neither a column 'prompt' nor 'question' to join by; its columns: "
            f"{', '.join(sorted(columns)[:12]) or 'none'}."
        )
    first_rows: dict[str, int] = {}
    conflicts = 0
    for row, prompt in enumerate(columns[key]):
        first = first_rows.setdefault(join_key(prompt), row)
        conflicts += any(values[first] != values[row] for values in columns.values())
    if conflicts:
        say(f"{conflicts} rows of {file.name} repeat an earlier row's prompt with other columns; the first counts.")
    longest_first = sorted(filter(str.strip, first_rows), key=len, reverse=True)
    found: dict[str, int | None] = {}
    for prompt in (prompt for batch in batches for prompt in batch.prompts):
        if (own := join_key(prompt)) not in found:
            asked = own if isinstance(prompt, str) or not prompt else joined_text(prompt[-1])
            inside = (text for text in longest_first if text in asked)
            matching = (first_rows[text] for text in itertools.chain((own, asked), inside) if text in first_rows)
            found[own] = next(matching, None)
    if missing := [prompt for prompt, row in found.items() if row is None]:
        raise ConfigurationError(
            f"{len(missing)} of the saved prompts are not in --dataset {file}, such as {missing[0][:80]!r}. Its "
            f"column {key!r} must hold the prompts, or a text contained in them."
        )
    joined = []
    for batch in batches:
        rows = [place for prompt in batch.prompts if (place := found[join_key(prompt)]) is not None]
        new = {name: values for name, values in columns.items() if name not in ("prompt", "completion", *batch.columns)}
        joined.append(replace(batch, columns={**batch.columns, **rows_of(new, rows)}))
    return joined
