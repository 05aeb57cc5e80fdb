"""`compact_updates: exact` gives the gradient of `off`.

First on made-up micro-batches and a real model, where hypothesis chooses lengths, masks and advantages; each
restriction of `Freedom` is lifted there once, to show that the gradient would then be another one. Below are whole
trainings: cells of the grid of parity, aggregations, windows of accumulation, budgets, metrics, records, two processes.

Of the grid's 128 cells here are the ones where rows may move, for every loss type, and four where they may not. All of
them were measured once: the largest relative gap of a gradient or of the weights is 5e-16.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config

from tests.support import OWN_AGGREGATION, Run, arguments, length_reward, prompts, relative_gap, train
from tests.test_compact_rows import Case, Row, batches_of, cases
from tests.trainer import parity_grid
from tests.trainer.launch import Results, launch
from tests.trainer.parity_grid import Cell
from tests.trainer.process_worker import (
    Float64ChunkedTrainer,
    Float64CompactTrainer,
    Job,
    reward_with_flat_groups,
    run_job,
    uneven_rollout,
)
from tests.trainer.test_parity import tiny_moe  # noqa: F401 (a fixture)
from tests.trainer.test_split import BY_WEIGHTS
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, Totals
from trl_grpo_ext.compact import Freedom, _say_once, freedom_of, positions_are_relative
from trl_grpo_ext.compact_rows import PARTS_KEY, counting_mask
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.hook_chain import HookChain
from trl_grpo_ext.plugins import load_loss_aggregation
from trl_grpo_ext.trainer import GRPOExtMixin

EXACT = {"float64": 1e-9, "float32": 1e-5}
DIFFERENT = 1e-3
LOGGED = 1e-6
"""Relative; transformers adds the losses of a step up in float32."""

# --------------------------------------------------------------------------------- made-up batches, a real model


class Weights:
    """Stands for any aggregation by weights; the batch has them already."""

    def weights(self, mask_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        raise NotImplementedError


class Bonus:
    """A forward hook that is not homogeneous in the advantages and gives rows without any one."""

    per_completion = True

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        return advantages_B_T + torch.minimum(0.1 * forward.entropies_B_T, 0.5 + advantages_B_T.abs())


class Whitened(Bonus):
    """A forward hook that looks at its whole micro-batch."""

    per_completion = False

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        mean: torch.Tensor = (advantages_B_T * forward.mask_B_T).sum() / forward.mask_B_T.sum().clamp(min=1.0)
        return advantages_B_T - mean


class Bench:
    """A trainer whose settings change between made-up batches."""

    def __init__(self, model: Path, folder: Path, **more: Any) -> None:
        args = arguments(folder, compact_updates="exact", model_init_kwargs={"dtype": torch.float64}, **more)
        self.trainer: Any = Float64CompactTrainer(str(model), length_reward, args, train_dataset=prompts(8))
        self.trainer.model.train()
        self.trainer._self_checked = True
        self.trainer._places = 10**6  # made-up rows are not in the table of completions

    def set(
        self, loss_type: str, beta: float = 0.0, aggregation: Any = None, hook: Any = None, **values: Any
    ) -> Freedom:
        trainer = self.trainer
        trainer.loss_type, trainer.beta, trainer.loss_aggregation = loss_type, beta, aggregation
        trainer.advantage_hooks = [] if hook is None else [hook]
        trainer._chain = HookChain(trainer.advantage_hooks)
        trainer.entropy_coef = values.get("entropy_coef", 0.0)
        trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
        trainer.top_entropy_quantile = values.get("top_entropy_quantile", 1.0)
        trainer._freedom = freedom_of(trainer)
        return trainer._freedom  # type: ignore[no-any-return]

    def batches(self, case: Case) -> list[dict[str, Any]]:
        """Made-up micro-batches with tokens of the vocabulary, and ratios near 1."""
        trainer, batches = self.trainer, batches_of(case)
        trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = case.micro_steps
        trainer.current_gradient_accumulation_steps = case.micro_steps
        total = sum(int(counting_mask(batch).sum()) for batch in batches)
        for batch in batches:
            for key in ("prompt_ids", "completion_ids"):
                batch[key] = 3 + batch[key] % 39
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attention, batch["completion_ids"].size(1)
                )
            batch["old_per_token_logps"] = logps + 0.3 * batch["old_per_token_logps"]
            batch["ref_per_token_logps"] = logps + 0.5 * batch["ref_per_token_logps"]
            ratio, counting = 0.5 + batch["importance_sampling_ratio"], counting_mask(batch) != 0
            batch["importance_sampling_ratio"] = ratio if case.sequence_ratio else torch.where(counting, ratio, 1.0)
            batch["num_items_in_batch"] = torch.tensor(float(total))
            batch["advantages"] = batch["advantages"].double()
            size = batch["advantages"].size(0)
            batch["trl_grpo_ext_totals"] = Totals(
                tokens=total, sequences=size * case.micro_steps, prompts=1, max_completion_length=10, processes=1
            )
            batch["trl_grpo_ext_reward"] = batch["trl_grpo_ext_baseline"] = torch.zeros(size, dtype=torch.float64)
            batch["trl_grpo_ext_zero_variance"] = torch.zeros(size, dtype=torch.bool)
        return batches

    def gradient(self, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        trainer = self.trainer
        trainer.model.zero_grad()
        loss = 0.0
        for batch in batches:
            here = trainer.compute_loss(trainer.model, batch)
            trainer.accelerator.backward(here)
            loss += float(here.detach())
        found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        return {**found, "loss": torch.tensor(loss)}

    def gap(self, case: Case, freedom: Freedom | None = None) -> float:
        """Of gradient and loss, relative to the gradient or to 1 where that is smaller."""
        trainer = self.trainer
        batches = self.batches(case)
        theirs = self.gradient(batches)
        trainer.args.max_tokens_per_micro_batch = case.budget if trainer._freedom.any_count else None
        if freedom is not None:
            trainer._freedom = freedom
        planned = trainer._replanned(batches)
        assert len(planned) == case.micro_steps
        ours = self.gradient(planned)
        assert ours.keys() == theirs.keys()
        differ = math.sqrt(sum(float((ours[n] - theirs[n]).pow(2).sum()) for n in ours))
        return differ / max(1.0, math.sqrt(sum(float(theirs[n].pow(2).sum()) for n in theirs)))


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_model, tmp_path_factory.mktemp("bench"))


LOSSES = [*OWN_AGGREGATION, "weights"]


@given(case=cases(), name=st.sampled_from(LOSSES), beta=st.sampled_from([0.0, 0.1]), level=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_gradient_of_any_batch_is_the_same(bench: Bench, case: Case, name: str, beta: float, level: bool) -> None:
    bench.trainer.importance_sampling_level = "sequence" if level else "token"
    bench.set("grpo" if name == "weights" else name, beta, Weights() if name == "weights" else None)
    assert bench.gap(case) < EXACT["float64"]


@given(case=cases(), name=st.sampled_from(LOSSES), beta=st.sampled_from([0.0, 0.1]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_with_a_forward_hook(bench: Bench, case: Case, name: str, beta: float) -> None:
    bench.trainer.importance_sampling_level = "token"
    bench.set("grpo" if name == "weights" else name, beta, Weights() if name == "weights" else None, Bonus())
    assert bench.gap(case) < EXACT["float64"]


ROWS = [(1, 6, 1.0), (3, 1, 0.0), (2, 2, -1.0), (1, 3, 0.5), (2, 4, 0.0), (2, 1, 2.0)]
MIXED = Case([Row(p, (True,) * c, (a,) * 6) for p, c, a in ROWS], 3, False, (1, 1), False, None, False)
LONELY = replace(MIXED, rows=[MIXED.rows[0], *[Row(2, (), (0.0,) * 6)] * 5])
"""One row that runs, for three micro-steps."""
FREE = Freedom(sort=True, drop=True, any_count=True, trim_left=True, silent_placeholders=False)
KEPT = replace(FREE, drop=False)
SORTED = replace(FREE, drop=False, any_count=False)


@pytest.mark.parametrize(
    ("case", "configured", "lifted"),
    [
        (MIXED, {"loss_type": "dapo", "entropy_coef": 0.1}, KEPT),
        (MIXED, {"loss_type": "dapo", "entropy_coef": 0.1}, SORTED),
        (MIXED, {"loss_type": "dapo", "top_entropy_quantile": 0.5}, SORTED),
        (MIXED, {"loss_type": "grpo", "aggregation": "token_mean_local"}, SORTED),
        (MIXED, {"loss_type": "dapo", "hook": Whitened()}, SORTED),
        (MIXED, {"loss_type": "bnpo", "beta": 0.1}, SORTED),
        (MIXED, {"loss_type": "dapo", "beta": 0.1}, FREE),
        (MIXED, {"loss_type": "grpo", "beta": 0.1}, KEPT),
        (MIXED, {"loss_type": "luspo", "beta": 0.1}, KEPT),
        (MIXED, {"loss_type": "dapo", "hook": Bonus()}, FREE),
        (MIXED, {"loss_type": "grpo", "hook": Bonus()}, KEPT),
        (MIXED, {"loss_type": "bnpo", "hook": Bonus()}, SORTED),
        (LONELY, {"loss_type": "dapo", "beta": 0.1}, KEPT),
        (LONELY, {"loss_type": "dapo", "hook": Bonus()}, KEPT),
    ],
)
def test_more_freedom_would_give_another_gradient(
    bench: Bench, case: Case, configured: dict[str, Any], lifted: Freedom
) -> None:
    bench.trainer.importance_sampling_level = "token"
    if "aggregation" in configured:
        configured = {**configured, "aggregation": load_loss_aggregation(configured["aggregation"])}
    bench.set(**configured)
    assert bench.gap(case) < EXACT["float64"]
    bench.set(**configured)
    assert bench.gap(case, lifted) > DIFFERENT


def test_a_gap_would_be_seen(bench: Bench) -> None:
    # One advantage is off by a thousandth.
    bench.set("dapo")
    batches = bench.batches(MIXED)
    theirs = bench.gradient(batches)
    batches[0]["advantages"] = batches[0]["advantages"] * 1.001
    assert relative_gap(bench.gradient(batches), theirs) > 1e-5


# ------------------------------------------------------------------------------------------------ whole trainings


class Seen(Float64CompactTrainer):
    """Keeps the shapes that the loss is computed on, and what counts there."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*arguments, **keywords)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            lengths = zip(inputs["prompt_mask"].sum(1).tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
            self.seen.append(
                {
                    "step": self.state.global_step,
                    "computed": inputs["prompt_ids"].numel() + inputs["completion_ids"].numel(),
                    "rows": len(inputs["prompt_ids"]),
                    "lengths": [sum(both) for both, a in zip(lengths, inputs["advantages"], strict=True) if a.any()],
                }
            )
        return super()._compute_loss(model, inputs)


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "prompt_count": 8,
    "reward_funcs": reward_with_flat_groups,
    "learning_rate": 0.02,
}
"""Sixteen completions of four prompts for each optimizer step; two of the prompts have no signal."""


