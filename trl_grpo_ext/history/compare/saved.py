"""The reader of saved completions: token records, or texts that a tokenizer splits."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...credit.alignment import token_offsets
from ...credit.groups import weighted_rewards
from ...errors import AlignmentError, ConfigurationError, ManifestError
from ...guard.messages import joined_text
from ...records import manifest, settings
from ...records.token_records import encodable
from ..run_files import RECORDS, Columns, Say, messages_in, plain_messages, read_columns, read_json, rows_of

Offsets = Callable[[int], Sequence[tuple[int, int]]]
_NOT_READ = ("tokens", "stages", "advantages")  # large columns of the token records that no selection uses
_NEEDED = ("prompt", "completion", "step", "group", "truncated")
_TOKENS = ("prompt_ids", "token_ids", "starts", "ends", "live", "logp", "entropy")
_OURS = {*_NEEDED, *_TOKENS, "scored_step", "member", "rewards", "reward", "advantage", "weight"}


class RunFacts(NamedTuple):
    """What the files beside token records say of the run; nothing of other files."""

    settings: Mapping[str, Any] = {}  # those that differ from the defaults, and some others
    weights: Sequence[float] | None = None  # of its reward functions, in the order of the saved rewards
    shapers: int = 0  # hooks that added a column each, after those of the functions, or changed the weights


def facts_of_run(completions: Path, say: Say) -> RunFacts:
    """Read what the files beside token records say; `say` takes a sentence on each that cannot be read."""
    folder = completions if completions.is_dir() else completions.absolute().parent
    if folder.name == RECORDS:
        folder = folder.parent
    elif folder != completions:
        return RunFacts()
    facts = RunFacts()
    try:
        if (path := folder / settings.FILE).is_file():
            facts = RunFacts(settings.from_plain(read_json(path)))
        plugins = manifest.Manifest.read(folder / manifest.FILE).plugins
    except FileNotFoundError:
        return facts
    except (ManifestError, ConfigurationError) as error:
        say(f"{folder}: {error}")
        return facts
    weights = [one.weight or 0.0 for one in plugins if one.kind == "reward" and one.inside is None]
    return facts._replace(weights=weights, shapers=sum(one.role == "shaper" for one in plugins))


def _is_rewards(value: Any) -> bool:
    """Whether a value maps names to numbers, as a mapping or, as parquet has it, in pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(isinstance(one, tuple) for one in pairs):
        return value is None
    return all(isinstance(name, str) and isinstance(number, int | float | None) for name, number in pairs)


