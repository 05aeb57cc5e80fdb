"""`normalised` in the real trainer gives TRL's own advantages, and so its gradients, whatever `scale_rewards` says."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from tests.support import length_reward, relative_gap, train


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Has nothing to say about some completions."""
    return [None if len(ids) % 3 == 1 else sum(ids) / 7 for ids in completion_ids]


@pytest.mark.parametrize("reward", [length_reward, sometimes])
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_trains_as_trl_does(tiny_model: Path, tmp_path: Path, reward: Any, scale_rewards: str) -> None:
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, reward_funcs=reward, scale_rewards="group")
    ours = train(
        tiny_model,
        tmp_path / "ext",
        reward_funcs=reward,
        scale_rewards=scale_rewards,
        trainer_arguments={"advantage_hooks": ["normalised"]},
    )
    logged = list(theirs.trainer._logs["advantages"])
    assert len({round(a, 3) for a in logged}) > 3  # there is something to compare
    assert (0.0 in logged) == (reward is sometimes)
    assert list(ours.trainer._logs["advantages"]) == pytest.approx(logged, rel=1e-5, abs=1e-6)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5
