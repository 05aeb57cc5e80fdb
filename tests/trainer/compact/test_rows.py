"""Rows taken out of micro-batches and put together in new ones, on this rank or another, keep every value that counts.

The batches are made up in TRL's form. That the gradient is the same is in `test_updates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from tests.contexts import Ranks, make_rollout
from trl_grpo_ext import Rollout
from trl_grpo_ext.trainer.batch import BatchKeys, counting_mask
from trl_grpo_ext.trainer.compact.plan import Plan, plan_block, plan_in_place
from trl_grpo_ext.trainer.compact.rows import (
    Layout,
    deal_rows,
    exchange_rows,
    logps_by_length,
    make_micro_steps,
    row_lengths_and_kinds,
    rows_to_plan,
)
from trl_grpo_ext.trainer.compact.updates import Freedom, _must_run, freedom_of, row_factor
from trl_grpo_ext.trainer.facts import LossSettings

PLACE, WEIGHTS = BatchKeys.row_id, BatchKeys.weights
LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")


@dataclass(frozen=True)
class Row:
    """One completion: its lengths, which of its tokens are the model's, and its advantages."""

    prompt: int
    live: tuple[bool, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """A generation batch of one rank, and what TRL pads it to beyond its longest row."""

    rows: list[Row]
    micro_steps: int
    per_token: bool
    padding: tuple[int, int]
    tool_mask: bool
    budget: int | None
    sequence_ratio: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    micro_steps = draw(st.integers(1, 4))
    count = micro_steps * draw(st.integers(1, 3))
    values = st.sampled_from([-1.5, -0.25, 0.0, 0.0, 0.5, 2.0])
    rows = []
    for _ in range(count):
        live = tuple(draw(st.lists(st.sampled_from([True, True, False]), min_size=0, max_size=6)))
        silent = draw(st.booleans())
        advantages = [0.0] * 6 if silent else draw(st.lists(values, min_size=6, max_size=6))
        rows.append(Row(draw(st.integers(1, 4)), live, tuple(advantages)))
    return Case(
        rows,
        micro_steps,
        draw(st.booleans()),
        (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 30)),
        draw(st.booleans()),
    )


def batches_of(case: Case) -> list[dict[str, Any]]:
    """TRL's micro-batches; every live token has values of its own, every other place has rubbish."""
    count, width = len(case.rows), max(1, *(len(row.live) for row in case.rows)) + case.padding[1]
    left = max(row.prompt for row in case.rows) + case.padding[0]
    number_B_T = torch.arange(count * width, dtype=torch.float64).view(count, width)
    batch: dict[str, Any] = {
        "prompt_ids": torch.arange(count * left).view(count, left) + 1000,
        "prompt_mask": torch.tensor([[0] * (left - row.prompt) + [1] * row.prompt for row in case.rows]),
        "completion_ids": torch.arange(count * width).view(count, width) + 5000,
        "completion_mask": torch.tensor([[1] * len(row.live) + [0] * (width - len(row.live)) for row in case.rows]),
        "old_per_token_logps": torch.sin(number_B_T),
        "ref_per_token_logps": torch.cos(number_B_T),
        "importance_sampling_ratio": torch.sin(number_B_T[:, :1] if case.sequence_ratio else number_B_T).abs(),
        WEIGHTS: torch.sin(3 + number_B_T).abs(),
        PLACE: torch.arange(count) + 40,
        "labels": [f"row {row}" for row in range(count)],
        "num_items_in_batch": torch.tensor(23.0),
        "nothing": None,
    }
    if case.tool_mask:
        batch["tool_mask"] = torch.tensor(
            [[*map(int, row.live), *[1] * (width - len(row.live))] for row in case.rows]
        ).view(count, width)
    batch[WEIGHTS] = batch[WEIGHTS] * counting_mask(batch)
    advantages_B_T = torch.tensor([[*row.advantages, *[0.0] * width][:width] for row in case.rows])
    batch["advantages"] = advantages_B_T if case.per_token else advantages_B_T[:, 0].clone()
    size = count // case.micro_steps
    return [
        {
            key: value
            if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0)
            else value[at : at + size]
            for key, value in batch.items()
        }
        for at in range(0, count, size)
    ]


@dataclass
class Setting:
    """A loss, and the aggregation in its place."""

    loss_type: str
    beta: float = 0.0
    aggregation: Any = None

    @property
    def freedom(self) -> Freedom:
        loss = LossSettings(self.loss_type, self.beta, "token", False, False, False, 1.0)
        return freedom_of(loss, self.aggregation, [], LlamaConfig())

    def factor(self, before: dict[str, Any], part: dict[str, Any]) -> float | None:
        return row_factor(self.loss_type if self.aggregation is None else None, before, part)


