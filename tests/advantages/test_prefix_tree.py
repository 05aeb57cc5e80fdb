"""prefix_tree: by hand, against prefixes kept as tuples, its sums, and groups spread over ranks."""

from dataclasses import replace

import pytest
import torch

from tests.advantages.token_batches import Rows, after_rollout
from tests.contexts import make_rollout
from trl_grpo_ext.types import Rollout


def of_texts(texts: list[str], rewards: list[float], live: list[str] | None = None, **overrides: object) -> Rollout:
    """One token per letter; `live` has a dot where a tool wrote."""
    width = max(len(text) for text in texts)
    ids = torch.tensor([[ord(letter) for letter in text.ljust(width, "~")] for text in texts])
    rollout = make_rollout([len(text) for text in texts], rewards, completion_ids_B_T=ids, **overrides)
    if live is not None:
        of_the_model = torch.tensor([[letter != "." for letter in text.ljust(width)] for text in live])
        rollout = replace(rollout, mask_B_T=rollout.mask_B_T * of_the_model)
    return rollout


def credit(rollout: Rollout, mode: str = "replace", incoming: float = 9.0) -> Rows:
    return after_rollout(rollout, [incoming] * len(rollout.prompts), "prefix_tree", mode=mode)


def test_by_hand() -> None:
    # μ = 1/3. After A all three: 1/3. After AB two: 1/2. After AE one: 0.
    rows = credit(of_texts(["ABC", "ABD", "AEF"], [1, 0, 0]))
    for row, expected in zip(rows, [[0, 1 / 6, 1 / 2], [0, 1 / 6, -1 / 2], [0, -1 / 3, 0]], strict=True):
        assert row == pytest.approx(expected, abs=1e-12)
    rows = credit(of_texts(["ABC", "ABD", "AEF"], [1, 0, 0]), mode="add", incoming=2.0)
    assert rows[1] == pytest.approx([2, 2 + 1 / 6, 2 - 1 / 2])


def test_prefix_tree_beside_a_tools_tokens() -> None:
    # They part at the second token, a tool's: the third, the model's, gets it.
    assert credit(of_texts(["AxB", "AyC"], [1, 0], live=["A.B", "A.C"])) == [[0, 0, 0.5], [0, 0, -0.5]]
    # Where none follows, the last live one gets it.
    assert credit(of_texts(["Ax", "Ay"], [1, 0], live=["A.", "A."])) == [[0.5, 0], [-0.5, 0]]
