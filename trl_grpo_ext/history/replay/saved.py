"""Saved completions, one `SavedBatch` for each generation batch, whichever file they come from.

| file | what is read |
| --- | --- |
| token records | prompts, completions, each reward; groups, tokens, offsets, loss mask, log-probabilities, truncation |
| TRL's tables | prompts, completions, each reward, columns that rewards logged |
| JSON Lines, parquet | `prompt`, `completion`; if there `step`, `group`, `truncated`, `rewards`, `reward`; columns |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from .files import Columns, Say, number_of, read_columns, rows_of, saved_files
from .groups import groups_by_number, groups_by_runs, infer_num_generations, runs_of_equal

Messages = list[dict[str, Any]]

_OURS = {"step", "group", "member", "prompt", "completion", "truncated", "rewards", "reward", "advantage", "weight"}
_TOKENS = {"token_ids", "starts", "ends", "live", "logp", "entropy"}


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """One generation batch, or what was saved of it; `B` completions in whole groups, one group after the other.

    Attributes:
        step: Optimizer steps done when it was saved.
        where: The file and the step, for messages.
        prompts: Strings or lists of messages.
        completions: As reward functions get them: strings or lists of messages.
        texts: The completions' texts.
        group_names: What the file calls each row's group; a running number where it does not say.
        num_generations: `G`.
        rewards: Every column of numbers that may be a reward, by name, `B` values or Nones.
        reward_names: Those of them that count where a selection lists no rewards.
        reward: The weighted sum as it was saved; None where it was not.
        columns: Everything else, by name, `B` values each.
        tokens: Columns of the token records, by name; None in other files.
        truncated: Whether each ended at the limit; None where the file does not say.
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
        """The batch without the groups of which a record lacks log-probabilities; it may have none left."""
        saved = self.tokens or {}
        size, count = self.num_generations, len(self.texts)
        both = (saved.get("logp", [None] * count), saved.get("entropy", [None] * count))
        has = [logps is not None and entropies is not None for logps, entropies in zip(*both, strict=True)]
        kept = [row for row in range(count) if all(has[row - row % size : row - row % size + size])]

        def cut(values: Any) -> Any:
            if isinstance(values, Mapping):
                return {name: cut(column) for name, column in values.items()}
            return None if values is None else [values[row] for row in kept]

        of_rows = (
            "prompts",
            "completions",
            "texts",
            "group_names",
            "rewards",
            "reward",
            "columns",
            "tokens",
            "truncated",
        )
        return replace(self, **{name: cut(getattr(self, name)) for name in of_rows})


@dataclass(frozen=True)
class _Part:
    """The rows of one step of one file."""

    where: str
    step: int
    columns: Columns

    @property
    def contents(self) -> tuple[list[str], list[str]]:
        """What tells two parts apart."""
        return [join_key(prompt) for prompt in self.columns["prompt"]], [
            join_key(completion) for completion in self.columns["completion"]
        ]


def read_saved(
    completions: str | Path,
    say: Say,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    hoped_for: int | None = None,
) -> list[SavedBatch]:
    """Read saved completions in the order of their steps.

    Args:
        completions: A file or a folder.
        say: Told how the files were understood.
        steps: First and last step to read; None is no bound.
        limit: Completions at most, in whole groups, but at least one group.
        num_generations: `G` where the file does not say which completions belong together; None is to infer it.
        hoped_for: The `G` of a run file: taken where it fits the prompts, so that a prompt that came twice is told.

    Raises:
        ConfigurationError: There is nothing to read, or it is not what this can read.
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
        num_generations = _inferred(parts, hoped_for, say)
    batches: list[SavedBatch] = []
    left = limit
    for part in parts:
        if "group" in part.columns:
            groups = groups_by_number(part.columns["group"], part.where)
        else:
            assert num_generations is not None
            prompts = [join_key(prompt) for prompt in part.columns["prompt"]]
            groups = groups_by_runs(prompts, num_generations, part.where)
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


def plain_messages(messages: Any) -> Any:
    """Messages without the empty fields that parquet gives all of them when one has them."""
    if isinstance(messages, Mapping):
        return {key: plain_messages(value) for key, value in messages.items() if value is not None}
    return [plain_messages(item) for item in messages] if isinstance(messages, list | tuple) else messages


def text_of(completion: Any) -> str:
    """A completion's text: of messages the content of all of them, one after the other."""
    if isinstance(completion, str):
        return completion
    return "".join(text_of_message(message) for message in completion)


def text_of_message(message: Any) -> str:
    """The text of one message, whose content may be a list of blocks."""
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        return "".join(str(block.get("text") or "") if isinstance(block, Mapping) else str(block) for block in content)
    return "" if content is None else str(content)


