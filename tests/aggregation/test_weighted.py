"""`sign_balanced` and `prefix_share` by hand, and what is no outcome."""

from dataclasses import replace

import pytest
import torch

from tests.aggregation.completions import BATCH, completion, rollout_of, weights_of
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow


def test_what_hooks_make_of_the_advantages_is_no_outcome() -> None:
    name = "sign_balanced"
    # A KL penalty, or a teacher, may turn the sign of a right answer's advantage.
    turned = [replace(row, advantage=-row.advantage) for row in BATCH]
    assert weights_of(name, turned) == weights_of(name, BATCH)
    aggregation, rollout = load_loss_aggregation(name), rollout_of(BATCH)
    # Nor is what a shaper makes of the rewards.
    shaped = replace(rollout, rewards_B=-rollout.rewards_B, raw_rewards_B=rollout.rewards_B)
    assert torch.equal(flow.token_weights(aggregation, shaped), flow.token_weights(aggregation, rollout))


def test_rounding_is_no_outcome() -> None:
    # .2 is the mean of .1, .2 and .3 but for 3e-17.
    batch = [completion([1.0] * n, rewards=(reward, 0.0)) for n, reward in ((2, 0.1), (4, 0.2), (1, 0.3))]
    each = [row[0] for row in weights_of("sign_balanced", batch)]
    assert each == pytest.approx([1 / 3 / 2, 1 / 3 / 4, 1 / 3])


def test_prefix_share_of_ABC_ABD_AEF() -> None:
    batch = [completion([0, 0, 0], ids=ids) for ids in ("ABC", "ABD", "AEF")]
    expected = [[1 / 3, 1 / 2, 1], [1 / 3, 1 / 2, 1], [1 / 3, 1, 1]]
    assert weights_of("prefix_share", batch) == [pytest.approx([w / 9 for w in row]) for row in expected]


def test_prefix_share_beside_a_tools_tokens() -> None:
    # The tool's answer X or Y parts the first two at their second token; the third wrote X itself.
    batch = [completion([0, 0, 0], ids="AXB"), completion([0, 0, 0], ids="AYB"), completion([0, 0, 0], ids="AXB")]
    batch[0] = replace(batch[0], live=[True, False, True])
    batch[1] = replace(batch[1], live=[True, False, True])
    expected = [[1 / 3, 0, 1 / 2], [1 / 3, 0, 1], [1 / 3, 1, 1 / 2]]
    assert weights_of("prefix_share", batch) == [pytest.approx([w / 7 for w in row]) for row in expected]
