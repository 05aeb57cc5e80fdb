"""The numbers that texts on GRPO work by hand, through the package and through TRL; the glossary shows them too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.contexts import make_rollout
from tests.support import relative_gap, train
from tests.trainer.watch import WatchBoth
from trl_grpo_ext import load_advantage_hooks, load_loss_aggregation
from trl_grpo_ext.credit import flow

LENGTHS, REWARDS = (5, 4, 6), (1.0, 0.0, 0.5)
SAMPLE, POPULATION = 0.5, math.sqrt(1 / 6)  # of the three rewards, whose mean is 0.5


@pytest.mark.parametrize(("std", "deviation"), [("sample", SAMPLE), ("population", POPULATION)])
def test_group_advantages_under_both_standard_deviations(std: str, deviation: float) -> None:
    rollout = make_rollout(LENGTHS, rewards=list(REWARDS))
    (hook,) = load_advantage_hooks([{"name": "normalised", "std": std, "epsilon": 1e-12}])
    found = flow.apply_rollout_hooks(torch.zeros(3), [hook], rollout)[:, 0].tolist()
    assert found == pytest.approx([0.5 / deviation, -0.5 / deviation, 0.0])
    assert found[0] == pytest.approx({"sample": 1.0, "population": 1.2247}[std], abs=5e-5)


# ------------------------------------------------------------------------------------------------- the worked batch


def worked_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Three completions of 5, 4 and 6 tokens for each prompt."""
    completion_ids = [[3 + (7 * row + 3 * t) % 30 for t in range(LENGTHS[row % 3])] for row in range(len(prompts))]
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": [[-1.0] * 6] * len(prompts)}


def worked_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [REWARDS[LENGTHS.index(len(ids))] for ids in completion_ids]


def worked(model: Path, folder: Path, trainer_class: type | None = None, **settings: Any) -> Any:
    given = {} if trainer_class is None else {"trainer_class": trainer_class}
    settings = {"per_device_train_batch_size": 3, "num_generations": 3, "num_iterations": 2, "max_steps": 2, **settings}
    more = {"rollout_func": worked_rollout, **settings.pop("trainer_arguments", {})}
    return train(model, folder, reward_funcs=worked_reward, prompt_count=2, trainer_arguments=more, **given, **settings)


@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "seq_mean_token_mean"), ("dapo", "token_mean")])
def test_the_worked_batch_is_the_same_through_trl_and_through_the_pipeline(
    tiny_model: Path, tmp_path: Path, loss_type: str, aggregation: str
) -> None:
    seen = WatchBoth()
    theirs = worked(tiny_model, tmp_path / "trl", GRPOTrainer, loss_type=loss_type)
    hooks = {"advantage_hooks": ["normalised", seen], "loss_aggregation": aggregation}
    ours = worked(tiny_model, tmp_path / "ext", trainer_arguments=hooks)
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-6)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5

    # And by the functions alone: ratio, clipping, weights. First on-policy, then after an update that has moved it.
    weights = flow.token_weights(load_loss_aggregation(aggregation), make_rollout(LENGTHS))
    for (advantages_B_T, forward), logged in zip(seen.forwards, ours.losses, strict=True):
        order = [LENGTHS.index(int(length)) for length in forward.mask_B_T.sum(dim=1)]
        ratio = flow.importance_ratio(forward.logps_B_T, forward.old_logps_B_T, forward.mask_B_T, "token")
        advantage = torch.tensor([1.0, -1.0, 0.0])[order, None] * SAMPLE / (SAMPLE + 1e-4)
        assert advantages_B_T[:, 0].tolist() == pytest.approx(advantage[:, 0].tolist(), abs=1e-5)
        terms = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        assert float((terms * weights[order]).sum()) == pytest.approx(logged, abs=2e-5)

    # The first loss: 0 as a mean over sequences, -(5 - 4)/15 as a mean over tokens. Both have a gradient.
    first = {"grpo": 0.0, "dapo": -1 / 15}[loss_type]
    assert ours.losses[0] == pytest.approx(first, abs=2e-5)
    assert ours.losses[1] < ours.losses[0] - 1e-4
    size = math.sqrt(sum(float(gradient.square().sum()) for gradient in ours.gradients[0].values()))
    assert size > 0.1


def test_the_kl_is_0_at_the_first_step_and_not_afterwards(tiny_model: Path, tmp_path: Path) -> None:
    run = worked(tiny_model, tmp_path, beta=0.04, num_iterations=1)
    first, second = (log["kl"] for log in run.logs if "kl" in log)
    assert first == pytest.approx(0.0, abs=1e-7)
    assert second > 1e-5