_KINDS: Mapping[str, Any] = {"prompt": str | list, "completion": str | list, "step": int, "token_ids": Sized}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one batch, `(B, T)`, padded on the right; log-probabilities only if every completion has some."""

    ids_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    written_B_T: torch.Tensor  # 1.0 where the model wrote a token
    offsets: Offsets
    logps_B_T: torch.Tensor | None = None
    entropies_B_T: torch.Tensor | None = None

    @functools.cached_property
    def id_rows(self) -> list[list[int]]:
        """The token numbers of each completion, without padding."""
        lengths = self.completion_mask_B_T.sum(dim=1).long().tolist()
        return [row[:length] for row, length in zip(self.ids_B_T.tolist(), lengths, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """One generation batch, or the saved part of it; `B` completions in whole groups, one group after the other."""

    step: int  # optimizer steps done when it was saved
    scored_step: int  # optimizer steps done when it was scored
    where: str  # the file and the step, for messages
    prompts: Sequence[Any]  # strings or lists of messages
    completions: Sequence[Any]  # as reward functions get them: strings or lists of messages
    texts: Sequence[str]
    num_generations: int
    tokens: Tokens
    truncated: Sequence[bool]
    rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # the run's, by name
    weights: Mapping[str, float] | None = None  # of the saved rewards, by name; None if they are unknown
    reward: Sequence[float | None] | None = None  # their saved sum; None without one, or if hooks added to it
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # everything else
    prompt_ids: Sequence[Sequence[int]] | None = None  # None in files of texts


class _Part(NamedTuple):
    """The rows of one step of one file."""

    where: str
    step: int
    columns: Columns

    def texts(self) -> list[str]:
        """Prompts, completions and when they were scored, as strings that can be compared."""
        names = ("prompt", "completion", "scored_step")
        return [join_key(value) for name in names for value in self.columns.get(name, ())]


def read_saved(
    completions: str | Path,
    say: Say,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    with_logps: bool = False,
    tokenizer: Any = None,
    run: RunFacts | None = None,
) -> list[SavedBatch]:
    """Read saved completions in the order of their steps; `with_logps` leaves out groups without log-probabilities."""
    run = run or RunFacts()
    every = sorted(_parts(Path(completions)), key=lambda one: one.step)
    first, last = steps
    parts = [one for one in every if (first is None or one.step >= first) and (last is None or one.step <= last)]
    if not parts:
        kept = f"the steps are {every[0].step} to {every[-1].step}" if every else "there are no completions in it"
        raise ConfigurationError(f"{completions}: nothing to compare, {kept}.")
    # TRL saves a generation batch again for every step that uses it.
    repeated = {id(one) for one, after in itertools.pairwise(parts) if one.texts() == after.texts()}
    if repeated:
        say(f"{len(repeated)} of {len(parts)} tables repeat earlier completions; only the last copy is used.")
    batches: list[SavedBatch] = []
    left = limit
    lost = 0
    for part in parts:
        groups = [] if id(part) in repeated else _groups(part)
        if with_logps:
            trained = [group for group in groups if all(_has_logps(part.columns, row) for row in group)]
            lost += sum(map(len, groups)) - sum(map(len, trained))
            groups = trained
        if left is not None and groups:
            groups = groups[: max(left // len(groups[0]), 0 if batches else 1)]
            left -= sum(map(len, groups))
        if groups:
            batches.append(_batch(part, groups, tokenizer, run))
    if lost:
        say(f"{lost} completions are left out, in whole groups whose records lack log-probabilities: not trained on.")
    if not batches:
        raise ConfigurationError(f"{completions}: no group has the log-probabilities that a hook needs.")
    return batches


def join_key(prompt: Any) -> str:
    """The same string for the same prompt, whether it is text, messages, or messages as JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(plain_messages(prompt), ensure_ascii=False, sort_keys=True, default=str)


def number_of(value: Any) -> float | None:
    """A saved value as a number; None if it is not a number, or NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def tensor_of(values: Sequence[float | None]) -> torch.Tensor:
    """Values as a tensor; NaN for None."""
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)


def _parts(path: Path) -> Iterator[_Part]:
    """The steps of a file, or of the token records in a run's output_dir."""
    files = [path] if path.is_file() else sorted(path.glob(f"{RECORDS}/*.parquet"))
    if not files:
        raise ConfigurationError(f"There are no token records in {str(path)!r}. Train with token_records: 64.")
    for file in files:
        columns = read_columns(file, without=_NOT_READ)
        needed = {*_NEEDED, "live", "starts", "ends"} if "token_ids" in columns else {*_NEEDED}
        if missing := sorted(needed - columns.keys()):
            raise ConfigurationError(f"{file} holds no saved completions: it has no column {missing[0]!r}.")
        for name in (*_KINDS, "rewards"):
            for row, value in enumerate(columns.get(name, ())):
                if not (_is_rewards(value) if name == "rewards" else isinstance(value, _KINDS[name])):
                    raise ConfigurationError(f"{file}, row {row}: the {name} is {value!r:.60}.")
        for step, rows in _rows_by(columns["step"]).items():
            yield _Part(f"{file.name}, step {step}", step, rows_of(columns, rows))


def _rows_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    rows: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    return rows


def _has_logps(columns: Columns, row: int) -> bool:
    """Whether a row was trained on: each of its tokens has a log-probability and an entropy."""
    if not {"token_ids", "logp", "entropy"} <= columns.keys():
        return False
    found = [columns[name][row] for name in ("logp", "entropy")]
    return all(values is not None and len(values) == len(columns["token_ids"][row]) for values in found)