def _parts(file: Path) -> list[_Part]:
    columns = read_columns(file)
    missing = [name for name in ("prompt", "completion") if name not in columns]
    if missing:
        there = ", ".join(sorted(columns)[:12]) or "none"
        raise ConfigurationError(
            f"{file} has no column {' and no '.join(map(repr, missing))}, so it holds no saved completions. Its "
            f"columns: {there}."
        )
    if "token_ids" in columns and (lacking := sorted({"live", "group", "starts", "ends"} - columns.keys())):
        raise ConfigurationError(f"{file} looks like token records and lacks the column {lacking[0]!r}.")
    count = len(columns["prompt"])
    for name in ("prompt", "completion"):
        for row, value in enumerate(columns[name]):
            if not isinstance(value, str | list):
                raise ConfigurationError(
                    f"{file}, row {row}: the {name} is {value!r:.60}; it must be text or a list of messages."
                )
    steps = columns.get("step", [0] * count)
    if bad := [step for step in steps if isinstance(step, bool) or not isinstance(step, int)]:
        raise ConfigurationError(f"{file}: the step {bad[0]!r:.60} is no whole number.")
    rows: dict[int, list[int]] = {}
    for row, step in enumerate(steps):
        rows.setdefault(step, []).append(row)
    if len(rows) == 1:
        return [_Part(f"{file.name}, step {step}", step, columns) for step in rows]
    return [_Part(f"{file.name}, step {step}", step, rows_of(columns, chosen)) for step, chosen in rows.items()]


def _without_repetitions(parts: Sequence[_Part], say: Say) -> list[_Part]:
    """A generation batch that feeds several steps, or is logged twice, is saved again: keep it once, the last time."""
    kept: list[_Part] = []
    before: tuple[list[str], list[str]] | None = None
    repeated = 0
    for part in parts:
        contents = part.contents
        if contents == before:
            kept.pop()
            repeated += 1
        kept.append(part)
        before = contents
    if repeated:
        say(f"{repeated} of {len(parts)} tables repeat the completions before them; of those the last is replayed.")
    return kept


def _inferred(parts: Sequence[_Part], hoped_for: int | None, say: Say) -> int:
    runs = [
        run
        for part in parts
        if "group" not in part.columns
        for run in runs_of_equal([join_key(prompt) for prompt in part.columns["prompt"]])
    ]
    if hoped_for is not None and hoped_for > 1 and not any(run % hoped_for for run in runs):
        say(f"Groups of {hoped_for} completions, the selection's num_generations, which fits the prompts.")
        return hoped_for
    size = infer_num_generations(runs)
    beside = "" if hoped_for is None else f" The selection's num_generations={hoped_for} does not fit."
    say(
        f"Groups of {size} completions, inferred from equal prompts in a row.{beside} --num_generations says otherwise."
    )
    return size


def _batch(part: _Part, groups: Sequence[Sequence[int]]) -> SavedBatch:
    columns = rows_of(part.columns, [row for group in groups for row in group])
    records = "token_ids" in columns
    count, size = len(columns["prompt"]), len(groups[0])
    prompts = [_prompt(prompt, records) for prompt in columns["prompt"]]
    completions: list[Any] = [plain_messages(completion) for completion in columns["completion"]]
    if records:  # which have the text alone; a reward function saw messages where the prompt is made of them
        completions = [
            completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    rewards, reward_names = _rewards(columns, count)
    truncated = columns.get("truncated")
    strangers = columns.keys() - _OURS - (_TOKENS if records else set()) - rewards.keys()
    numbers = [number_of(value) for value in columns["reward"]] if "reward" in columns else None
    return SavedBatch(
        step=part.step,
        where=part.where,
        prompts=prompts,
        completions=completions,
        texts=[text_of(completion) for completion in completions],
        group_names=columns.get("group", [row // size for row in range(count)]),
        num_generations=size,
        rewards=rewards,
        reward_names=reward_names,
        reward=numbers,
        columns={name: columns[name] for name in columns if name in strangers},
        tokens={name: columns[name] for name in _TOKENS if name in columns} if records else None,
        truncated=None if truncated is None or None in truncated else [bool(value) for value in truncated],
    )


def _prompt(prompt: Any, records: bool) -> Any:
    """A prompt as reward functions get it; the token records write messages as JSON."""
    if not isinstance(prompt, str):
        return plain_messages(prompt)
    if records and prompt.startswith('[{"'):
        try:
            messages = json.loads(prompt)
        except (json.JSONDecodeError, RecursionError):
            return prompt
        if all(isinstance(message, dict) and "role" in message for message in messages):
            return messages
    return prompt


def _rewards(columns: Columns, count: int) -> tuple[dict[str, list[float | None]], list[str]]:
    """Columns of numbers, and those among them that are taken for the run's rewards.

    The token records and their like have them apart, in `rewards`. In TRL's table they are the columns of floating
    point numbers, but a reward may have logged such a column too.
    """
    mapped = [dict(value) if value else {} for value in columns.get("rewards", [])]
    rewards: dict[str, list[float | None]] = {
        name: [number_of(row.get(name)) for row in mapped] for row in mapped[:1] for name in row
    }
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
        rewards["reward"] = [number_of(value) for value in columns["reward"]]
        named = ["reward"]
    assert all(len(values) == count for values in rewards.values())
    return rewards, named