class Weights:
    """Stands for any aggregation by weights."""

    def weights(self, mask_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        raise NotImplementedError


def compacted(case: Case, setting: Setting, freedom: Freedom | None = None) -> tuple[list[dict[str, Any]], Plan]:
    """All parts, in the order in which they are laid out, and the plan; `CompactUpdates._replan` for one rank."""
    freedom = setting.freedom if freedom is None else freedom
    batches, size = batches_of(case), len(case.rows) // case.micro_steps
    table = torch.cat([row_lengths_and_kinds(batch) for batch in batches]).numpy()
    layout = Layout(factor=setting.factor, precision=torch.float64, trim_left=freedom.trim_left)
    if not freedom.sort:
        plans = [plan_in_place(table[at : at + size, :2]) for at in range(0, len(table), size)]
        lengths = [table[at : at + size, :2] for at in range(0, len(table), size)]
        steps = [make_micro_steps([b], p, own, layout)[0] for b, p, own in zip(batches, plans, lengths, strict=True)]
        return steps, plans[0]
    (plan,) = plan_block(
        [(table[:, :2], _must_run(table[:, 2], freedom))],
        case.micro_steps,
        rows_per_part=None if freedom.any_count else size,
        max_tokens=case.budget if freedom.any_count else None,
    )
    steps = make_micro_steps(batches, plan, table[:, :2], layout)
    assert len(steps) == case.micro_steps
    parts = []
    for step, planned in zip(steps, plan.steps, strict=True):
        step = dict(step)
        others = step.pop(BatchKeys.parts, [])
        assert 1 + len(others) == len(planned)
        parts += [step, *others]
    return parts, plan


def rows_by_place(batches: list[dict[str, Any]], case: Case) -> dict[int, dict[str, Any]]:
    """Each row's values at its live tokens (prompt and completion), by its place; placeholders left out."""
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
        for row, place in enumerate(batch[PLACE].tolist()):
            if place < 0:
                continue
            assert place not in found
            found[place] = {"labels": batch["labels"][row]}
            for key, value in tensors.items():
                mask = batch["prompt_mask" if key.startswith("prompt") else "completion_mask"][row] != 0
                whole = value.dim() == 1 or (key == "importance_sampling_ratio" and case.sequence_ratio)
                found[place][key] = value[row].tolist() if whole else value[row][mask].tolist()
    return found


# ----------------------------------------------------------------------------------------------- by hand


def test_a_row_is_measured_by_its_masks() -> None:
    rows = [
        Row(2, (True, True, True), (0.5,) * 6),
        Row(4, (True,), (0.0,) * 6),
        Row(1, (False, False), (2.0,) * 6),
        Row(3, (), (2.0,) * 6),
        Row(3, (False, True), (2.0, 0.0, 2.0, 2.0, 2.0, 2.0)),
    ]
    (batch,) = batches_of(Case(rows, 1, True, (1, 2), True, None, False))
    # Signal; none; all tokens are the environment's; no token; the advantages are where nothing counts.
    assert row_lengths_and_kinds(batch).tolist() == [[2, 3, 2], [4, 1, 1], [1, 2, 0], [3, 0, 0], [3, 2, 1]]


def test_a_part_by_hand() -> None:
    rows = [Row(1, (True,), (1.0,) * 6), Row(3, (True,) * 5, (2.0,) * 6), Row(2, (True,) * 2, (-1.0,) * 6)]
    batches = batches_of(Case(rows, 1, False, (2, 1), False, None, False))
    lengths = np.array([[1, 1], [3, 5], [2, 2]])
    plan = Plan((((2, 0, -1), (-1,)),), 0, 0, 0, 0)
    layout = Layout(lambda before, part: part["advantages"].numel() / 10, torch.float64, True)
    (step,) = make_micro_steps(batches, plan, lengths, layout)
    (idle,) = step[BatchKeys.parts]
    assert step["prompt_ids"].tolist() == [[1013, 1014], [1003, 1004], [1003, 1004]]
    assert step["prompt_mask"].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert step["completion_ids"].tolist() == [[5012, 5013], [5000, 5001], [5000, 5001]]
    assert step["completion_mask"].tolist() == [[1, 1], [1, 0], [0, 0]]
    assert step["advantages"].tolist() == pytest.approx([-0.3, 0.3, 0.0])
    assert step[WEIGHTS][2].tolist() == [0, 0]
    assert step[PLACE].tolist() == [42, 40, -1]
    assert step["labels"] == ["row 2", "row 0", "row 0"]
    assert idle["prompt_ids"].tolist() == [[1004]]  # the shortest prompt
    assert idle["completion_ids"].tolist() == [[5000]]


def test_the_batches_of_trl_are_left_as_they_were() -> None:
    # TRL buffers them, and other iterations read them again.
    rows = [Row(2, (True,) * 3, (1.0,) * 6), Row(1, (True,), (0.0,) * 6)]
    case = Case(rows, 2, False, (1, 1), True, None, False)
    batches, untouched = batches_of(case), batches_of(case)
    plan, layout = Plan((((0, -1),), ((-1, -1),)), 0, 0, 1, 1), Layout(lambda b, p: 3.0, torch.float64, True)
    make_micro_steps(batches, plan, np.array([[2, 3], [1, 1]]), layout)
    for batch, before in zip(batches, untouched, strict=True):
        for key, value in before.items():
            assert torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value


# ----------------------------------------------------------------------------------------------- nothing is lost


@given(cases(), st.sampled_from(LOSS_TYPES), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=150)
def test_rows_that_run_keep_every_live_token(case: Case, loss_type: str, beta: float, trim_left: bool) -> None:
    setting = Setting(loss_type, beta)
    freedom = replace(setting.freedom, trim_left=trim_left)
    before, (parts, _) = rows_by_place(batches_of(case), case), compacted(case, setting, freedom)
    after = rows_by_place(parts, case)
    table = dict(zip(before, torch.cat([row_lengths_and_kinds(batch) for batch in batches_of(case)]), strict=True))
    least = 2 if freedom.drop else 1 if freedom.any_count else 0
    assert set(after) == {place for place, row in table.items() if row[2] >= least}
    for place, row in after.items():
        ours, theirs = dict(row), dict(before[place])
        factor = ours.pop(BatchKeys.factor, 1.0)
        scaled, plain = (np.atleast_1d(np.array(kept.pop("advantages"))) for kept in (ours, theirs))
        assert ours == theirs
        np.testing.assert_allclose(scaled, plain * factor, rtol=1e-6)
        factors = scaled[plain != 0] / plain[plain != 0]
        assert (scaled[plain == 0] == 0).all()
        assert np.allclose(factors, factors[:1].repeat(len(factors)))
        assert (factors > 0).all()


@given(cases(), st.sampled_from(LOSS_TYPES), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=150)
def test_a_part_is_as_wide_as_its_longest_row(case: Case, loss_type: str, beta: float, trim_left: bool) -> None:
    setting = Setting(loss_type, beta)
    parts, plan = compacted(case, setting, replace(setting.freedom, trim_left=trim_left))
    computed = 0
    for part in parts:
        kept = part[PLACE] >= 0
        completions = part["completion_mask"][kept].sum(1).max().item() if kept.any() else 0
        prompts = part["prompt_mask"][kept].sum(1).max().item() if kept.any() else 1
        assert part["completion_ids"].size(1) == max(1, completions)
        assert part["prompt_ids"].size(1) == (
            prompts if trim_left or not kept.any() else max(r.prompt for r in case.rows) + case.padding[0]
        )
        rows, width = part["completion_ids"].shape
        computed += rows * (width + part["prompt_ids"].size(1))
        for key, value in part.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                expected = 1 if key == "importance_sampling_ratio" and case.sequence_ratio else width
                expected = part["prompt_ids"].size(1) if key.startswith("prompt") else expected
                assert value.shape == ((rows, expected) if value.dim() == 2 else (rows,)), key
    if trim_left and setting.freedom.sort:
        assert plan.computed == computed


@given(cases(), st.sampled_from(LOSS_TYPES))
@settings(max_examples=150)
def test_placeholders_say_nothing(case: Case, loss_type: str) -> None:
    parts, plan = compacted(case, Setting(loss_type, 0.0))
    found = 0
    for part in parts:
        for row in torch.nonzero(part[PLACE] < 0).flatten().tolist():
            found += 1
            assert not part["advantages"][row].any()
            assert not part[WEIGHTS][row].any()
            assert not counting_mask(part)[row].any()
            assert part["prompt_mask"][row].any()  # something to attend to
    assert found == sum(row < 0 for step in plan.steps for part in step for row in part)


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


def test_without_entropies_there_are_none(llama: Any) -> None:
    ids, mask = inputs(3, 5, 4, 6)
    given_ = {"model": llama, "input_ids": ids, "attention_mask": mask, "logits_to_keep": 6}
    logps, entropies, auxiliary = logps_by_length(Scored(llama, positions=True), given_, 2, True)
    assert logps.shape == (5, 6)
    assert (logps[mask[:, 4:] == 0] <= 0).all()
    assert entropies is None
    assert auxiliary is None


# ----------------------------------------------------------------------------------------------- between ranks


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