def _groups(part: _Part) -> list[list[int]]:
    rows = _rows_by(map(str, part.columns["group"]))
    sizes = {len(members): name for name, members in rows.items()}
    if len(sizes) > 1:
        shown = ", ".join(f"{sizes[size]!r:.40} has {size}" for size in sorted(sizes))
        raise ConfigurationError(f"{part.where}: all groups must have as many completions, and group {shown}.")
    return list(rows.values())


def _batch(part: _Part, groups: Sequence[Sequence[int]], tokenizer: Any, run: RunFacts) -> SavedBatch:
    columns = rows_of(part.columns, [row for group in groups for row in group])
    prompts = [plain_messages(messages_in(one) if isinstance(one, str) else one) for one in columns["prompt"]]
    # Records have only text; a reward function saw messages if the prompt is a conversation.
    completions = [
        plain_messages(completion)
        if isinstance(prompt, str) or not isinstance(completion, str)
        else [{"role": "assistant", "content": completion}]
        for prompt, completion in zip(prompts, columns["completion"], strict=True)
    ]
    texts = [joined_text(completion) for completion in completions]
    truncated = [bool(value) for value in columns["truncated"]]
    by_row = [dict(value or ()) for value in columns.get("rewards", ())]
    names = dict.fromkeys(name for row in by_row for name in row)
    rewards = {name: [number_of(row.get(name)) for row in by_row] for name in names}
    reward = [number_of(value) for value in columns["reward"]] if "reward" in columns else None
    step = columns.get("scored_step", [None])[0]
    if "token_ids" in columns:
        tokens = _recorded_tokens(columns, part.where)
    else:
        tokens = _text_tokens(texts, truncated, part.where, tokenizer)
    return SavedBatch(
        step=part.step,
        scored_step=step if isinstance(step, int) else part.step,
        where=part.where,
        prompts=prompts,
        completions=completions,
        texts=texts,
        num_generations=len(groups[0]),
        tokens=tokens,
        truncated=truncated,
        **_of_functions(rewards, reward, run),
        columns={name: values for name, values in columns.items() if name not in _OURS},
        prompt_ids=columns.get("prompt_ids"),
    )


def _of_functions(
    rewards: Mapping[str, Sequence[float | None]], reward: Sequence[float | None] | None, run: RunFacts
) -> dict[str, Any]:
    """The functions' rewards, their sum, and their weights: the run's, or 1 each, if these give what was saved."""
    added = len(rewards) - len(run.weights or ())
    known = run.weights is not None and 0 <= added <= run.shapers
    added = added if known else 0
    functions = dict(itertools.islice(rewards.items(), len(rewards) - added))
    if known and added < run.shapers:  # another shaper changed the weights, and the sum with them
        reward = None
    found = {"rewards": functions, "reward": None if added else reward}
    for weights in (run.weights if known else None, [1.0] * len(functions)):
        if weights is not None and _give(rewards, [*weights, *[1.0] * added], reward):
            return {**found, "weights": dict(zip(functions, weights, strict=True))}
    return found


def _give(
    rewards: Mapping[str, Sequence[float | None]], weights: Sequence[float], reward: Sequence[float | None] | None
) -> bool:
    """Whether the weighted sums of rewards are those that were saved, but for rounding."""
    if reward is None or not rewards:
        return True
    terms_B_K = torch.stack([tensor_of(values) for values in rewards.values()], dim=1).double() * torch.tensor(weights)
    sums_B = weighted_rewards(terms_B_K, torch.ones(len(weights)))
    rounding_B = 1e-5 * terms_B_K.abs().nansum(dim=1)
    apart_B = (sums_B - tensor_of(reward).double()).abs()
    return bool(((apart_B <= rounding_B) | (sums_B.isnan() & tensor_of(reward).isnan())).all())


