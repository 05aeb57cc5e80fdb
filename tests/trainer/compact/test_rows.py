"""Rows taken out of micro-batches and put together in new ones keep every value that counts.

The batches are made up in TRL's form. That the gradient is the same is in `test_updates`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.trainer.compact.runs import ROW_ID, WEIGHTS, Case, Row, batches_of
from trl_grpo_ext.trainer.compact.plan import Plan
from trl_grpo_ext.trainer.compact.rows import logps_by_length, make_micro_steps, row_lengths_and_kinds

# ----------------------------------------------------------------------------------------------- by hand


def test_a_row_is_measured_by_its_masks() -> None:
    rows = [
        Row(2, (True, True, True), (0.5,) * 6),
        Row(4, (True,), (0.0,) * 6),
        Row(1, (False, False), (2.0,) * 6),
        Row(3, (), (2.0,) * 6),
        Row(3, (False, True), (2.0, 0.0, 2.0, 2.0, 2.0, 2.0)),
    ]
    (batch,) = batches_of(Case(rows, 1, True, (1, 2), True, False))
    # Signal; none; all tokens are the environment's; no token; the advantages are where nothing counts.
    assert row_lengths_and_kinds(batch).tolist() == [[2, 3, 2], [4, 1, 1], [1, 2, 0], [3, 0, 0], [3, 2, 1]]


def test_a_part_by_hand() -> None:
    rows = [Row(1, (True,), (1.0,) * 6), Row(3, (True,) * 5, (2.0,) * 6), Row(2, (True,) * 2, (-1.0,) * 6)]
    batches = batches_of(Case(rows, 1, False, (2, 1), False, False))
    lengths = np.array([[1, 1], [3, 5], [2, 2]])
    plan = Plan(((2, 0, -1), (-1,)), 0, 0, 0, 0)
    options: dict[str, Any] = {"precision": torch.float64, "trim_left": True}
    step, idle = make_micro_steps(
        batches, plan, lengths, lambda before, part: part["advantages"].numel() / 10, **options
    )
    assert step["prompt_ids"].tolist() == [[1013, 1014], [1003, 1004], [1003, 1004]]
    assert step["prompt_mask"].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert step["completion_ids"].tolist() == [[5012, 5013], [5000, 5001], [5000, 5001]]
    assert step["completion_mask"].tolist() == [[1, 1], [1, 0], [0, 0]]
    assert step["advantages"].tolist() == pytest.approx([-0.3, 0.3, 0.0])
    assert step[WEIGHTS][2].tolist() == [0, 0]
    assert step[ROW_ID].tolist() == [42, 40, -1]
    assert step["labels"] == ["row 2", "row 0", "row 0"]
    assert idle["prompt_ids"].tolist() == [[1004]]  # the shortest prompt
    assert idle["completion_ids"].tolist() == [[5000]]


def test_the_batches_of_trl_are_left_as_they_were() -> None:
    # TRL buffers them, and other iterations read them again.
    rows = [Row(2, (True,) * 3, (1.0,) * 6), Row(1, (True,), (0.0,) * 6)]
    case = Case(rows, 2, False, (1, 1), True, False)
    batches, untouched = batches_of(case), batches_of(case)
    plan, lengths = Plan(((0, -1), (-1, -1)), 0, 0, 1, 1), np.array([[2, 3], [1, 1]])
    make_micro_steps(batches, plan, lengths, lambda before, part: 3.0, torch.float64, trim_left=True)
    for batch, before in zip(batches, untouched, strict=True):
        for key, value in before.items():
            assert torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value


# ----------------------------------------------------------------------------- log-probabilities without a gradient


class Scored:
    """Log-probabilities and entropies of a real model, in chunks as TRL takes them; keeps the shape of each pass."""

    def __init__(self, model: Any, positions: bool) -> None:
        self.model, self.positions = model, positions
        self.passes: list[tuple[int, int]] = []

    def __call__(
        self, model: Any, ids: Any, mask: Any, keep: int, batch_size: int | None = None, compute_entropy: bool = False
    ) -> Any:
        logps, entropies = [], []
        for row_ids, live in zip(ids.split(batch_size or len(ids)), mask.split(batch_size or len(ids)), strict=True):
            self.passes.append(tuple(row_ids.shape))
            more = {"position_ids": (live.cumsum(-1) - 1).clamp(min=0)} if self.positions else {}
            with torch.no_grad():
                logits = model(input_ids=row_ids, attention_mask=live, **more).logits[:, -keep - 1 : -1]
            every = logits.log_softmax(-1)
            logps.append(every.gather(-1, row_ids[:, -keep:].unsqueeze(-1)).squeeze(-1))
            entropies.append(-(every.exp() * every).sum(-1))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None


def inputs(seed: int, rows: int, left: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (rows, left + width), generator=generator)
    prompts = torch.randint(1, left + 1, (rows, 1), generator=generator)
    completions = torch.randint(0, width + 1, (rows, 1), generator=generator)
    columns = torch.arange(left + width)
    return ids, ((columns >= left - prompts) & (columns < left + completions)).long()


def gap_in_order(method: Scored, trim_left: bool, seed: int, rows: int = 11, chunk: int = 3) -> float:
    ids, mask = inputs(seed, rows, 5, 8)
    given_ = {
        "model": method.model,
        "input_ids": ids,
        "attention_mask": mask,
        "logits_to_keep": 8,
        "compute_entropy": True,
    }
    plain = method(method.model, ids, mask, 8, compute_entropy=True)
    method.passes.clear()
    ordered = logps_by_length(method, given_, chunk, trim_left)
    live = mask[:, 5:] != 0
    assert ordered[2] is None
    for ours, theirs in zip(ordered[:2], plain[:2], strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    return max(float(((ours - theirs) * live).abs().max()) for ours, theirs in zip(ordered[:2], plain[:2], strict=True))


@pytest.fixture(scope="module")
def llama(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    return GPT2LMHeadModel(config).double().eval()


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 12), chunk=st.integers(1, 4))
@settings(max_examples=25)
def test_log_probabilities_in_order_of_length_are_the_same(llama: Any, seed: int, rows: int, chunk: int) -> None:
    method = Scored(llama, positions=True)
    assert gap_in_order(method, True, seed, rows, chunk) < 1e-12
    assert len(method.passes) == -(-rows // chunk)
    assert sum(n * columns for n, columns in method.passes) <= rows * 13


def test_rows_that_move_within_their_padding(llama: Any, gpt2: Any) -> None:
    # TRL passes no positions. The angles of rotary embeddings are float32 in any model, hence the tolerance.
    assert 0 < gap_in_order(Scored(llama, positions=False), True, seed=1) < 1e-5
    # Absolute positions keep what is in front of the prompts.
    assert gap_in_order(Scored(gpt2, positions=False), False, seed=1) < 1e-12
    assert gap_in_order(Scored(gpt2, positions=False), True, seed=1) > 1e-2
