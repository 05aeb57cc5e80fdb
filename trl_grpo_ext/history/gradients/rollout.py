"""A policy loaded from a folder, and completions sampled from it, written as token records like a training's."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...credit.alignment import token_offsets
from ...errors import ConfigurationError
from ...records.files import write_atomically
from ...records.token_records import FOLDER, texts_of, write_records
from ..files import dataset_file, plain_messages, read_columns
from ..replay.saved import join_key
from ..replay.tokens import loaded_or_refused
from .derivatives import Group, Policy

SETTINGS = "rollout.json"
"""File with a rollout's settings, beside its token records."""


def load_policy(model: str, *, dtype: str = "auto", device: str | None = None, load_in_4bit: bool = False) -> Any:
    """Load a causal language model, or an adapter folder on top of its base; then only the adapter is trained.

    Args:
        model: A path or hub id.
        dtype: Of the weights, such as "bfloat16".
        device: Its device; None for the GPU, if there is one.
        load_in_4bit: Load the weights below the adapter in 4 bits (NF4).

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kwargs: dict[str, Any] = {"dtype": dtype}
    if load_in_4bit:
        compute = torch.float32 if where == "cpu" else torch.bfloat16
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
        kwargs["device_map"] = {"": where}
    is_adapter = (Path(model) / "adapter_config.json").is_file()

    def load() -> Any:
        if is_adapter:
            from peft import AutoPeftModelForCausalLM

            return AutoPeftModelForCausalLM.from_pretrained(model, is_trainable=True, **kwargs)
        return AutoModelForCausalLM.from_pretrained(model, **kwargs)

    loaded = loaded_or_refused("--model", model, load)
    if not load_in_4bit:
        return loaded.to(where)
    return loaded if is_adapter else loaded.requires_grad_(False)


def prompt_tokens(prompt: Any, tokenizer: Any) -> list[int]:
    """A prompt's tokens, as TRL makes them of text, or of messages by the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    made = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(made["input_ids"])


def roll_out(
    folder: Path,
    prompts: str | Path,
    policy: Policy,
    tokenizer: Any,
    *,
    samples: int,
    prompts_at_once: int,
    max_completion_length: int,
    seed: int,
    progress: Callable[[Iterable[Any], int, str], Iterable[Any]],
) -> None:
    """Sample completions of every prompt, and write them as token records, one generation batch to a file.

    Files that already exist are kept; only missing ones are sampled. A batch depends only on the seed and its number.
    """
    file = dataset_file(prompts, "--prompts")
    rows = read_columns(file).get("prompt")
    if not rows:
        raise ConfigurationError(f"--prompts {file} has no column 'prompt', or no row.")
    rows = [plain_messages(prompt) for prompt in rows]
    made_with = {
        "model": policy.fingerprint(),
        "prompts": hashlib.sha256("\n".join(map(join_key, rows)).encode("utf-8", "replace")).hexdigest(),
        "samples": samples,
        "prompts_at_once": prompts_at_once,
        "max_completion_length": max_completion_length,
        "seed": seed,
    }
    _check_the_same(folder, made_with)
    starts = list(range(0, len(rows), prompts_at_once))
    for number, first in progress(list(enumerate(starts)), len(starts), "Sampling"):
        if not (folder / FOLDER / f"step_{number:05d}.parquet").is_file():
            chosen = rows[first : first + prompts_at_once]
            with torch.random.fork_rng():
                torch.manual_seed(seed * 1_000_003 + number)
                records = _records(chosen, policy, tokenizer, samples, max_completion_length)
            write_records(records, str(folder), number)


def _check_the_same(folder: Path, made_with: Mapping[str, Any]) -> None:
    there = folder / SETTINGS
    try:
        if there.is_file():
            before = json.loads(there.read_text(encoding="utf-8"))
            if different := [key for key, value in made_with.items() if before.get(key) != value]:
                raise ConfigurationError(
                    f"{folder} has a rollout with a different {', '.join(different)}. Name another folder."
                )
            return
        if (folder / FOLDER).exists():
            raise ConfigurationError(
                f"{folder} has the token records of a training; a rollout needs a folder of its own."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(there, json.dumps(made_with, indent=1))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{there} cannot be read or written: {error}") from error


def _records(prompts: list[Any], policy: Policy, tokenizer: Any, samples: int, longest: int) -> list[dict[str, Any]]:
    records = []
    ends = policy.model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    for group, prompt in enumerate(prompts):
        prompt_ids = prompt_tokens(prompt, tokenizer)
        completions = [_cut(row, ends) for row in _sample(policy, tokenizer, prompt_ids, samples, longest, ends)]
        scores = policy.scores(Group(prompt_ids, completions))
        for member, (ids, (logps, entropies)) in enumerate(zip(completions, scores, strict=True)):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            align = functools.partial(token_offsets, tokenizer, ids, text)
            records.append(
                {
                    **texts_of(prompt, text, ids, tokenizer, align),
                    "group": group,
                    "member": member,
                    "prompt_ids": prompt_ids,
                    "truncated": not ids or ids[-1] not in ends,
                    "rewards": [],
                    "reward": None,
                    "outcomes": [],
                    "stages": [],
                    "advantages": [],
                    "live": [True] * len(ids),
                    "logp": logps,
                    "entropy": entropies,
                }
            )
    return records


@torch.no_grad()
def _sample(
    policy: Policy, tokenizer: Any, prompt_ids: list[int], samples: int, longest: int, ends: set[int]
) -> list[list[int]]:
    was_training = policy.model.training
    policy.model.eval()
    rows: list[list[int]] = []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    for first in range(0, samples, policy.rows):
        count = min(policy.rows, samples - first)
        ids = torch.tensor([prompt_ids] * count, device=policy.device)
        made = policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            do_sample=True,
            temperature=policy.temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad,
        )
        rows += made[:, len(prompt_ids) :].tolist()
    policy.model.train(was_training)
    return rows


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    """Cut after the first token that ends a completion."""
    return next((ids[: place + 1] for place, token in enumerate(ids) if token in ends), ids)