def pair(model: Path, folder: Path, trainer_class: type = Float64CompactTrainer, **overrides: Any) -> tuple[Run, Run]:
    """A training with `compact_updates: exact`, and the same with `off`."""
    found = {"dtype": "float64", **COMMON, **overrides}
    found["trainer_arguments"] = {"rollout_func": uneven_rollout, **found.get("trainer_arguments", {})}
    exact = train(model, folder / "exact", trainer_class, **found, compact_updates="exact")
    found.pop("max_tokens_per_micro_batch", None)
    return exact, train(model, folder / "off", trainer_class, **found)


def gaps(ours: Run, theirs: Run) -> list[float]:
    assert len(theirs.gradients) >= 1
    assert parity_grid.loss_gap(ours, theirs) < LOGGED
    steps = [relative_gap(*step) for step in zip(ours.gradients, theirs.gradients, strict=True)]
    return [*steps, relative_gap(ours.weights, theirs.weights)]


def compact_logs(run: Run) -> list[dict[str, float]]:
    """The metrics of compact updates at each step; no metric at all may be undefined."""
    assert not [name for log in run.logs for name, value in log.items() if math.isnan(value)]
    return [
        {name.removeprefix("compact/"): value for name, value in log.items() if name.startswith("compact/")}
        for log in run.logs
        if "loss" in log
    ]


