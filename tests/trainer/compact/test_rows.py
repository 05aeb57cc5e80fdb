"""Rows taken out of micro-batches and put together in new ones keep every value that counts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from trl_grpo_ext.trainer.batch import BatchKeys
from trl_grpo_ext.trainer.compact.plan import Plan
from trl_grpo_ext.trainer.compact.rows import make_micro_steps, row_lengths_and_kinds

ROW_ID, WEIGHTS = BatchKeys.row_id, BatchKeys.weights
LENGTHS = np.array([[1, 1], [3, 5], [2, 2], [2, 0]])


def batch() -> dict[str, Any]:
    """Rows of these lengths, padded beyond the longest; every place has a number of its own."""
    left, width = 5, 6
    columns = torch.arange(width)
    return {
        "prompt_ids": torch.arange(4 * left).view(4, left) + 1000,
        "prompt_mask": (torch.arange(left) >= left - torch.tensor(LENGTHS[:, :1])).long(),
        "completion_ids": torch.arange(4 * width).view(4, width) + 5000,
        "completion_mask": (columns < torch.tensor(LENGTHS[:, 1:])).long(),
        "old_per_token_logps": torch.sin(torch.arange(4.0 * width)).view(4, width),
        "importance_sampling_ratio": torch.ones(4, 1),
        "advantages": torch.tensor([1.0, 2.0, -1.0, 0.5]),
        WEIGHTS: torch.ones(4, width),
        ROW_ID: torch.arange(4) + 40,
        "labels": [f"row {row}" for row in range(4)],
        "num_items_in_batch": torch.tensor(23.0),
        "nothing": None,
    }


def test_a_row_is_measured_by_its_masks() -> None:
    rows = batch()
    assert row_lengths_and_kinds(rows).tolist() == [[1, 1, 2], [3, 5, 2], [2, 2, 2], [2, 0, 0]]
    rows["tool_mask"] = torch.ones_like(rows["completion_mask"])
    rows["tool_mask"][2] = 0  # all of it is a tool's: no token counts
    rows["advantages"][0] = 0.0  # no signal
    assert row_lengths_and_kinds(rows)[:, 2].tolist() == [1, 2, 0, 0]
    per_token = rows["advantages"].unsqueeze(1).repeat(1, 6)
    per_token[1, :5] = 0.0  # only where nothing counts
    assert row_lengths_and_kinds({**rows, "advantages": per_token})[:, 2].tolist() == [1, 1, 0, 0]


def test_parts_by_hand_and_trls_batches_are_left_as_they_were() -> None:
    first, second = ({key: _half(value, part) for key, value in batch().items()} for part in (0, 1))
    untouched = copy.deepcopy([first, second])
    plan = Plan(((2, 0, -1), (-1,)), 0, 0, 0)

    def factor(before: dict[str, Any], part: dict[str, Any]) -> float:
        return len(part["advantages"]) / (10 if before is first else 20)

    step, idle = make_micro_steps([first, second], plan, LENGTHS, factor, torch.float64)
    assert step["prompt_ids"].tolist() == [[1013, 1014], [1003, 1004], [1003, 1004]]
    assert step["prompt_mask"].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert step["completion_ids"].tolist() == [[5012, 5013], [5000, 5001], [5000, 5001]]
    assert step["completion_mask"].tolist() == [[1, 1], [1, 0], [0, 0]]
    assert step["old_per_token_logps"].tolist() == batch()["old_per_token_logps"][[2, 0, 0], :2].tolist()
    assert step["advantages"].tolist() == pytest.approx([-0.15, 0.3, 0.0])
    assert step[WEIGHTS][2].tolist() == [0, 0]
    assert step[ROW_ID].tolist() == [42, 40, -1]
    assert step["labels"] == ["row 2", "row 0", "row 0"]
    assert (step["num_items_in_batch"], step["nothing"]) == (23, None)
    assert idle["prompt_ids"].tolist() == [[1004]]  # the shortest prompt
    assert idle["completion_ids"].tolist() == [[5000]]
    for now, before in zip((first, second), untouched, strict=True):  # TRL buffers them, and reads them again
        for key, value in before.items():
            assert torch.equal(now[key], value) if isinstance(value, torch.Tensor) else now[key] == value


def _half(value: Any, part: int) -> Any:
    whole = value is None or (isinstance(value, torch.Tensor) and value.dim() == 0)
    return value if whole else value[2 * part : 2 * part + 2]
