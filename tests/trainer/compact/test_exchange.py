"""Rows dealt to ranks: each runs once, none has more to do than another, and nothing of a row is lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contexts import Ranks, make_rollout
from trl_grpo_ext import Rollout
from trl_grpo_ext.trainer.compact.plan import plan_block
from trl_grpo_ext.trainer.compact.rows import deal_rows, exchange_rows, rows_to_plan


def test_rows_dealt_by_hand() -> None:
    lengths = np.array([[[2, 9], [2, 1], [2, 5]], [[2, 7], [2, 3], [2, 8]]])  # rows 0-2 and 3-5
    runs = np.array([[True, True, True], [True, False, True]])
    first, second = deal_rows(lengths, runs)
    assert first.tolist() == [0, 3, 1]  # 9, 7, 1
    assert second.tolist() == [5, 2]  # 8, 5


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_row_that_runs_is_dealt_once_and_evenly(ranks: int, rows: int, random: Any) -> None:
    lengths = np.array([[[random.randint(1, 9), random.randint(0, 30)] for _ in range(rows)] for _ in range(ranks)])
    runs = np.array([[random.random() < 0.5 for _ in range(rows)] for _ in range(ranks)])
    dealt = deal_rows(lengths, runs)
    assert sorted(np.concatenate(dealt).tolist()) == np.flatnonzero(runs.reshape(-1)).tolist()
    counts = [len(own) for own in dealt]
    assert max(counts) - min(counts) <= 1
    totals = lengths.sum(axis=2).reshape(-1)
    longest = totals[np.flatnonzero(runs.reshape(-1))].max() if runs.any() else 0
    tokens = [int(totals[own].sum()) for own in dealt]
    assert max(tokens) - min(tokens) <= longest  # as even as dealing whole rows in turn can be
    numbers, blocks = rows_to_plan(lengths, dealt)
    assert all(len(own) >= 1 for own in numbers)
    plans = plan_block(blocks, 2)
    for own, plan in zip(dealt, plans, strict=True):
        placed = [row for step in plan.steps for part in step for row in part if row >= 0]
        assert sorted(placed) == list(range(len(own)))


def test_nothing_of_a_row_is_lost_on_the_way() -> None:
    widths = [(3, 4), (5, 2)]  # of prompts and completions, by rank

    def rows_of(rank: int) -> dict[str, Any]:
        prompt, completion = widths[rank]
        ids = torch.arange(2 * prompt).view(2, prompt) + 100 * (rank + 1)
        return {
            "prompt_ids": ids,
            "prompt_mask": torch.ones(2, prompt, dtype=torch.long),
            "completion_ids": torch.arange(2 * completion).view(2, completion) + 1000 * (rank + 1),
            "advantages": torch.tensor([rank + 0.25, rank + 0.5]),
            "names": [f"{rank}a", f"{rank}b"],
            "num_items_in_batch": torch.tensor(7),
        }

    mine = [np.array([3, 0]), np.array([1])]
    everyone = [name for rank in range(2) for name in rows_of(rank)["names"]]

    def run(rollout: Rollout) -> dict[str, Any]:
        rank = int(rollout.local_rows.start)
        return exchange_rows(rows_of(rank), mine[rank], rollout.gather, lambda names: everyone)

    first, second = Ranks([make_rollout([1]), make_rollout([1])]).run(run)
    assert first["prompt_ids"].tolist() == [[205, 206, 207, 208, 209], [0, 0, 100, 101, 102]]
    assert first["prompt_mask"].tolist() == [[1] * 5, [0, 0, 1, 1, 1]]
    assert first["completion_ids"].tolist() == [[2002, 2003, 0, 0], [1000, 1001, 1002, 1003]]
    assert first["advantages"].tolist() == [1.5, 0.25]
    assert first["names"] == ["1b", "0a"]
    assert first["num_items_in_batch"] == 7
    assert second["prompt_ids"].tolist() == [[0, 0, 103, 104, 105]]
    assert second["names"] == ["0b"]
