"""Trainings with `compact_updates: exact` are those of `off`: cells of the grid of parity, aggregations, windows of
accumulation, budgets, metrics, records, positions.

Of the grid's 128 cells here are the ones where rows may move, for every loss type, and four where they may not. All of
them were measured once: the largest relative gap of a gradient or of the weights is 5e-16.
"""

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
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config

from tests.support import OWN_AGGREGATION, Run, length_reward, prompts, relative_gap, train
from tests.trainer import parity_grid
from tests.trainer.compact.runs import (
    COMMON,
    DIFFERENT,
    EXACT,
    SORTED,
    Bonus,
    Seen,
    Whitened,
    compact_logs,
    gaps,
    pair,
)
from tests.trainer.parity_grid import Cell
from tests.trainer.process_worker import (
    Float64ChunkedTrainer,
    reward_with_flat_groups,
    run_job,
    uneven_rollout,
)
from tests.trainer.test_parity import tiny_moe  # noqa: F401 (a fixture)
from tests.trainer.test_split import BY_WEIGHTS
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainer.compact.updates import positions_are_relative
from trl_grpo_ext.trainer.mixin import GRPOExtMixin

pytestmark = pytest.mark.slow

STUCK = {"entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}
MOVABLE = list({replace(cell, on=cell.on - STUCK): None for cell in parity_grid.all_cells()})
GRID = [*parity_grid.covering(MOVABLE, 2), *parity_grid.cells_of("grpo")[1::4]]
"""Every two settings, and settings with loss types, where rows may move; some cells where they may not."""


def grid_gap(model: Path, folder: Path, cell: Cell, *, share: bool = False, **more: Any) -> float:
    bases: list[type] = [GRPOExtMixin, Float64ChunkedTrainer]
    runs = [
        parity_grid._train(model, folder / updates, cell, bases, compact_updates=updates, **own, **more)
        for updates, own in (("exact", {"share_prompts": share}), ("off", {}))
    ]
    return max(gaps(*runs))


@pytest.fixture
def uneven_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_grid, "scripted_rollout", uneven_rollout)


@pytest.mark.usefixtures("uneven_grid")
@pytest.mark.parametrize("cell", GRID, ids=lambda cell: f"{cell.loss_type}-{len(cell.on)}")
def test_cells_of_the_grid(tiny_model: Path, tmp_path: Path, cell: Cell) -> None:
    assert grid_gap(tiny_model, tmp_path, cell, reward_funcs=reward_with_flat_groups) < EXACT["float64"], cell


def test_the_cells_have_every_loss_type_and_every_setting_where_rows_may_move() -> None:
    movable = [cell for cell in GRID if not STUCK & cell.on]
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

    role = "transform"

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


def test_one_row_with_a_signal_leaves_micro_steps_of_placeholders(tiny_model: Path, tmp_path: Path) -> None:
    class One:
        role = "transform"

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
    with caplog.at_level(logging.INFO, logger="trl_grpo_ext.trainer.compact.updates"):
        pair(tiny_model, tmp_path, beta=0.04, loss_type="grpo")
    said = [record.getMessage() for record in caplog.records if record.name == "trl_grpo_ext.trainer.compact.updates"]
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


# ------------------------------------------------------------------------------------------- an auxiliary loss


def test_the_routers_auxiliary_loss_stays_with_its_micro_batches(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float32: torch has no grouped product of doubles.
    model = request.getfixturevalue("tiny_moe")
    overrides: dict[str, Any] = {"dtype": "float32", "max_steps": 1, "router_aux_loss_coef": 0.5}
    ours, theirs = pair(model, tmp_path, GRPOExtTrainer, **overrides)
    assert max(gaps(ours, theirs)) < EXACT["float32"]
    monkeypatch.setattr("trl_grpo_ext.trainer.extension.freedom_of", lambda *_: SORTED)
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
    monkeypatch.setattr("trl_grpo_ext.trainer.compact.updates.positions_are_relative", lambda config: True)
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