def join_columns(batches: Sequence[SavedBatch], dataset: str | Path) -> list[SavedBatch]:
    """Give every completion the columns of its prompt's row in a `.jsonl` or `.parquet` file.

    A row's prompt is its column `prompt`, or else `question`; of equal ones the first row counts. It matches a saved
    prompt that equals it; failing that, the longest one that the prompt's text or its last message contains.
    """
    columns = read_columns(Path(dataset))
    key = next((name for name in ("prompt", "question") if name in columns), None)
    if key is None:
        raise ConfigurationError(f"--dataset {dataset} has neither a column 'prompt' nor 'question' to join by.")
    first_rows: dict[str, int] = {}
    for row, prompt in enumerate(columns[key]):
        first_rows.setdefault(join_key(prompt), row)

    @functools.cache
    def row_of(own: str, asked: str) -> int:
        inside = (text for text in first_rows if text.strip() and text in asked)
        found = own if own in first_rows else max(inside, key=len, default=None)
        if found is None:
            raise ConfigurationError(f"A saved prompt is not in --dataset {dataset}, column {key!r}: {own[:80]!r}.")
        return first_rows[found]

    joined = []
    for batch in batches:
        asked = [one if isinstance(one, str) or not one else joined_text(one[-1]) for one in batch.prompts]
        rows = [row_of(join_key(prompt), text) for prompt, text in zip(batch.prompts, asked, strict=True)]
        new = {name: values for name, values in columns.items() if name not in ("prompt", "completion", *batch.columns)}
        joined.append(replace(batch, columns={**batch.columns, **rows_of(new, rows)}))
    return joined


def _text_tokens(texts: Sequence[str], truncated: Sequence[bool], where: str, tokenizer: Any) -> Tokens:
    """A tokenizer's tokens of texts, with one that ends each text that is not truncated."""
    if tokenizer is None:
        raise ConfigurationError(f"{where} has no tokens: give a model or a tokenizer, or use token records.")
    texts = [encodable(text) for text in texts]
    end = tokenizer.eos_token_id
    made = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = [row if end is None or is_cut else [*row, end] for row, is_cut in zip(made, truncated, strict=True)]
    mask_B_T = _padded([[1.0] * len(row) for row in ids], torch.float32)
    return Tokens(
        ids_B_T=_padded(ids, torch.long),
        completion_mask_B_T=mask_B_T,
        mask_B_T=mask_B_T,
        written_B_T=mask_B_T,
        offsets=lambda row: token_offsets(tokenizer, ids[row], texts[row]),
    )


def _recorded_tokens(records: Columns, where: str) -> Tokens:
    ids = records["token_ids"]
    starts = records["starts"]
    ends = records["ends"]
    if bad := [row for row, live in enumerate(records["live"]) if live is None or len(live) != len(ids[row])]:
        raise ConfigurationError(f"{where}: row {bad[0]} does not have one entry in `live` per token.")

    def numbers(name: str) -> torch.Tensor | None:
        values = records.get(name, [None] * len(ids))
        if any(row is None or len(row) != len(of) for row, of in zip(values, ids, strict=True)):
            return None
        return _padded(values, torch.float32)

    def offsets_of(row: int) -> Sequence[tuple[int, int]]:
        if starts[row] is None or ends[row] is None:
            raise AlignmentError(f"{where}, row {row}: the record has no offsets, which a hook or a part needs.")
        return [(int(start), int(end)) for start, end in zip(starts[row], ends[row], strict=True)]

    is_token_B_T = _padded([[1.0] * len(row) for row in ids], torch.float32)
    turns_B_T = numbers("turns")
    return Tokens(
        ids_B_T=_padded(ids, torch.long),
        completion_mask_B_T=is_token_B_T,
        mask_B_T=_padded(records["live"], torch.float32),
        written_B_T=is_token_B_T if turns_B_T is None else is_token_B_T * (turns_B_T >= 0),
        offsets=offsets_of,
        logps_B_T=numbers("logp"),
        entropies_B_T=numbers("entropy"),
    )


def _padded(rows: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Rows of numbers, `(B, T)`, padded with zeros on the right to one column at least."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence([*tensors, torch.zeros(1, dtype=dtype)], batch_first=True)[:-1]
