"""What has signal is decided once, after the chain: in real trainings, with skipping, compacting and RL-ZVP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import Run, relative_gap, train
from tests.trainer.watch import Watch
from trl_grpo_ext import Rollout
from trl_grpo_ext.credit.signal import has_signal
from trl_grpo_ext.types import HookDeclaration

ZVP = {"name": "zero_variance_credit", "alpha": 0.1}


def run(model: Path, folder: Path, *hooks: Any, **settings: Any) -> Run:
    return train(model, folder, hooks=[*hooks], **{"max_steps": 1, **settings})


def logged(run: Run) -> list[float]:
    """The advantages that the loss got, as TRL's table has them: one for each completion, their mean."""
    return list(run.trainer._logs["advantages"])


def gradient_is_zero(run: Run) -> bool:
    return not any(bool(gradient.any()) for gradient in run.gradients[0].values())


class Penalty:
    """Takes 0.05 from the first token of every other completion."""

    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        penalty_B_T = torch.zeros_like(advantages_B_T)
        penalty_B_T[::2, 0] = 0.05
        return advantages_B_T - penalty_B_T


def last() -> Watch:
    """Keeps the advantages behind the other hooks."""
    watch = Watch()
    watch.declares = HookDeclaration(role="transform", last=True)
    return watch


def always(value: float) -> Any:
    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [value] * len(completion_ids)

    return reward


def uneven(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(i % 4 == 0) for i in range(len(completion_ids))]


@pytest.mark.slow
def test_signal_of_equal_totals(tiny_model: Path, tmp_path: Path) -> None:
    # 0.5 · 1 + 0 for one completion of four, 0.5 · 0 + 0.5 for the others: equal totals of which the z-scores do not
    # cancel, since the second function counts twice as much.
    def rest(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [0.5 * (1.0 - value) for value in uneven(completion_ids)]

    settings: dict[str, Any] = {
        "reward_funcs": [uneven, rest],
        "reward_weights": [0.5, 1.0],
        "multi_objective_aggregation": "normalize_then_sum",
    }
    watch = last()
    kept = run(tiny_model, tmp_path / "kept", ZVP, watch, **settings)
    plain = run(tiny_model, tmp_path / "plain", last(), **settings)
    advantages_B_T, rollout = watch.seen[0]  # masks are asked again for the signs that they allow
    assert bool(has_signal(advantages_B_T, rollout.mask_B_T).all())
    assert max(logged(plain)) > 0.4
    assert min(logged(plain)) < -1.3
    assert logged(kept) == logged(plain)  # the hook has nothing to do
    assert relative_gap(kept.gradients[0], plain.gradients[0]) < 1e-6
    settings["multi_objective_aggregation"] = "sum_then_normalize"
    summed = run(tiny_model, tmp_path / "summed", ZVP, **settings)
    assert logged(summed) != logged(plain)  # where totals are what is compared, it has


@pytest.mark.slow
def test_skipping_equal_rewards(tiny_model: Path, tmp_path: Path) -> None:
    skipping = {"name": "token_mean", "skip_zero_variance": True}
    settings: dict[str, Any] = {"reward_funcs": always(100.0)}
    skipped = run(tiny_model, tmp_path / "skipped", Penalty(), loss_aggregation=skipping, **settings)
    assert gradient_is_zero(skipped)
    assert skipped.logs[0]["groups/zero_variance"] == 1
    learning = Penalty()
    learning.declares = HookDeclaration(role="transform", makes_signal=True)
    kept = run(tiny_model, tmp_path / "kept", learning, loss_aggregation=skipping, **settings)
    plain = run(tiny_model, tmp_path / "plain", Penalty(), loss_aggregation="token_mean", **settings)
    assert not gradient_is_zero(plain)
    assert relative_gap(kept.gradients[0], plain.gradients[0]) == 0
    assert kept.logs[0]["groups/zero_variance"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["sum_then_normalize", "normalize_then_sum"])
def test_signal_of_rounding(tiny_model: Path, tmp_path: Path, setting: str) -> None:
    settings: dict[str, Any] = {
        "reward_funcs": [always(0.3), always(100.1)],
        "multi_objective_aggregation": setting,
        "num_generations": 7,
        "per_device_train_batch_size": 14,
        "max_steps": 1,
    }
    alone = train(tiny_model, tmp_path / "alone", **settings)
    assert not gradient_is_zero(alone)  # TRL's own, where nothing is selected
    for name, selected in {
        "weighted": {"loss_aggregation": "token_mean"},
        "compact": {"compact_updates": "exact"},
    }.items():
        run = train(tiny_model, tmp_path / name, **settings, **selected)
        assert gradient_is_zero(run), name


@pytest.mark.slow
def test_a_mask_holds_after_the_forward_stage_whatever_the_order(tiny_model: Path, tmp_path: Path) -> None:
    for name, hooks in {"behind": [ZVP, "truncation_masking"], "in front": ["truncation_masking", ZVP]}.items():
        watch = last()
        trained = run(tiny_model, tmp_path / name, *hooks, watch, reward_funcs=always(1.0), prompt_count=8)
        # Of every cut completion nothing is learnt, and of every other one by its entropy.
        cut = watch.rollouts[0].truncated_B.tolist()
        assert {*cut} == {True, False}
        assert [value == 0 for value in logged(trained)] == cut
