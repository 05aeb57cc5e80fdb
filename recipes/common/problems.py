"""GSM8K problems from a file, from the hub or from the embedded generator, as rows of prompt and answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from embedded.word_problems import make_problems
from transformers import AutoConfig, AutoTokenizer

from trl_grpo_ext.rewards._text.final_answer import parse_reference

from .errors import RecipeError, one_line

Row = dict[str, Any]
COLUMNS = ("question", "answer")
PLAIN_PROMPT = "Question: {question}\nAnswer:"
"""For models without a chat template, such as base models and the embedded one."""


def embedded_problems(train: int, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Generate word problems; no held-out problem is ever a training problem."""
    try:
        return list(make_problems("train", train, seed)), list(make_problems("heldout", held_out, seed))
    except ValueError as error:
        raise RecipeError(f"{one_line(error)} (--train_problems, --eval_problems).") from error


def json_lines(path: str) -> list[tuple[str, Any]]:
    """Each row of a JSON Lines file, with its place in words for errors; empty lines are skipped."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"There is no file {path!r} (--dataset_path).")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text in UTF-8 ({one_line(error)}); expected JSON Lines.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}, line {number}", json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecipeError(f"{path}, line {number} is not JSON ({error}): {line.strip()[:60]!r}.") from error
    return rows


def from_hub(name: str, config: str | None = None, split: str | None = None) -> Any:
    """What `load_dataset` returns."""
    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:  # what `datasets` raises without network and cache
        raise RecipeError(
            f"The data set {name!r} is not in the local cache and cannot be downloaded ({_first_line(error)}). Pass "
            "--dataset_path FILE.jsonl, or --embedded for the tiny default that needs no network."
        ) from error


def problems_from_file(path: str, held_out: int) -> tuple[list[Row], list[Row]]:
    """Read a JSON Lines file with GSM8K's columns and hold out its last rows, at most a fifth of it."""
    rows: list[Row] = []
    for where, row in json_lines(path):
        check_row(row, where)
        rows.append(row)
    if len(rows) < 2:
        raise RecipeError(f"{path} has {len(rows)} problem(s); at least 2 are needed, one of them to be held out.")
    last = min(held_out, max(len(rows) // 5, 1))
    return rows[:-last], rows[-last:]


def problems_from_hub(name: str, config: str | None, held_out: int) -> tuple[list[Row], list[Row]]:
    """Load the train split of a data set and the first rows of its test split."""
    splits = from_hub(name, config)
    if not {"train", "test"} <= set(splits):
        raise RecipeError(f"The data set {name!r} has the splits {', '.join(splits)}; 'train' and 'test' are needed.")
    train = splits["train"].to_list()
    test = splits["test"].to_list()[:held_out]
    for split, rows in (("train", train), ("test", test)):
        for number, row in enumerate(rows, start=1):
            check_row(row, f"{name} ({split}), row {number}")
    return train, test


def check_row(row: Any, where: str) -> None:
    """Make sure that a row has the columns and an answer that can be scored against."""
    expected = " and ".join(map(repr, COLUMNS))
    if not isinstance(row, dict):
        raise RecipeError(f"{where} is {str(row)[:60]}, not an object with {expected}.")
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise RecipeError(
            f"{where} has no {' and no '.join(map(repr, missing))}: expected the columns {expected}, "
            f"found {', '.join(map(repr, row)) or 'none'}."
        )
    if not isinstance(row["question"], str) or not row["question"].strip():
        raise RecipeError(f"{where}: the question is {row['question']!r}, expected text.")
    if parse_reference(row["answer"]) is None:
        raise RecipeError(
            f"{where}: there is no number to score against in the answer {str(row['answer'])[-80:]!r}. Expected "
            "GSM8K's format, ending in '#### 18', or a plain number."
        )


def whole_batches(train: list[Row], held_out: list[Row], train_batch: int, eval_batch: int) -> list[Row]:
    """Return the held-out problems that fill whole batches; all of them if they fill none.

    TRL averages an evaluation over its batches: an incomplete last one would count as much as a complete one.
    """
    if not held_out:
        raise RecipeError("No problem is held out: --eval_problems must be at least 1.")
    if len(train) < train_batch:
        raise RecipeError(
            f"{len(train)} training problem(s) fill no generation batch, which takes {train_batch} (generation batch "
            "size divided by num_generations): give more problems, or lower --per_device_train_batch_size."
        )
    return held_out[: len(held_out) // eval_batch * eval_batch or len(held_out)]


def as_dataset(rows: Sequence[Row], system_prompt: str | None, user_prompt: str = "{question}") -> Dataset:
    """Rows of `prompt` and `answer`; the prompt is a conversation if there is a system prompt, else plain text."""

    def prompt(question: str) -> str | list[dict[str, str]]:
        if system_prompt is None:
            return PLAIN_PROMPT.format(question=question)
        asked = user_prompt.replace("{question}", question)
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": asked}]

    return Dataset.from_list([{"prompt": prompt(row["question"]), "answer": str(row["answer"])} for row in rows])


def has_chat_template(model: str, revision: str | None, trust_remote_code: bool) -> bool:
    """Whether the model's tokenizer has a chat template; loaded first, so this also shows whether the model exists."""
    try:
        AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if Path(model, "adapter_config.json").is_file():
            raise RecipeError(
                f"{model!r} holds an adapter, not a model: name its base model as --model_name_or_path, and continue "
                "the adapter by --use_peft and --resume_from_checkpoint."
            ) from error
        raise RecipeError(
            f"The model {model!r} is neither a folder nor in the local cache, and cannot be downloaded "
            f"({_first_line(error)}). Check the name and the network, pass --model_name_or_path FOLDER, or --embedded "
            "for the tiny default that needs no network."
        ) from error
    return tokenizer.chat_template is not None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
