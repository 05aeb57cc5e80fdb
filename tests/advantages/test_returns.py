"""Sums over live tokens, `group_mean_gae` and `prefix_tree`: by hand."""

from dataclasses import replace

import pytest
import torch

from tests.advantages.token_batches import Rows, after_rollout
from tests.contexts import make_rollout
from trl_grpo_ext.advantages.returns import discounted_returns
from trl_grpo_ext.types import Rollout


def test_discounted_returns_neither_overflow_nor_drift() -> None:
    live, ones = torch.ones(1, 20_000, dtype=torch.bool), torch.ones(1, 20_000)
    assert discounted_returns(ones, live, 0.9)[0, 0].item() == pytest.approx(10.0, rel=1e-6)  # 1 / (1 - 0.9)
    assert discounted_returns(ones, live, 1.0)[0, 0].item() == 20_000


def test_group_mean_gae_by_hand() -> None:
    # Rewards 1 and 0, μ = .5. γ = 1: δ = 0, 0, ±.5; with λ = .5 it halves at every token backwards.
    rows = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gae_lambda=0.5)
    assert rows == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0]]
    # γ = .5, λ = 1: δ = -.25, -.25, .5, so A = .5, -.25 + .5·.5 = 0, -.25 + .5·0.
    (row, _) = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gamma=0.5, gae_lambda=1)
    assert row == [-0.25, 0, 0.5]


def test_group_mean_gae_with_lambda_by_length_by_hand() -> None:
    # α = .4: λ is 1 - 1/(.4 · 5) = .5 for five tokens, and 1 - 1/.8 = -.25, so 0, for two.
    first, second = after_rollout(make_rollout([5, 2], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.4)
    assert first == pytest.approx([0.5 * 0.5**t for t in (4, 3, 2, 1, 0)])
    assert second == [0, -0.5, 0, 0, 0]
    # The authors' 0.05 makes 1000 tokens fade by 1 - 1/50 each.
    (long, _) = after_rollout(make_rollout([1000, 1], [1, 0]), [9.0] * 2, "group_mean_gae", length_alpha=0.05)
    assert long[-2] / long[-1] == pytest.approx(0.98)


def of_texts(texts: list[str], rewards: list[float], live: list[str] | None = None) -> Rollout:
    """One token per letter; `live` has a dot where a tool wrote."""
    ids = torch.tensor([[ord(letter) for letter in text] for text in texts])
    rollout = make_rollout([len(text) for text in texts], rewards, completion_ids_B_T=ids)
    of_the_model = torch.tensor([[letter != "." for letter in text] for text in live or texts])
    return replace(rollout, mask_B_T=rollout.mask_B_T * of_the_model)


def prefix_tree(rollout: Rollout, mode: str = "replace", incoming: float = 9.0) -> Rows:
    return after_rollout(rollout, [incoming] * len(rollout.prompts), "prefix_tree", mode=mode)


def test_prefix_tree_by_hand() -> None:
    # μ = 1/3. After A all three: 1/3. After AB two: 1/2. After AE one: 0.
    rollout = of_texts(["ABC", "ABD", "AEF"], [1, 0, 0])
    expected = [[0, 1 / 6, 1 / 2], [0, 1 / 6, -1 / 2], [0, -1 / 3, 0]]
    assert prefix_tree(rollout) == [pytest.approx(row, abs=1e-12) for row in expected]
    assert prefix_tree(rollout, mode="add", incoming=2.0)[1] == pytest.approx([2, 2 + 1 / 6, 2 - 1 / 2])


def test_prefix_tree_beside_a_tools_tokens() -> None:
    # They part at the second token, a tool's: the third, the model's, gets it.
    assert prefix_tree(of_texts(["AxB", "AyC"], [1, 0], live=["A.B", "A.C"])) == [[0, 0, 0.5], [0, 0, -0.5]]
    # Where none follows, the last live one gets it.
    assert prefix_tree(of_texts(["Ax", "Ay"], [1, 0], live=["A.", "A."])) == [[0.5, 0], [-0.5, 0]]
