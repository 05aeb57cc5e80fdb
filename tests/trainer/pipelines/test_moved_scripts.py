"""Scripts in the form of TRL's examples for images, agents and environments, moved to our trainer by two imports."""

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_vision
from tests.trainer.support import START, TEMPERATURE, biases, call, saved, talker

TWO_IMPORTS = """
from trl_grpo_ext import GRPOExtConfig as GRPOConfig
from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer
"""

SETTINGS = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2, "learning_rate": 0.01, "seed": 3}
SETTINGS |= {"logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}

IMAGES = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

dataset = pictures(4).map(lambda row: {"solution": str(row["answer"])})


def length_reward(completions, solution, image, **kwargs):
    sizes = [picture.size[0] for picture in image]
    return [len(c[0]["content"]) / size + int(right) for c, size, right in zip(completions, sizes, solution)]


trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(**settings, max_completion_length=8),
    reward_funcs=[length_reward, think_format_reward],
    train_dataset=dataset,
    processing_class=processor,
    peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]),
)
trainer.train()
"""

AGENT = '''
import sqlite3

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

connection = sqlite3.connect(":memory:")
connection.execute("CREATE TABLE birds (name TEXT, eggs INTEGER)")
connection.execute("INSERT INTO birds VALUES ('owl', 4)")


def query(sql: str) -> list:
    """Ask the database.

    Args:
        sql: The statement.
    """
    return connection.execute(sql).fetchall()


def correctness_reward(completions, answer, **kwargs):
    return [0.6 if f"*{right}*" in c[-1]["content"] else -0.5 for c, right in zip(completions, answer)]


def query_reward(completions, **kwargs):
    results = [[turn["content"] for turn in completion if turn["role"] == "tool"] for completion in completions]
    return [sum(-1.0 if "error" in text else 1.0 for text in texts) for texts in results]


trainer = GRPOTrainer(
    model=model,
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "4 eggs?"}]] * 4, "answer": ["yes"] * 4}),
    tools=[query],
    reward_funcs=[correctness_reward, query_reward],
    args=GRPOConfig(**settings),
    processing_class=processor,
)
trainer.train()
'''

GAME = '''
import random

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class Lamp:
    def reset(self, **kwargs) -> str:
        self.bulbs = [random.random() < 0.5 for _ in range(3)]
        self.reward = 0.0
        self.done = False
        return f" bulbs={self.bulbs}"

    def switch(self, bulb: int) -> str:
        """Switch a bulb.

        Args:
            bulb: Its number, from 0 to 2.
        """
        if self.done:
            raise ValueError("Game over.")
        self.bulbs[bulb] = not self.bulbs[bulb]
        self.reward = float(sum(self.bulbs))
        self.done = all(self.bulbs)
        return f"bulbs={self.bulbs} done={self.done}"


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


def main() -> None:
    global trainer
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Light all."}] for _ in range(8)]})
    trainer = GRPOTrainer(
        model=model,
        train_dataset=dataset,
        reward_funcs=reward_func,
        args=GRPOConfig(**settings),
        environment_factory=Lamp,
        processing_class=processor,
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''


def ran(source: str, names: dict[str, Any]) -> Any:
    random.seed(1)
    found = {**names, "__name__": "__main__"}
    exec(compile(source, "script", "exec"), found)
    return found["trainer"]


def moved(source: str) -> str:
    """The script with the two imports behind its own."""
    body = ast.parse(source).body
    last = max(node.end_lineno or 0 for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    lines = source.split("\n")
    return "\n".join([*lines[:last], TWO_IMPORTS, *lines[last:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "writes"),
    [
        (IMAGES, None),
        (AGENT, [call("query", sql="SELECT eggs FROM birds"), call("query", sql="SELECT"), "*yes*", "*no*"]),
        (GAME, [call("switch", bulb=bulb) for bulb in (0, 1, 2, 7)] + ["done"]),
    ],
    ids=["images", "agent", "game"],
)
def test_same_numbers(source: str, writes: list[str] | None, tool_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "output_dir": str(tmp_path)}
    if writes is None:
        model, processor = saved("llava")
    else:
        model, processor = tool_model, talker(tool_model)
        bias = biases(processor, {f"{START}assistant\n": writes})
        settings |= {"generation_kwargs": bias, "temperature": TEMPERATURE}
        settings |= {"max_completion_length": 250, "max_tool_calling_iterations": 3}
    names = {"model": str(model), "processor": processor, "settings": settings, "pictures": tiny_vision.pictures}
    theirs, ours = ran(source, names), ran(moved(source), names)
    assert [type(trainer).__name__ for trainer in (theirs, ours)] == ["GRPOTrainer", "GRPOExtTrainer"]
    assert any(log.get("reward_std") for log in theirs.state.log_history)
    weights = ours.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in theirs.model.state_dict().items())
    for their_log, our_log in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        lasting = [name for name in their_log if not name.endswith(("runtime", "per_second", "step_time"))]
        assert [our_log[name] for name in lasting] == [their_log[name] for name in lasting]