STUCK = {"entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}
GRID = {
    f"{name}-{row:02}": cell
    for name in OWN_AGGREGATION
    for row, cell in enumerate(parity_grid.cells_of(name))
    if not STUCK & cell.on or (name == "grpo" and row % 4 == 1)
}


def grid_gap(model: Path, folder: Path, cell: Cell, **more: Any) -> float:
    bases: list[type] = [GRPOExtMixin, Float64ChunkedTrainer]
    runs = [
        parity_grid._train(model, folder / updates, cell, bases, compact_updates=updates, **more)
        for updates in ("exact", "off")
    ]
    return max(gaps(*runs))


@pytest.fixture
def uneven_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_grid, "scripted_rollout", uneven_rollout)


@pytest.mark.usefixtures("uneven_grid")
@pytest.mark.parametrize("cell", GRID.values(), ids=GRID.keys())
def test_cells_of_the_grid(tiny_model: Path, tmp_path: Path, cell: Cell) -> None:
    assert grid_gap(tiny_model, tmp_path, cell, reward_funcs=reward_with_flat_groups) < EXACT["float64"], cell


def test_the_cells_have_every_loss_type_and_every_setting_where_rows_may_move() -> None:
    movable = [cell for cell in GRID.values() if not STUCK & cell.on]
    assert {cell.loss_type for cell in movable} == OWN_AGGREGATION.keys()
    for factor in {factor.name for factor in parity_grid.FACTORS} - STUCK:
        assert {factor in cell.on for cell in movable} == {True, False}, factor


WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a kl penalty, mean of sequences": {"beta": 0.04, "loss_type": "grpo"},
    "a kl penalty, mean of tokens": {"beta": 0.04, "loss_type": "dapo"},
    "two iterations": {"num_iterations": 2, "loss_type": "bnpo", "max_steps": 4},
    "two steps for a generation batch": {"steps_per_generation": 8, "loss_type": "grpo"},
    "two generation batches for a step": {"steps_per_generation": 2, "loss_type": "bnpo"},
    "windows across generation batches": {"steps_per_generation": 6, "loss_type": "luspo"},
    "windows across generation batches and iterations": {"steps_per_generation": 6, "num_iterations": 2},
    "no window in common": {"steps_per_generation": 3, "loss_type": "grpo", "num_iterations": 2},
    "a budget": {"max_tokens_per_micro_batch": 30, "loss_type": "grpo"},
    "a budget of nothing": {"max_tokens_per_micro_batch": 1, "beta": 0.04},
    "truncated completions": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "one long micro-batch": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    "padded": {"pad_to_multiple_of": 16, "loss_type": "grpo"},
    "clipped and adam": {"optim": "adamw_torch", "max_grad_norm": 0.1, "learning_rate": 1e-3},
}


@pytest.mark.parametrize("overrides", WINDOWS.values(), ids=WINDOWS.keys())
def test_three_optimizer_steps_give_the_same_weights(
    tiny_model: Path, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    ours, theirs = pair(tiny_model, tmp_path, **{"max_steps": 3, **overrides})
    assert len(ours.gradients) == len(theirs.gradients) >= 3
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    for metrics in compact_logs(ours):
        if "computed_tokens" in metrics:
            assert metrics["live_tokens"] <= metrics["computed_tokens"]
    assert not any(compact_logs(theirs))


@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_the_same_in_the_precision_of_training(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    ours, theirs = pair(tiny_model, tmp_path, GRPOExtTrainer, dtype="float32", max_steps=1, loss_type=loss_type)
    assert 0 < max(gaps(ours, theirs)) < EXACT["float32"]


class Waves:
    """Advantages that differ from token to token, and change their sign."""

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        return advantages_B_T * (torch.cos(1.7 * torch.arange(advantages_B_T.size(1))) + 0.3)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_aggregations_by_weights_with_token_advantages(tiny_model: Path, tmp_path: Path, beta: float) -> None:
    job = {**COMMON, "float64": True, "uneven": True, "hooks": ["leave_one_out", Waves()], "beta": beta}
    job["aggregations"] = [*BY_WEIGHTS, {"name": "token_mean", "skip_zero_variance": True}]
    job["max_tokens_per_micro_batch"], job["compact_updates"] = 40, "exact"
    ours = run_job(tiny_model, tmp_path / "exact", job)
    theirs = run_job(
        tiny_model, tmp_path / "off", {**job, "max_tokens_per_micro_batch": None, "compact_updates": "off"}
    )
    measured = [relative_gap(*step) for step in zip(ours["gradients"], theirs["gradients"], strict=True)]
    assert len(measured) == len(BY_WEIGHTS) + 1
    assert max(measured) < EXACT["float64"]
    dropped = [log["compact/rows_dropped"] for log in ours["logs"] if "loss" in log]
    assert dropped == [0.0 if beta else 0.5] * len(measured)


@pytest.mark.parametrize("aggregation", ["token_mean_step", "token_mean_local"])
def test_aggregations_that_reduce_a_micro_batch(tiny_model: Path, tmp_path: Path, aggregation: str) -> None:
    ours, theirs = pair(tiny_model, tmp_path, loss_aggregation=aggregation, beta=0.04)
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    assert {log["rows_dropped"] for log in compact_logs(ours)} == {0.0}


def test_forward_hooks_with_and_without_the_promise_to_look_at_one_completion(tiny_model: Path, tmp_path: Path) -> None:
    for hook in (Bonus(), Whitened()):
        ours, theirs = pair(tiny_model, tmp_path, trainer_arguments={"advantage_hooks": [hook]}, loss_type="grpo")
        assert max(gaps(ours, theirs)) < EXACT["float64"]
        assert {log["rows_dropped"] for log in compact_logs(ours)} == {0.0}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_nearly_every_completion_is_truncated(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    # Fewer rows than micro-steps have a token that counts: with a KL penalty, placeholders may have none either.
    few: dict[str, Any] = {"mask_truncated_completions": True, "max_completion_length": 2, "beta": 0.04}
    ours, theirs = pair(tiny_model, tmp_path, **few, loss_type=loss_type, num_iterations=2)
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    undefined = [
        {name for log in run.logs for name, value in log.items() if math.isnan(value)} for run in (ours, theirs)
    ]
    assert undefined[0] <= undefined[1]


def test_a_batch_without_any_signal(tiny_model: Path, tmp_path: Path) -> None:
    def flat(completions: list[str], **columns: Any) -> list[float]:
        return [0.25] * len(completions)

    ours, theirs = pair(tiny_model, tmp_path, reward_funcs=flat)
    for run in (ours, theirs):
        assert all(not gradient.any() for step in run.gradients for gradient in step.values())
    for metrics in compact_logs(ours):
        assert metrics["rows_dropped"] == 1.0
        assert metrics["micro_steps_skipped"] == 4
        assert metrics["live_tokens"] == 0


# ------------------------------------------------------------------------------------------- what is logged


def test_the_metrics_by_hand(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = pair(tiny_model, tmp_path, Seen, max_steps=3)
    for step, metrics in enumerate(compact_logs(ours)):
        forwards = [seen for seen in ours.trainer.seen if seen["step"] == step]
        without = [seen for seen in theirs.trainer.seen if seen["step"] == step]
        live = [length for seen in without for length in seen["lengths"]]
        assert len(live) == 8  # of sixteen; in every other group all rewards are equal
        assert sorted(length for seen in forwards for length in seen["lengths"]) == sorted(live)
        assert metrics["live_tokens"] == sum(live)
        assert metrics["computed_tokens"] == sum(seen["computed"] for seen in forwards)
        assert metrics["computed_tokens"] < 0.6 * sum(seen["computed"] for seen in without)
        assert metrics["computed_to_live"] == pytest.approx(metrics["computed_tokens"] / metrics["live_tokens"])
        assert metrics["rows_dropped"] == 0.5
        assert metrics["micro_steps_skipped"] == 0
        assert metrics["update_seconds"] > 0
        assert metrics["rollout_seconds"] > 0


def test_one_row_with_a_signal_leaves_micro_steps_of_placeholders(tiny_model: Path, tmp_path: Path) -> None:
    class One:
        def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
            return advantages_B_T * (torch.arange(len(advantages_B_T)) == 5).unsqueeze(1)

    hooks = {"trainer_arguments": {"advantage_hooks": [One()]}, "reward_funcs": length_reward}
    ours, theirs = pair(tiny_model, tmp_path, Seen, loss_type="grpo", **hooks)
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    for step, metrics in enumerate(compact_logs(ours)):
        assert metrics["rows_dropped"] == 15 / 16
        assert metrics["micro_steps_skipped"] == 3
        assert metrics["computed_tokens"] == sum(seen["computed"] for seen in ours.trainer.seen if seen["step"] == step)


@pytest.mark.parametrize("budget", [12, 20, 45, 1000])
def test_no_forward_is_above_the_budget_but_a_row_by_itself(tiny_model: Path, tmp_path: Path, budget: int) -> None:
    ours, _ = pair(tiny_model, tmp_path, Seen, max_tokens_per_micro_batch=budget, beta=0.04, max_steps=1)
    assert all(seen["computed"] <= budget or seen["rows"] == 1 for seen in ours.trainer.seen)
    assert (len(ours.trainer.seen) == 4) == (budget == 1000)


def passes_without_a_gradient(model: Path, folder: Path, updates: str) -> tuple[list[tuple[int, int]], Run]:
    """The shapes on which the old policy and the reference were computed."""
    shapes: list[tuple[int, int]] = []

    class Recording(Float64ChunkedTrainer):
        @wraps(Float64ChunkedTrainer._get_per_token_logps_and_entropies)
        def _get_per_token_logps_and_entropies(  # type: ignore[override]
            self, *arguments: Any, **keywords: Any
        ) -> Any:
            rows, width = (keywords["input_ids"] if "input_ids" in keywords else arguments[1]).shape
            chunk = keywords.get("batch_size") or rows
            if not torch.is_grad_enabled():
                shapes.extend((min(chunk, rows - first), width) for first in range(0, rows, chunk))
            return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

    trainer_class = type("Trainer", (GRPOExtMixin, Recording), {})
    settings_ = {**COMMON, "dtype": "float64", "beta": 0.04, "num_iterations": 2, "compact_updates": updates}
    rollout = {"rollout_func": uneven_rollout}
    return shapes, train(model, folder, trainer_class, trainer_arguments=rollout, **settings_)


def test_the_old_policy_and_the_reference_compute_fewer_tokens_in_as_many_passes(
    tiny_model: Path, tmp_path: Path
) -> None:
    exact, ours = passes_without_a_gradient(tiny_model, tmp_path / "exact", "exact")
    off, theirs = passes_without_a_gradient(tiny_model, tmp_path / "off", "off")
    assert [rows for rows, _ in exact] == [rows for rows, _ in off] == [4] * 8  # both models, four passes of four rows
    assert sum(rows * width for rows, width in exact) < 0.8 * sum(rows * width for rows, width in off)
    assert max(gaps(ours, theirs)) < EXACT["float64"]


@pytest.mark.parametrize("aggregation", [None, "seq_mean_token_mean"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_recorded_weights_and_advantages_are_the_loss(
    tiny_model: Path, tmp_path: Path, loss_type: str, aggregation: str | None
) -> None:
    overrides: dict[str, Any] = {"token_records": 99, "max_steps": 1, "loss_aggregation": aggregation}
    ours, theirs = pair(tiny_model, tmp_path, loss_type=loss_type, max_tokens_per_micro_batch=30, **overrides)
    totals, trained = {}, {}
    for name, run in (("exact", ours), ("off", theirs)):
        rows = pyarrow.parquet.read_table(tmp_path / name / "token_records" / "step_00001.parquet").to_pylist()
        assert len(rows) == 16
        # At ratio 1 and without a KL penalty a token's loss is minus its advantage. Rows that did not run have none.
        terms = {
            (row["group"], row["member"]): [w * a for w, a in zip(row["weight"], row["advantage"], strict=True)]
            for row in rows
            if row["advantage"] is not None
        }
        trained[name] = len(terms)
        totals[name] = {place: -sum(values) for place, values in terms.items()}
        assert run.losses[0] == pytest.approx(sum(totals[name].values()), abs=2e-5)
    assert trained == {"exact": 8, "off": 16}
    for place, total in totals["exact"].items():
        assert total == pytest.approx(totals["off"][place], abs=1e-6)


def test_what_is_not_done_is_said_once(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trl_grpo_ext.compact"):
        pair(tiny_model, tmp_path, beta=0.04, loss_type="grpo")
    said = [record.getMessage() for record in caplog.records if record.name == "trl_grpo_ext.compact"]
    assert said == [
        "compact_updates: rows without signal run: the KL penalty acts on rows without signal too.",
        "compact_updates: micro-batches keep their number of rows: with a KL penalty grpo counts rows.",
    ]


# ---------------------------------------------------------------------------------------- what stays as it was


def test_evaluation_is_trls(tiny_model: Path, tmp_path: Path) -> None:
    evaluation: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "beta": 0.04,
    }
    dataset: dict[str, Any] = {"trainer_arguments": {"eval_dataset": prompts(8).select(range(4, 8))}}
    ours, theirs = pair(tiny_model, tmp_path, **evaluation, **dataset, num_iterations=2)
    assert max(gaps(ours, theirs)) < EXACT["float64"]
    evaluated = [[log for log in run.logs if "eval_loss" in log] for run in (ours, theirs)]
    assert len(evaluated[0]) == 2
    for our_log, their_log in zip(*evaluated, strict=True):
        assert our_log == pytest.approx(their_log, rel=1e-6, abs=1e-9)


def test_multimodal_batches_run_as_trl_deals_them(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.set("dapo")
    trainer = bench.trainer
    dealt = [{**batch, "pixel_values": torch.zeros(2, 3), "num_images": [1, 1]} for batch in bench.batches(MIXED)]
    trainer._buffered_inputs, trainer._planned, trainer._step = dealt, None, 1
    _say_once.cache_clear()
    for _ in range(2):
        with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compact"):
            assert trainer._prepare_inputs(None) is dealt[1]
    assert trainer._buffered_inputs is dealt
    assert not any(PARTS_KEY in batch for batch in dealt)
    said = [record.getMessage() for record in caplog.records if record.name == "trl_grpo_ext.compact"]
    assert said == ["compact_updates: multimodal inputs (num_images, pixel_values) run as TRL deals them."]


def test_a_liger_loss_is_refused(bench: Bench) -> None:
    args = SimpleNamespace(compact_updates="exact", use_liger_kernel=True)
    stand_in = SimpleNamespace(_compact=True, args=args)
    with pytest.raises(ConfigurationError, match="does not go with use_liger_kernel"):
        GRPOExtMixin._check_compact(stand_in)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides", [{"beta": 0.04, "loss_type": "grpo"}, {"entropy_coef": 0.1}, {"loss_aggregation": "token_mean_local"}]
)
def test_a_budget_that_cannot_be_exact_is_refused(tiny_model: Path, tmp_path: Path, overrides: dict[str, Any]) -> None:
    args = arguments(tmp_path, compact_updates="exact", max_tokens_per_micro_batch=100, **overrides)
    with pytest.raises(ConfigurationError, match="max_tokens_per_micro_batch=100 cannot be exact in this run"):
        GRPOExtTrainer(str(tiny_model), length_reward, args, train_dataset=prompts(4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"compact_updates": "on"}, "compact_updates must be off or exact, got 'on'"),
        ({"compact_updates": "exact", "max_tokens_per_micro_batch": 0}, "must be a number from 1 up, got 0"),
        ({"compact_updates": "exact", "max_tokens_per_micro_batch": True}, "must be a number from 1 up, got True"),
        ({"compact_updates": "exact", "max_tokens_per_micro_batch": 2.5}, "must be a number from 1 up, got 2.5"),
        ({"max_tokens_per_micro_batch": 9}, "max_tokens_per_micro_batch=9 needs compact_updates: exact"),
    ],
)
def test_settings_are_checked(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, **overrides)


def test_yaml_reads_off_as_false(tmp_path: Path) -> None:
    config = GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, compact_updates=False)  # type: ignore[arg-type]
    assert config.compact_updates == "off"


# ------------------------------------------------------------------------------------------- an auxiliary loss


def test_the_routers_auxiliary_loss_stays_with_its_micro_batches(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float32: torch has no grouped product of doubles.
    model = request.getfixturevalue("tiny_moe")
    overrides: dict[str, Any] = {"dtype": "float32", "max_steps": 1, "router_aux_loss_coef": 0.5}
    ours, theirs = pair(model, tmp_path, GRPOExtTrainer, **overrides)
    assert max(gaps(ours, theirs)) < EXACT["float32"]
    monkeypatch.setattr("trl_grpo_ext.compact.freedom_of", lambda trainer: SORTED)
    lifted, _ = pair(model, tmp_path, GRPOExtTrainer, **overrides)
    assert relative_gap(lifted.gradients[0], theirs.gradients[0]) > DIFFERENT


# ------------------------------------------------------------------------------------------------ positions


@pytest.fixture(scope="module")
def tiny_gpt2(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of absolute positions with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_gpt2")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **dropout, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_absolute_positions_keep_the_padding_of_prompts(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides: dict[str, Any] = {"dtype": "float32", "max_steps": 1, "beta": 0.04, "num_iterations": 2}
    ours, theirs = pair(tiny_gpt2, tmp_path, GRPOExtTrainer, **overrides)
    assert max(gaps(ours, theirs)) < EXACT["float32"]
    monkeypatch.setattr("trl_grpo_ext.compact.positions_are_relative", lambda config: True)
    lifted, _ = pair(tiny_gpt2, tmp_path, GRPOExtTrainer, **overrides)
    assert relative_gap(lifted.gradients[0], theirs.gradients[0]) > DIFFERENT


@pytest.mark.parametrize("budget", [25, 60])
def test_a_budget_counts_the_padding_that_is_kept(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    overrides: dict[str, Any] = {"max_steps": 1, "max_tokens_per_micro_batch": budget}
    ours, _ = pair(tiny_gpt2, tmp_path, Seen, **overrides)
    assert all(seen["computed"] <= budget or seen["rows"] == 1 for seen in ours.trainer.seen)
    (metrics,) = compact_logs(ours)
    assert metrics["computed_tokens"] == sum(seen["computed"] for seen in ours.trainer.seen)


@pytest.mark.parametrize(
    ("config", "relative"),
    [
        (LlamaConfig(), True),
        (Qwen3Config(), True),
        (LlamaConfig(rope_scaling={"rope_type": "yarn", "factor": 4.0}), True),
        (LlamaConfig(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), False),
        (GPT2Config(), False),
        (SimpleNamespace(rope_theta=1e4, layer_types=["full_attention", "linear_attention"]), False),
        (SimpleNamespace(rope_theta=1e4, layer_types=["chunked_attention", "full_attention"]), False),
        (SimpleNamespace(rope_theta=1e4, layer_types=["sliding_attention", "full_attention"]), True),
        (SimpleNamespace(), False),
    ],
)
def test_which_models_have_relative_positions(config: Any, relative: bool) -> None:
    assert positions_are_relative(config) == relative


# --------------------------------------------------------------------------------------------- two processes

PROCESSES: Job = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "prompt_count": 8,
    "uneven": True,
    "float64": True,
    "max_steps": 2,
}
SHARED: dict[str, Job] = {
    "flat groups": {"flat_groups": True, "loss_type": "grpo"},
    "a quiet rank": {"quiet_rank": True, "loss_type": "bnpo"},
    "a quiet rank, global mean": {"quiet_rank": True, "loss_type": "dapo"},
    "a kl penalty": {"quiet_rank": True, "beta": 0.04, "loss_type": "dapo", "mask_truncated_completions": True},
    "fixed rows": {"flat_groups": True, "beta": 0.04, "loss_type": "grpo", "num_iterations": 2},
    "weights": {"quiet_rank": True, "loss_aggregation": "seq_mean_token_mean", "beta": 0.04, "steps_per_generation": 4},
    "a budget": {"quiet_rank": True, "loss_type": "grpo", "max_tokens_per_micro_batch": 20},
    "a budget of nothing": {"flat_groups": True, "beta": 0.04, "max_tokens_per_micro_batch": 1},
    "balanced": {"quiet_rank": True, "loss_type": "grpo", "balance_ranks": True},
    "balanced, global mean": {"flat_groups": True, "num_iterations": 2, "balance_ranks": True},
    "balanced weights": {
        "quiet_rank": True,
        "loss_aggregation": "seq_mean_token_mean",
        "beta": 0.04,
        "steps_per_generation": 4,
        "balance_ranks": True,
    },
    "balanced within a budget": {"quiet_rank": True, "max_tokens_per_micro_batch": 20, "balance_ranks": True},
}
OURS = ("max_tokens_per_micro_batch", "balance_ranks")


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Job] = {}
    for name, job in SHARED.items():
        jobs[f"exact {name}"] = {**PROCESSES, **job, "compact_updates": "exact"}
        plain = {key: value for key, value in job.items() if key not in OURS}
        jobs[f"off {name}"] = {**PROCESSES, **plain}
    return launch(jobs, tiny_model, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_have_the_same_gradient(two: list[Results], name: str) -> None:
    ours, theirs = ([rank[f"{updates} {name}"] for rank in two] for updates in ("exact", "off"))
    assert all(bool(g.any()) for step in theirs[0]["gradients"] for n, g in step.items() if "embed" in n)
    for our_rank, their_rank in zip(ours, theirs, strict=True):
        measured = [relative_gap(*step) for step in zip(our_rank["gradients"], their_rank["gradients"], strict=True)]
        assert len(measured) == 2
        assert max(measured) < EXACT["float64"]
        assert relative_gap(our_rank["weights"], their_rank["weights"]) < EXACT["float64"]
    losses = [[log["loss"] for log in found[0]["logs"] if "loss" in log] for found in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-6)
    assert not [key for log in ours[0]["logs"] for key, value in log.items() if math.isnan(value)]


@pytest.mark.slow
def test_rows_move_to_a_quiet_rank(two: list[Results]) -> None:
    alone, balanced = (
        [log for log in two[0][f"exact {name}"]["logs"] if "loss" in log] for name in ("a quiet rank", "balanced")
    )
    for own, moved in zip(alone, balanced, strict=True):
        assert moved["compact/rows_dropped"] == own["compact/rows_dropped"] == 0.5
        assert moved["compact/live_tokens"] == own["compact/live_tokens"]
        assert moved["compact/micro_steps_skipped"] == 0.0
        assert moved["compact/computed_tokens"] < own["compact/computed_tokens"]  # no placeholders


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss_type": "bnpo"}, "bnpo is a mean over the tokens of each rank's micro-batch"),
        ({"loss_type": "grpo", "beta": 0.04}, "with a KL penalty grpo counts rows"),
        ({"token_records": 4}, "token_records are kept on the rank"),
        ({"entropy_coef": 0.01}, "the entropy bonus is a mean over each micro-batch"),
    ],
)
def test_rows_do_not_move_where_that_is_not_exact(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"balance_ranks moves rows to other ranks.*{reason}"):
        train(tiny_model, tmp_path, max_steps=1, compact_updates="exact", balance_ranks=True, **settings)


@pytest.mark.slow
def test_a_quiet_rank_runs_placeholders(two: list[Results]) -> None:
    for name in ("a quiet rank", "a quiet rank, global mean", "a budget"):
        logs = [log for log in two[0][f"exact {name}"]["logs"] if "loss" in log]
        assert {log["compact/rows_dropped"] for log in logs} == {0.5}
        assert {log["compact/micro_steps_skipped"] for log in logs} == {2.0}
