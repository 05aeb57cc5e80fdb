"""Environments of TRL's `environment_factory` that pay for each step: with TRL's own trainer, and by turn with ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.support import arguments
from tests.trainer.support import ASKED, END, RESPONSE, START, TEMPERATURE, Watch, biases, call, result
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.advantages.turns import rewards_of_turns
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
        self.count, self.target, self.reward = 0, target, 0.0
        self.sum = 0.0

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


def played(model: Path, folder: Path, trainer: type, config: type, factory: Any, **more: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "up to 3?"}]] * 2, "target": [3, 3]})
    settings = {name: more.pop(name) for name in ("rewards",) if name in more}
    made = trainer(
        str(model),
        more.pop("reward_funcs", None),
        arguments(
            folder,
            config,
            generation_kwargs={"sequence_bias": biases(tokenizer, SCRIPTS)},
            max_completion_length=200,
            temperature=TEMPERATURE,
            seed=5,
            max_steps=1,
            per_device_train_batch_size=16,
            num_generations=8,
            **settings,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        environment_factory=factory,
        **more,
    )
    torch.manual_seed(7)
    made.train()
    return made


@pytest.mark.slow
def test_steps_are_paid_by_turn(tool_model: Path, tmp_path: Path) -> None:
    theirs = played(tool_model, tmp_path / "trl", GRPOTrainer, GRPOConfig, Counter, reward_funcs=total)
    watch = Watch()
    ours = played(
        tool_model,
        tmp_path / "ours",
        GRPOExtTrainer,
        GRPOExtConfig,
        record_steps(Counter),
        reward_funcs=total,
        rewards=["environment_steps"],
        advantage_hooks=[{"name": "turn_rewards"}, watch],
    )
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
