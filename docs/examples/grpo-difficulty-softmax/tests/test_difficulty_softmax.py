"""The weights, worked out by hand and once more by plain loops."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.testing import assert_conforms, make_rollout

from grpo_difficulty_softmax import DifficultySoftmax


def rollout_of(lengths: list[int], rewards: list[float], groups: list[int], **overrides: Any) -> Any:
    rollout = make_rollout(lengths, rewards, groups, **overrides)
    centred_B = torch.nan_to_num(rollout.rewards_B - rollout.group_baselines_B)
    return replace(rollout, advantages_B_T=centred_B.unsqueeze(1) * rollout.mask_B_T)


def test_it_conforms() -> None:
    assert_conforms("loss_aggregation", "difficulty_softmax")
    assert_conforms("loss_aggregation", {"name": "difficulty_softmax", "temperature": 0.25})


def test_the_example_of_the_readme() -> None:
    rollout = rollout_of([1, 3, 2, 2, 5, 1, 2, 2], [1, 0, 1, 1, 0, 0, 0.5, 0], [0, 0, 1, 1, 2, 2, 3, 3])
    easier, harder = 2 / (1 + math.exp(0.25)), 2 / (1 + math.exp(-0.25))
    assert (easier, harder) == pytest.approx((0.8756, 1.1244), abs=1e-4)
    weights_B_T = DifficultySoftmax(temperature=1.0).weights(rollout)
    per_token = [easier / 8] * 2 + [0.0] * 4 + [harder / 8] * 2  # 1 + 3 + 2 + 2 live tokens of valid prompts
    assert torch.allclose(weights_B_T, rollout.mask_B_T * torch.tensor(per_token).unsqueeze(1).double(), atol=1e-7)


def test_the_hardest_counts_at_most_e_to_one_over_t_times_the_easiest() -> None:
    rewards = [1.0] * 99 + [0.0] + [1.0] + [0.0] * 99
    weights_B_T = DifficultySoftmax(temperature=2.0).weights(rollout_of([1] * 200, rewards, [0] * 100 + [1] * 100))
    ratio = float(weights_B_T[-1, 0] / weights_B_T[0, 0])
    assert ratio == pytest.approx(math.exp(0.98 / 2))
    assert ratio < math.exp(1 / 2)


def test_without_differences_in_difficulty_it_is_a_token_mean() -> None:
    rollout = rollout_of([1, 3, 2, 4], [1, 0, 0, 1], [0, 0, 1, 1])
    assert torch.allclose(DifficultySoftmax().weights(rollout), rollout.mask_B_T / 10)


def test_where_no_prompt_teaches_anything_it_is_a_token_mean() -> None:
    rollout = rollout_of([1, 3, 2, 4], [1, 1, 0, 0], [0, 0, 1, 1])
    both = DifficultySoftmax(temperature=1.0).weights(rollout)
    # μ is 1 for both: the prompt that nobody solved takes part with 1, too
    assert torch.allclose(both, rollout.mask_B_T / 10)


def test_advantages_from_a_hook_make_a_prompt_valid() -> None:
    rollout = rollout_of([1, 1, 2, 2], [1, 0, 1, 1], [0, 0, 1, 1])
    assert DifficultySoftmax().weights(rollout)[2:].sum() == 0
    advantages_B_T = rollout.advantages_B_T.clone()
    advantages_B_T[3, 1] = 0.5
    weights_B_T = DifficultySoftmax(temperature=1.0).weights(replace(rollout, advantages_B_T=advantages_B_T))
    harder, easier = 2 / (1 + math.exp(-0.5)), 2 / (1 + math.exp(0.5))  # μ is 1/2 and 1
    assert weights_B_T[0, 0] == pytest.approx(harder / 6)
    assert weights_B_T[3, 1] == pytest.approx(easier / 6)


def test_a_named_reward_says_how_hard_a_prompt_is() -> None:
    rollout = rollout_of([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 1])
    second_B = torch.tensor([1.0, 1.0, 0.0, 0.5], dtype=torch.float64)
    rollout = replace(rollout, rewards_B_K=torch.stack([rollout.rewards_B, second_B], dim=1), reward_names=("r", "s"))
    assert torch.allclose(DifficultySoftmax().weights(rollout), rollout.mask_B_T / 4)
    by_s_B = DifficultySoftmax(reward="s", temperature=0.5).weights(rollout)[:, 0]
    assert float(by_s_B[2] / by_s_B[0]) == pytest.approx(math.exp((1 - 0.25) / 0.5))
    with pytest.raises(ConfigurationError, match="no reward function 'q'; it has r, s"):
        DifficultySoftmax(reward="q").weights(rollout)


def slow_weights(lengths: list[int], scores: list[float], groups: list[int], temperature: float) -> list[float]:
    """Weight of each completion's tokens, by loops; of scores that are also the rewards."""
    valid, mean = [], {}
    for group in sorted(set(groups)):
        rows = [row for row, other in enumerate(groups) if other == group]
        given = [scores[row] for row in rows if not math.isnan(scores[row])]
        mean[group] = (sum(given) / len(given) if given else 0.0) or 1.0
        if sum(lengths[row] for row in rows) and given and max(given) > min(given):
            valid.append(group)
    if not valid:
        valid = [group for group in mean if any(lengths[row] for row, other in enumerate(groups) if other == group)]
    tokens = sum(length for length, group in zip(lengths, groups, strict=True) if group in valid)
    total = sum(math.exp(-mean[group] / temperature) for group in valid)
    return [
        len(valid) * math.exp(-mean[group] / temperature) / total / max(tokens, 1) if group in valid else 0.0
        for group in groups
    ]


@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_plain_loops(seed: int) -> None:
    rng = random.Random(seed)
    groups = [group for group in range(rng.randint(1, 5)) for _ in range(3)]
    lengths = [rng.randint(0, 4) for _ in groups]
    # Mostly right or wrong; a reward of a live completion shows in its advantages, so those of empty ones are None.
    scores = [rng.choice([0.0, 1.0, 1.0, 0.5, math.nan]) if length else math.nan for length in lengths]
    temperature = rng.choice([0.1, 1.0, 2.0])
    weights_B_T = DifficultySoftmax(temperature=temperature).weights(rollout_of(lengths, scores, groups))
    mask_B_T = make_rollout(lengths).mask_B_T
    expected_B = torch.tensor(slow_weights(lengths, scores, groups, temperature), dtype=torch.float64)
    assert torch.allclose(weights_B_T, mask_B_T * expected_B.unsqueeze(1), atol=1e-12)


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan, "2", True])
def test_temperatures_that_cannot_work(temperature: Any) -> None:
    with pytest.raises(ConfigurationError, match="temperature must be a positive number"):
        DifficultySoftmax(temperature=temperature)


def test_a_rollout_without_advantages_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="advantages_B_T is None"):
        DifficultySoftmax().weights(make_rollout([1, 1]))
