"""Hooks and rewards by turn in trainings with tools: parity with TRL, compact updates, shared prompts, groups sampled
again, checkpoints, environments' own rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.support import Recorder, arguments, relative_gap
from tests.trainer.pipelines.test_tools import (
    ASKED,
    RESPONSE,
    TEMPERATURE,
    add,
    biases,
    call,
    divide,
    result,
    save_tool_model,
)
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

SCRIPTS = {  # two turns in every completion, so that a group's turns are compared with all of it
    ASKED: [call("add", a=2, b=3), call("divide", a=1, b=0)],
    result("5"): ["it is 5.", "so 5."],
    result("{'error': 'division by zero'}"): ["no."],
}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tool_model"))


def last_letters(completions: list[Any], **columns: Any) -> list[float]:
    """Different for nearly all: what the last message has in it, and whether a call failed."""
    return [len(messages[-1]["content"]) / 4 - ("error" in messages[1]["content"]) for messages in completions]


def run(
    model: Path,
    folder: Path,
    hooks: list[Any] | None,
    rewards: list[Any],
    questions: tuple[str, ...] = ("2+3?", "what is 2 and 3?"),
    resume: str | None = None,
    **more: Any,
) -> tuple[Any, Recorder]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})
    recorder = Recorder()
    settings = {
        "generation_kwargs": {"sequence_bias": biases(tokenizer, SCRIPTS)},
        "max_completion_length": 200,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "temperature": TEMPERATURE,
        "seed": 5,
    }
    trainer_class = GRPOTrainer if hooks is None else GRPOExtTrainer
    ours = {} if hooks is None else {"advantage_hooks": hooks}
    more = {"tools": [add, divide], **more}
    if (settings_more := more.pop("settings", None)) is not None:
        settings |= settings_more
    trainer = trainer_class(
        str(model),
        rewards,
        arguments(folder, GRPOConfig if hooks is None else GRPOExtConfig, **settings),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[recorder],
        **ours,
        **more,
    )
    torch.manual_seed(7)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def test_the_outcomes_advantage_for_all_turns_is_trls(tool_model: Path, tmp_path: Path) -> None:
    trl, theirs = run(tool_model, tmp_path / "trl", None, [last_letters])
    assert len({*trl._logs["rewards"]["last_letters"]}) > 1
    hooks: dict[str, list[Any]] = {
        "off": [],
        "turn": ["turn_rewards"],
        "outcome": [{"name": "turn_rewards", "form": "turn_plus_outcome"}],
        "episodes": [{"name": "gigpo", "step_weight": 0.0, "normalise": True}],
    }
    for name, chosen in hooks.items():
        trainer, ours = run(tool_model, tmp_path / name, chosen, [last_letters])
        for step, gradient in enumerate(theirs.gradients):
            gap = relative_gap(ours.gradients[step], gradient)
            # GiGPO has 1e-6 beside the deviation, where TRL has 1e-4.
            assert gap == 0.0 if name == "off" else gap < (1e-6 if name != "episodes" else 1e-3)
        assert trainer._logs["completion"] == trl._logs["completion"]
