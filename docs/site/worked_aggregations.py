"""Worked examples of the loss aggregations: the same seven losses for all of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.testing.builders import make_rollout
from trl_grpo_ext.types import StepTotals, implements

from .worked import Worked, completions

LOSSES = ((1.0, 3.0), (2.0, 2.0, 0.0, 4.0), (6.0,))
REWARDS = (1.0, 0.0, 1.0)
SIGNS = (1.0, -1.0, 1.0)
TOKENS = ("AB", "ACDE", "F")
LIMIT = 8


def aggregate(selection: Any, groups: tuple[int, ...] = (0, 0, 0)) -> Mapping[str, Any]:
    """Weights of the tokens and the loss, of one optimizer step in one process."""
    aggregation = load_loss_aggregation(selection)
    lengths = [len(row) for row in LOSSES]
    loss_B_T = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    ids_B_T = torch.zeros(loss_B_T.shape, dtype=torch.long)
    for row, (losses, letters) in enumerate(zip(LOSSES, TOKENS, strict=True)):
        loss_B_T[row, : len(losses)] = torch.tensor(losses, dtype=torch.float64)
        ids_B_T[row, : len(losses)] = torch.tensor([ord(letter) for letter in letters])
    rollout = make_rollout(lengths, REWARDS, groups, limit=LIMIT, completion_ids_B_T=ids_B_T)
    step = StepTotals(tokens=sum(lengths), sequences=len(lengths))
    rollout = replace(
        rollout,
        advantages_B_T=rollout.mask_B_T * torch.tensor(SIGNS, dtype=torch.float64).unsqueeze(1),
        totals=replace(rollout.totals, step=step),
    )
    if implements(aggregation, "weights"):
        weights_B_T = flow.token_weights(aggregation, rollout)
        loss = (weights_B_T * loss_B_T).sum()
    else:
        loss_B_T.requires_grad_()
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, rollout.totals)
        (weights_B_T,) = torch.autograd.grad(loss, loss_B_T)
    rows = [weights_B_T[row, :length].tolist() for row, length in enumerate(lengths)]
    return {"weight of each token": rows, "total": float(loss.detach())}


def _example(selection: Any, note: str = "") -> Worked:
    given = {
        "tokens": [" ".join(letters) for letters in TOKENS],
        "per-token losses": LOSSES,
        "reward": REWARDS,
        "sign of the advantage": ["+" if sign > 0 else "-" for sign in SIGNS],
    }
    return Worked(selection, completions(len(LOSSES)), given, aggregate, note)


_ONE_PROMPT = "All three are completions of one prompt, in one micro-batch of one process."
_SLOPE = "It is a reduction, so a token's weight is the slope of the loss in that token's loss."

EXAMPLES: dict[str, Worked] = {
    name: _example(selection, note)
    for name, selection, note in (
        ("token_mean", "token_mean", _ONE_PROMPT),
        ("token_mean_local", "token_mean_local", f"{_ONE_PROMPT} {_SLOPE}"),
        ("token_mean_step", "token_mean_step", f"{_ONE_PROMPT} {_SLOPE}"),
        ("token_sum", "token_sum", _ONE_PROMPT),
        ("seq_mean_token_mean", "seq_mean_token_mean", _ONE_PROMPT),
        ("seq_mean_token_sum", "seq_mean_token_sum", _ONE_PROMPT),
        ("constant_length", {"name": "constant_length", "length": LIMIT}, _ONE_PROMPT),
        ("prompt_mean", "prompt_mean", f"{_ONE_PROMPT} Were the third of another prompt, the loss would be 4."),
        ("length_power", {"name": "length_power", "alpha": 0.75}, _ONE_PROMPT),
        ("sign_balanced", "sign_balanced", _ONE_PROMPT),
        ("prefix_share", "prefix_share", f"{_ONE_PROMPT} The first two begin with the same token."),
        ("tail_mean", {"name": "tail_mean", "fraction": 0.5}, f"{_ONE_PROMPT} {_SLOPE}"),
    )
}
