"""The batches that plugins are tried on: the caller's texts and columns are in them."""

from typing import Any

import torch

from trl_grpo_ext.testing import check
from trl_grpo_ext.types import HookDeclaration

SEEN: list[Any] = []


class Looks:
    """Keeps what it saw of row 0."""

    declares = HookDeclaration(role="transform", needs=("offsets",))

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> Any:
        SEEN.append((rollout.texts[0], rollout.columns["level"][0], rollout.offsets(0)))
        return [[(0, len(text), 0.5)] if text else None for text in rollout.texts]


def test_texts_and_columns_of_the_caller_are_in_the_batch() -> None:
    SEEN.clear()
    report = check("advantage_hook", Looks(), completions=["a = 1; b = 2"], columns={"level": [3]})
    assert report.ok, str(report)
    text, level, offsets = SEEN[0]
    assert (text, level) == ("a = 1; b = 2", 3)
    assert [text[start:end] for start, end in offsets] == ["a = ", "1; b", " = 2"]
