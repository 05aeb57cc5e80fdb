"""The aggregation that equals TRL's own reduction gives TRL's loss and gradient, for every loss type.

The rollouts are scripted and the optimizer is plain SGD with a large step, so that at the second iteration ratios are
off 1 and tokens are clipped. Both runs are real trainings through the public interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from tests.support import OWN_AGGREGATION, Run, relative_gap, train
from trl_grpo_ext import upstream

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL, two-sided clipping": {"beta": 0.04, "delta": 1.5},
    "KL without ratio, adaptive entropy, truncated masked": {
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 5.0,
        "mask_truncated_completions": True,
    },
    "sequence ratios, KL": {"importance_sampling_level": "sequence", "beta": 0.04},
    "entropy quantile and bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "accumulation 2, generation batch of 4 micro-batches": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
}

TOLERANCE = 1e-6
"""Relative, of a gradient. Most rows are equal to the bit; in the others sums are taken in another order.

The policy's weights are float64 in the grid, so that the second step starts from the same weights; TRL's
log-probabilities, and with them the losses, are float32 all the same.
"""


def both(model: Path, folder: Path, loss_type: str, aggregation: str, **settings: Any) -> tuple[Run, Run]:
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", **settings}
    theirs = train(model, folder / "trl", GRPOTrainer, loss_type=loss_type, **settings)
    ours = train(model, folder / "ext", loss_type=loss_type, loss_aggregation=aggregation, **settings)
    return ours, theirs


def assert_same(ours: Run, theirs: Run) -> None:
    assert len(theirs.gradients) >= 1
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < TOLERANCE
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-6)


def test_every_loss_type_of_trl_is_in_the_grid() -> None:
    assert OWN_AGGREGATION.keys() == upstream.LOSS_TYPES


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_own_aggregation_gives_trls_loss_and_gradient(
    tiny_model: Path, tmp_path: Path, loss_type: str, settings: dict[str, Any]
) -> None:
    assert_same(*both(tiny_model, tmp_path, loss_type, OWN_AGGREGATION[loss_type], **settings))


@pytest.mark.parametrize("loss_type", OWN_AGGREGATION)
def test_the_same_in_the_precision_of_training(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    # One step: after it, float32 runs would differ by what rounding does to the weights.
    settings: dict[str, Any] = {"num_iterations": 1, "max_steps": 1, "dtype": "float32"}
    assert_same(*both(tiny_model, tmp_path, loss_type, OWN_AGGREGATION[loss_type], **settings))


@pytest.mark.parametrize("objective", ["grpo"])
@pytest.mark.parametrize("reduction", ["bnpo", "dapo", "dr_grpo", "grpo", "luspo"])
def test_another_aggregation_is_the_loss_type_that_trl_has_for_it(
    tiny_model: Path, tmp_path: Path, objective: str, reduction: str
) -> None:
    # These loss types share the clipped objective and differ in the reduction alone, so TRL itself is the oracle of
    # a changed aggregation, with the KL penalty under the same weights.
    settings = {"num_iterations": 2, "prompt_count": 8, "dtype": "float64", "beta": 0.04}
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type=reduction, **settings)
    aggregation = OWN_AGGREGATION[reduction]
    ours = train(tiny_model, tmp_path / "ext", loss_type=objective, loss_aggregation=aggregation, **settings)
    assert_same(ours, theirs)


def test_the_metrics_of_the_loss_are_trls(tiny_model: Path, tmp_path: Path) -> None:
    ours, theirs = both(tiny_model, tmp_path, "dapo", "token_mean", beta=0.04)
    assert any(log.get("clip_ratio/region_mean", 0) > 0 for log in theirs.logs)
    for our_log, their_log in zip(ours.logs, theirs.logs, strict=True):
        assert our_log == pytest.approx(their_log, rel=1e-4, abs=1e-6)


def test_evaluation_reports_the_loss_that_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    from tests.support import prompts

    settings: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "trainer_arguments": {"eval_dataset": prompts(2)},
        "beta": 0.04,
        "max_steps": 1,
    }
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type="luspo", **settings)
    ours = train(tiny_model, tmp_path / "ext", loss_type="dapo", loss_aggregation="seq_mean_token_sum", **settings)
    their_loss, our_loss = (next(log["eval_loss"] for log in run.logs if "eval_loss" in log) for run in (theirs, ours))
    assert abs(their_loss) > 1e-4
    assert our_loss == pytest.approx(their_loss, rel=1e-5)
