"""Environments of TRL's `environment_factory` that pay for each step: with TRL's own trainer, and by turn with ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.support import arguments
from tests.trainer.support import ASKED, END, START, TEMPERATURE, Watch, biases, call, result, talker
from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.advantages.turn_credit import rewards_of_turns
from trl_grpo_ext.rewards.environment import record_steps

BOTH = call("increment", by=1) + call("increment", by=5)
SCRIPTS = {
    ASKED: [call("increment", by=2), BOTH, call("fail"), "no."],
    result("2"): [call("increment", by=2), "so it is."],
    f"\n{START}tool\n1{END}\n{START}tool\n6{END}\n{START}assistant\n": ["so it is."],
    result("{'error': 'broken'}"): ["so it is."],
    result("4"): ["so it is."],
}
PAID = {(): [0.0], ("2",): [2, 0], ("2", "4"): [2, 0, 0], ("1", "6"): [0, 0], ("{'error': 'broken'}",): [-1, 0]}
"""By the answers of the tools, what each turn is paid on the way to 3; 1 and 5 in one turn pay 1 and -1."""


class Counter:
    """Count up to a number; a step pays how much nearer it is."""

    def reset(self, target: int, **columns: Any) -> None:
        self.count = 0
        self.target = target
        self.reward = self.sum = 0.0

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: How much to add.
        """
        before, self.count = abs(self.target - self.count), self.count + by
        self._pay(float(before - abs(self.target - self.count)))
        return self.count

    def fail(self) -> int:
        """Fail."""
        self._pay(-1.0)
        raise ValueError("broken")

    def _pay(self, reward: float) -> None:
        self.reward = reward
        self.sum += reward


def total(environments: list[Any], **columns: Any) -> list[float]:
    """As a user of TRL writes it."""
    return [environment.sum for environment in environments]


def played(model: Path, args: Any, trainer: type, factory: Any, **more: Any) -> Any:
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "up to 3?"}]] * 2, "target": [3, 3]})
    given = {"train_dataset": data, "processing_class": talker(model), "environment_factory": factory, **more}
    made = trainer(str(model), total, args, **given)
    torch.manual_seed(7)
    made.train()
    return made


@pytest.mark.slow
def test_steps_are_paid_by_turn(tool_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_completion_length": 200, "temperature": TEMPERATURE, "seed": 5, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 16, "num_generations": 8}
    settings["generation_kwargs"] = biases(talker(tool_model), SCRIPTS)
    theirs = played(tool_model, arguments(tmp_path / "trl", GRPOConfig, **settings), GRPOTrainer, Counter)
    watch = Watch()
    args = arguments(tmp_path / "ours", rewards=["environment_steps"], **settings)
    hooks = [{"name": "turn_rewards"}, watch]
    ours = played(tool_model, args, GRPOExtTrainer, record_steps(Counter), advantage_hooks=hooks)
    logs = [trainer.state.log_history[0] for trainer in (theirs, ours)]
    assert logs[0]["rewards/total/mean"] == logs[1]["rewards/total/mean"] == logs[1]["rewards/environment_steps/mean"]
    (rollout,) = watch.rollouts
    table, kinds = rewards_of_turns(rollout), set()
    for row in range(16):
        answers = tuple(message["content"] for message in rollout.completions[row] if message["role"] == "tool")
        kinds.add(answers)
        paid = table.turns_B_M[row, : len(PAID[answers])].tolist()
        assert paid == pytest.approx(PAID[answers]), answers
    assert {("1", "6"), ("{'error': 'broken'}",), ("2", "4")} & kinds
    assert len(kinds) > 2
