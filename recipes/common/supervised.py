"""What recipes with turns share: a supervised start, which teaches the syntax of calls, and the choice of credit."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from trl import ModelConfig

from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.launch.engine import ExpectedRun

from .errors import loading_errors
from .settings import RecipeParser, asked_for, check_setup, read_yaml

IGNORE = -100
"""A label that the loss leaves out."""

Said = Sequence[tuple[str, bool]]
"""The texts after a prompt, and whether the model wrote each."""

Conversation = tuple[list[dict[str, Any]], Said]
"""A prompt's messages, and what follows them."""


def parse_with_credit(
    arguments: type, defaults: Path, script_defaults: Mapping[str, Any], credit: Mapping[str, list[Any] | None]
) -> tuple[Any, GRPOExtConfig, ModelConfig]:
    """Command line over `--config` over `defaults`, and the hooks of the chosen credit."""
    args: GRPOExtConfig
    parser = RecipeParser([arguments, GRPOExtConfig, ModelConfig])
    recipe, args, model_args = parser.parse(sys.argv[1:], {**script_defaults, **read_yaml(defaults)})
    if credit[recipe.credit] is not None and args.advantage_hooks is None:
        args.advantage_hooks = credit[recipe.credit]
    return recipe, args, model_args


def start_from(args: GRPOExtConfig, model_args: ModelConfig, make: Callable[[Path], None]) -> ExpectedRun:
    """Check the set-up, and make the model to start from unless one is named."""
    state = PartialState()
    asked = asked_for(model_args, None, None)
    supervised = Path(args.output_dir) / "supervised"
    named = model_args.model_name_or_path
    model = model_args.model_name_or_path or str(supervised)
    check_setup(args, model_args, state, asked)
    with loading_errors(model), state.main_process_first():
        if named is None and state.is_main_process:
            make(supervised)
    model_args.model_name_or_path = model
    return asked


def train_supervised(
    model: Any, tokenizer: Any, draw: Callable[[int], Sequence[Conversation]], *, steps: int, learning_rate: float
) -> None:
    """Learn what `draw` gives for each step, counted from 1, with a short warm-up and a decay over the second half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / 20, (steps - done) / (0.5 * steps))
    )
    began = time.perf_counter()
    for step in range(1, steps + 1):
        loss = model(**encode(tokenizer, draw(step))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % max(20, steps // 10) == 0:
            spent = time.perf_counter() - began
            print(f"supervised step {step:4d}  loss {loss.item():.3f}  {spent:4.0f} s", flush=True)


def encode(tokenizer: Any, conversations: Sequence[Conversation]) -> Mapping[str, torch.Tensor]:
    """A batch with labels only on what the model writes."""
    rows = []
    labels = []
    for prompt, said in conversations:
        (ids,) = tokenizer.apply_chat_template([prompt], return_dict=False)
        ids = list(ids)
        label = [IGNORE] * len(ids)
        for text, is_ours in said:
            new = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            label += new if is_ours else [IGNORE] * len(new)
        rows.append(torch.tensor(ids))
        labels.append(torch.tensor(label))
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(row) for row in rows])
    ids_B_T = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": ids_B_T,
        "attention_mask": torch.arange(ids_B_T.size(1)) < lengths.unsqueeze(1),
        "labels": pad(labels, batch_first=True, padding_value=IGNORE),
    }
