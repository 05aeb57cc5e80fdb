"""Scripts in the form of TRL's examples for agents and environments, moved to our trainer by two imports."""

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.trainer.support import RESPONSE, START, TEMPERATURE, biases, call

TWO_IMPORTS = """
from trl_grpo_ext import GRPOExtConfig as GRPOConfig
from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer
"""

SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_steps": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}


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

    Returns:
        The rows.
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
        (AGENT, [call("query", sql="SELECT eggs FROM birds"), call("query", sql="SELECT"), "*yes*", "*no*"]),
    ],
    ids=["agent"],
)
def test_same_numbers(source: str, writes: list[str], tool_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "output_dir": str(tmp_path)}
    processor = AutoTokenizer.from_pretrained(tool_model)
    processor.response_template = RESPONSE
    bias = biases(processor, {f"{START}assistant\n": writes})
    settings |= {"generation_kwargs": {"sequence_bias": bias}, "temperature": TEMPERATURE}
    settings |= {"max_completion_length": 250, "max_tool_calling_iterations": 3}
    names = {"model": str(tool_model), "processor": processor, "settings": settings}
    theirs, ours = ran(source, names), ran(moved(source), names)
    assert [type(trainer).__name__ for trainer in (theirs, ours)] == ["GRPOTrainer", "GRPOExtTrainer"]
    assert any(log.get("reward_std") for log in theirs.state.log_history)
    weights = ours.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in theirs.model.state_dict().items())
    for their_log, our_log in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        timed = {name for name in their_log if name.endswith(("runtime", "per_second", "step_time"))}
        assert {name: our_log[name] for name in their_log.keys() - timed} == {
            name: their_log[name] for name in their_log.keys() - timed
        }
