"""Hooks inside the real trainer: what they see, what is trained on, what is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support import Run, length_reward, relative_gap, train
from tests.trainer.watch import WatchBoth
from trl_grpo_ext import Rollout


class Scale:
    """Multiplies the advantages at one of the stages."""

    def __init__(self, factor: float, stage: str = "on_rollout") -> None:
        self.role = {"on_rollout": "transform", "on_forward": "forward"}[stage]
        setattr(self, stage, lambda advantages_B_T, context: advantages_B_T * factor)


def with_hooks(model: Path, folder: Path, *hooks: Any, **settings: Any) -> Run:
    return train(model, folder, hooks=list(hooks), **settings)


def test_decoupled_normalisation_trains_as_trl_with_normalize_then_sum(tiny_model: Path, tmp_path: Path) -> None:
    def even(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if ids[0] % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]

    rewards: dict[str, Any] = {"reward_funcs": [length_reward, even], "reward_weights": [0.3, 2.0], "prompt_count": 8}
    theirs = train(
        tiny_model, tmp_path / "trl", GRPOTrainer, multi_objective_aggregation="normalize_then_sum", **rewards
    )
    ours = train(tiny_model, tmp_path / "ext", hooks=["decoupled_normalisation"], **rewards)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5
    assert any(bool(gradient.any()) for gradient in theirs.gradients[0].values())


@pytest.mark.parametrize(("stage", "aggregation"), [("on_rollout", None), ("on_forward", "token_mean_local")])
def test_a_hook_that_doubles_doubles_the_gradient(
    tiny_model: Path, tmp_path: Path, stage: str, aggregation: str | None
) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "loss_aggregation": aggregation}
    plain = with_hooks(tiny_model, tmp_path / "plain", **settings)
    doubled = with_hooks(tiny_model, tmp_path / "doubled", Scale(2.0, stage), **settings)
    for name, gradient in plain.gradients[0].items():
        assert torch.equal(doubled.gradients[0][name], 2 * gradient)


def test_what_a_rollout_hook_sees(tiny_model: Path, tmp_path: Path) -> None:
    def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if len(ids) % 2 else float(len(ids)) for ids in completion_ids]

    watch = WatchBoth()
    run = with_hooks(
        tiny_model,
        tmp_path,
        watch,
        reward_funcs=[length_reward, sometimes],
        reward_weights=[2.0, 0.5],
        max_steps=2,
        gradient_accumulation_steps=2,
        prompt_count=8,
        beta=0.04,
        num_iterations=2,
    )
    assert [rollout.step for rollout in watch.rollouts] == [0]
    (rollout,) = watch.rollouts
    lengths = [len(ids) for ids in _ids(rollout)]
    assert rollout.lengths_B.tolist() == lengths
    assert rollout.totals.tokens == sum(lengths)
    assert (rollout.totals.sequences, rollout.totals.prompts, rollout.totals.micro_batches) == (16, 4, 2)
    assert rollout.totals.max_completion_length == 10
    assert rollout.reward_names == ("length_reward", "sometimes")
    assert rollout.columns["answer"] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert rollout.group_ids_B.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    first, second = length_reward(_ids(rollout)), sometimes(_ids(rollout))
    for row in range(16):
        other = second[row]
        assert rollout.rewards_B_K[row, 0].item() == pytest.approx(first[row])
        assert bool(torch.isnan(rollout.rewards_B_K[row, 1])) == (other is None)
        expected = 2 * first[row] + 0.5 * (other or 0.0)
        assert rollout.rewards_B[row].item() == pytest.approx(expected, abs=1e-6)
    assert rollout.ref_logps_B_T is not None
    assert rollout.ref_logps_B_T.shape == rollout.mask_B_T.shape
    assert rollout.old_logps_B_T is not None
    assert rollout.sampling_logps_B_T is not None
    assert rollout.training
    assert run.trainer.state.global_step == 2


def test_what_a_forward_hook_sees(tiny_model: Path, tmp_path: Path) -> None:
    watch = WatchBoth()
    with_hooks(tiny_model, tmp_path, watch, max_steps=2, num_iterations=2)
    assert len(watch.forwards) == 2
    (first_advantages, first), (_, second) = watch.forwards
    assert first.logps_B_T.shape == first.entropies_B_T.shape == first.mask_B_T.shape == first_advantages.shape
    assert not first.logps_B_T.requires_grad
    live = first.mask_B_T > 0
    torch.testing.assert_close(first.logps_B_T[live], first.old_logps_B_T[live])  # before any update
    assert (second.logps_B_T - second.old_logps_B_T)[second.mask_B_T > 0].abs().max() > 1e-3  # after one
    assert (first.step, second.step) == (0, 1)


def _ids(rollout: Rollout) -> list[list[int]]:
    return [
        [int(i) for i, live in zip(ids, mask, strict=True) if live]
        for ids, mask in zip(rollout.completion_ids_B_T, rollout.mask_B_T, strict=True)
    ]
