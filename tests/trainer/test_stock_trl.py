"""The rewards alone work in TRL as it is: its GRPO and RLOO trainers and its command line, without our trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_grpo_ext import load_rewards

SELECTIONS: list[Any] = [
    "gsm8k_accuracy",
    {"name": "think_format", "weight": 0.2},
    {"name": "soft_overlong", "max_completion_length": 8, "cache": 4, "weight": 0.5},
]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def sums() -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{n} plus {n} is " for n in range(8)], "answer": [f"#### {2 * n}" for n in range(8)]}
    )


@pytest.mark.parametrize(("trainer_class", "config_class"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_rewards_in_trls_own_trainers(
    tiny_model: Path, tmp_path: Path, trainer_class: type, config_class: type
) -> None:
    rewards = load_rewards(SELECTIONS)
    trainer = trainer_class(
        model=str(tiny_model),
        reward_funcs=rewards,
        args=config_class(output_dir=str(tmp_path), reward_weights=rewards.weights, **SETTINGS),
        train_dataset=sums(),
    )
    trainer.train()
    assert trainer.reward_weights.tolist() == pytest.approx([1.0, 0.2, 0.5])
    assert trainer.reward_func_names == rewards.names == ["gsm8k_accuracy", "think_format", "soft_overlong"]
    steps = [log for log in trainer.state.log_history if "reward" in log]
    assert len(steps) == 2
    for log in steps:
        means = [log[f"rewards/{name}/mean"] for name in rewards.names]
        assert means[2] < 0  # a model that writes noise reaches the limit
        assert log["reward"] == pytest.approx(means[0] + 0.2 * means[1] + 0.5 * means[2], abs=1e-5)


@pytest.mark.slow
def test_rewards_on_trls_command_line(tiny_model: Path, tmp_path: Path) -> None:
    trl = Path(sys.executable).with_name("trl")
    assert trl.is_file(), "TRL's console script is not beside the interpreter that runs the tests"
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    sums().to_json(data / "train.jsonl")
    rewards = ["trl_grpo_ext.rewards.gsm8k_accuracy.gsm8k_accuracy", "trl_grpo_ext.rewards.formats.think_format"]
    settings = {**SETTINGS, "max_steps": 1, "save_strategy": "steps", "save_steps": 1, "output_dir": out}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [trl, "grpo", "--model_name_or_path", tiny_model, "--dataset_name", data, "--reward_funcs", *rewards, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    state = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())
    (log,) = [log for log in state["log_history"] if "reward" in log]
    assert {"rewards/gsm8k_accuracy/mean", "rewards/think_format/mean"} <= log.keys()
    assert 0.0 <= log["rewards/gsm8k_accuracy/mean"] <= 1.0
