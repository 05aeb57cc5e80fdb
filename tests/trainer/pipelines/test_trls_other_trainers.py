"""TRL's other trainers: what of ours works in each, by trying; the table in docs/pipelines.md is compared with it."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoTokenizer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from tests.support import length_reward, prompts, train
from tests.trainer.support import PAGE, Doubled, DoubledForward, Falling, FallingForward, mixed, theirs
from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import ConfigurationError

PLUGINS: dict[str, dict[str, Any]] = {
    "rewards": {"rewards": [{"name": "regex_match", "pattern": "[a-m]"}]},
    "rollout hooks, one number per completion": {"advantage_hooks": Doubled},
    "rollout hooks, token by token": {"advantage_hooks": Falling},
    "forward hooks, one number per completion": {"advantage_hooks": DoubledForward},
    "forward hooks, token by token": {"advantage_hooks": FallingForward},
    "aggregation": {"loss_aggregation": "token_mean"},
    "compact updates": {"compact_updates": "exact"},
}


def test_gmpo_is_the_only_trainer_of_trl_below_grpo() -> None:
    # A new one in a later release has to be tried, and gets a line in the table.
    sources = [file.read_text(encoding="utf-8") for file in Path(trl.__file__).parent.rglob("*.py")]
    below = {name for text in sources for name in re.findall(r"^class ([A-Z]\w*)\([^)]*\bGRPOTrainer\b", text, re.M)}
    assert below - {"MiniLLMTrainer"} == {"GMPOTrainer"}


TRAINERS: dict[str, tuple[type, Any, dict[str, Any]]] = {
    **{base.__name__: (base, None, {}) for base in (GRPOTrainer, GMPOTrainer)},
    **{name: (theirs(name), None, {}) for name in ("Decayed", "PerCompletion", "PerToken")},
    "RLOOTrainer": (RLOOTrainer, RLOOConfig, {"num_generations": 4, "max_completion_length": 8}),
    "OnlineDPOTrainer": (OnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": 8, "max_length": 40}),
    "SDPOTrainer": (SDPOTrainer, SDPOConfig, {"num_generations": 4, "max_completion_length": 8}),
    "A2POTrainer": (A2POTrainer, A2POConfig, {"max_completion_length": 8, "num_value_samples": 2}),
}
"""A trainer that is no GRPOTrainer has a config of its own, with settings."""


def try_below_grpo(base: type, plugin: dict[str, Any], model: Path, folder: Path) -> None:
    """One step of a trainer of GRPO's kind with one plugin."""
    chosen = dict(plugin)
    hooks = [chosen.pop("advantage_hooks")()] if "advantage_hooks" in chosen else None
    run = train(model, folder, mixed(base), max_steps=1, loss_type="grpo", hooks=hooks, **chosen)
    assert any(bool(gradient.any()) for gradient in run.gradients[0].values())


def try_beside_grpo(base: type, args: Any, plugin: dict[str, Any], model: Path) -> None:
    """One step of a trainer that is no GRPOTrainer: rewards as plain functions, anything else mixed in."""
    data: dict[str, Any] = {"train_dataset": prompts(8), "processing_class": AutoTokenizer.from_pretrained(model)}
    if "rewards" not in plugin:
        mixed(base)(str(model), length_reward, args, **data)
        raise AssertionError(f"{base.__name__} took {plugin}")
    functions, scores = load_rewards(plugin["rewards"]), list[float]()

    def watched(**columns: Any) -> Any:
        given = functions[0](**columns)
        scores.extend(given)
        return given

    trainer = base(model=str(model), reward_funcs=watched, args=args, **data)
    trainer.train()
    assert trainer.state.global_step == 1
    assert scores
    assert {*scores} <= {0.0, 1.0}


def table() -> dict[str, dict[str, str]]:
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("|")]
    (head,) = [line for line in lines if line[0] == "trainer"]
    rows = [(re.findall(r"`(\w+)`", line[0]), line[1:]) for line in lines]
    return {
        name: dict(zip(head[1:], cells, strict=True)) for names, cells in rows for name in names if name in TRAINERS
    }


def test_the_table_names_every_trainer_and_plugin() -> None:
    assert table().keys() == TRAINERS.keys()
    assert all(cells.keys() == PLUGINS.keys() for cells in table().values())


CELLS = [(trainer, plugin) for trainer in TRAINERS for plugin in PLUGINS]
QUICK = {("RLOOTrainer", "rewards"), ("PerCompletion", "rollout hooks, token by token")}


@pytest.mark.parametrize(
    ("trainer", "plugin"), [pytest.param(*cell, marks=[pytest.mark.nightly] * (cell not in QUICK)) for cell in CELLS]
)
def test_a_cell_of_the_table(tiny_model: Path, tmp_path: Path, trainer: str, plugin: str) -> None:
    base, config, settings = TRAINERS[trainer]
    common: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 1, "use_cpu": True, "bf16": False}
    common |= {"report_to": "none", "save_strategy": "no", "learning_rate": 1e-3}
    works = table()[trainer][plugin] == "works"
    assert works or table()[trainer][plugin] == "refused"
    refused = pytest.raises(ConfigurationError, match=trainer)  # a refusal names the class
    with contextlib.nullcontext() if works else refused:
        if config is None:
            try_below_grpo(base, PLUGINS[plugin], tiny_model, tmp_path)
        else:
            args = config(output_dir=str(tmp_path), **common, **settings)
            try_beside_grpo(base, args, PLUGINS[plugin], tiny_model)


@pytest.mark.slow
def test_gmpo_with_nothing_selected_is_gmpo_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epsilon": 0.4, "num_iterations": 2, "beta": 0.04}
    plain = train(tiny_model, tmp_path / "plain", GMPOTrainer, config_class=GMPOConfig, **settings)
    ours = train(tiny_model, tmp_path / "ours", mixed(GMPOTrainer), **settings)
    assert ours.logs == plain.logs
    for our_step, their_step in zip(ours.gradients, plain.gradients, strict=True):
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)
