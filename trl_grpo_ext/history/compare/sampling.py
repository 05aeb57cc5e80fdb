"""New completions of a model for a file of prompts, as token records, which are read like those of any run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...credit.alignment import token_offsets
from ...errors import ConfigurationError
from ...records.token_records import FOLDER, texts_of, write_records
from ..run_files import plain_messages, read_columns
from .derivatives import Policy, prompt_tokens

NUM_GENERATIONS = 8
"""TRL's default."""
GROUPS = 8
"""Prompts of a batch."""
SEED = 0


def sample(
    policy: Policy,
    tokenizer: Any,
    prompts: str | Path,
    folder: str | Path,
    *,
    num_generations: int,
    longest: int,
    limit: int | None,
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> None:
    """Write token records of `num_generations` new completions of each prompt in a `.jsonl` or `.parquet` file.

    They are drawn from the whole distribution at the policy's temperature, and are the same if drawn again on the same
    machine. Every `GROUPS` prompts are one generation batch.

    Raises:
        ConfigurationError: The folder has completions already, or the file has no column `prompt`.
    """
    if (Path(folder) / FOLDER).exists():
        raise ConfigurationError(f"{folder} has completions already: name another --sample, or compare these.")
    rows = read_columns(Path(prompts)).get("prompt")
    if not rows:
        raise ConfigurationError(f"{prompts} has no column 'prompt', so there is nothing to sample for.")
    if limit is not None:
        rows = rows[: max(limit // num_generations, 1)]
    end = tokenizer.eos_token_id
    records: list[dict[str, Any]] = []
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        for number, prompt in enumerate(progress([plain_messages(row) for row in rows], "Sampling"), start=1):
            prompt_ids = prompt_tokens(prompt, tokenizer)
            sampled = zip(*policy.samples(prompt_ids, num_generations, longest, end), strict=True)
            for member, (ids, logps, entropies) in enumerate(sampled):
                text = tokenizer.decode(ids, skip_special_tokens=True)
                records.append(
                    {
                        **texts_of(prompt, text, ids, tokenizer, partial(token_offsets, tokenizer, ids, text)),
                        "group": (number - 1) % GROUPS,
                        "member": member,
                        "prompt_ids": prompt_ids,
                        "truncated": ids[-1] != end,
                        "rewards": [],
                        "live": [True] * len(ids),
                        "logp": logps,
                        "entropy": entropies,
                    }
                )
            if number % GROUPS == 0 or number == len(rows):
                write_records(records, str(folder), -(-number // GROUPS))
                records = []
