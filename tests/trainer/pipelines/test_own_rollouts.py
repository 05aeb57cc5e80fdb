"""Somebody's subclass that overrides generating, scoring and building: what hooks see, and what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import length_reward, relative_gap, train
from tests.trainer.support import (
    EXACT,
    Doubled,
    Falling,
    assert_gradient,
    constant,
    expected_gradient,
    falling,
    group_advantages,
    mixed,
    on_top,
    rows_of,
    sequence_means,
)
from trl_grpo_ext.errors import ConfigurationError

ONE_STEP: dict[str, Any] = {"max_steps": 1, "loss_aggregation": "seq_mean_token_mean"}


class Curriculum(GRPOTrainer):
    """Hard prompts count more, and groups that are solved are not trained on."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        batch["difficulty"] = torch.tensor([1.0 + row["answer"] for row in inputs])
        solved = torch.tensor([row["answer"] == 1 for row in inputs])
        batch["advantages"] = torch.where(solved, 0.0, batch["advantages"] * batch["difficulty"])
        return batch


class DropsSolved(GRPOTrainer):
    """Takes groups that are solved out of the batch."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        kept = torch.tensor([row["answer"] != 1 for row in inputs])
        rows = {key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
        return {key: value[kept] if key in rows else value for key, value in batch.items()}


def difficulty(rows: int) -> torch.Tensor:
    return torch.arange(rows) // 4 + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("compact", ["off", "exact"])
def test_hooks_act_on_what_the_subclass_made(tiny_model: Path, tmp_path: Path, compact: str) -> None:
    hook = Falling()
    settings = {**ONE_STEP, "gradient_accumulation_steps": 2, "compact_updates": compact}
    run = train(tiny_model, tmp_path, mixed(Curriculum), hooks=[hook], **settings)
    rows = rows_of(tiny_model, 4)
    advantages = group_advantages(rows) * difficulty(16)
    advantages[4:8] = 0.0  # the solved group
    mask_B_T = hook.rollouts[0].mask_B_T
    torch.testing.assert_close(hook.seen[0], advantages.unsqueeze(1) * mask_B_T)
    assert hook.rollouts[0].rewards_B.tolist() == pytest.approx(length_reward([ids for _, ids in rows]))
    assert_gradient(run, tiny_model, rows, falling(advantages.tolist(), rows), sequence_means(rows))
    without = constant(advantages.tolist(), rows)
    assert relative_gap(expected_gradient(tiny_model, rows, without, sequence_means(rows)), run.gradients[0]) > 0.1


@pytest.mark.slow
def test_rows_that_are_reordered_below_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    class Reversed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return {key: value.flip(0) if value.dim() else value for key, value in batch.items()}

    with pytest.raises(ConfigurationError, match="row 0"):
        train(tiny_model, tmp_path, mixed(Reversed), hooks=["centred"], max_steps=1)
    assert train(tiny_model, tmp_path, mixed(Reversed), max_steps=1).gradients  # its own affair


@pytest.mark.slow
def test_own_rows_dropped_keep_weights(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tiny_model, tmp_path, on_top(DropsSolved), hooks=[Falling()], **ONE_STEP)
    rows = rows_of(tiny_model)
    advantages = falling(group_advantages(rows).tolist(), rows)
    assert_gradient(run, tiny_model, rows[:4], advantages[:4], sequence_means(rows[:4], sequences=8))


class SamplesTwice(GRPOTrainer):
    """Samples again and keeps half of each: dynamic sampling, much simplified."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        first = super()._generate_and_score_completions(inputs)
        second = super()._generate_and_score_completions(inputs)
        rows = [key for key in first if first[key].dim()]
        return {**first, **{key: torch.cat([first[key][:4], second[key][4:]]) for key in rows}}


@pytest.mark.slow
def test_own_batch_of_several_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        train(tiny_model, tmp_path, on_top(SamplesTwice), **ONE_STEP)
    hooks: dict[str, Any] = {"hooks": [Doubled()], "max_steps": 1}
    doubled = train(tiny_model, tmp_path, on_top(SamplesTwice), **hooks)
    plain = train(tiny_model, tmp_path, GRPOTrainer, max_steps=1)  # the script gives the same rows twice
    twice = {name: 2.0 * gradient for name, gradient in plain.gradients[0].items()}
    assert relative_gap(doubled.gradients[0], twice) < EXACT


@pytest.mark.slow
def test_tensors_that_a_subclass_adds_are_whole_after_resampling(tiny_model: Path, tmp_path: Path) -> None:
    class Targets(GRPOTrainer):
        """Adds 30 numbers to each row, one of them the number of its tokens."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            batch["targets"] = batch["completion_mask"].sum(1, keepdim=True) + torch.arange(30)
            return batch

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            assert torch.equal(inputs["targets"], inputs["completion_mask"].sum(1, keepdim=True) + torch.arange(30))
            return super().compute_loss(model, inputs, *arguments, **keywords)

        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    resample = {"filter": "signal", "max_rounds": 2}
    with pytest.warns(UserWarning, match="get_train_dataloader of MineTargets is not asked"):
        assert train(tiny_model, tmp_path, mixed(Targets), resample=resample, max_steps=1).gradients
