"""TRL's other trainers: what of ours works in each, by trying; the table in docs/pipelines.md is compared with it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from tests.support import Recorder, arguments, length_reward, prompts, scripted_rollout, train
from tests.trainer.pipelines.page import PAGE, Doubled, DoubledForward, Falling, FallingForward, mixed, theirs
from trl_grpo_ext import GRPOExtConfig, load_rewards
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


@pytest.fixture(scope="session")
def sums() -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{n} plus {n} is " for n in range(8)], "answer": [str(2 * n) for n in range(8)]}
    )


# ---------------------------------------------------------------------------------------------- which there are


def test_gmpo_is_the_only_trainer_of_trl_below_grpo() -> None:
    # A new one in a later release has to be tried, and gets a line in the table.
    found = {}
    for file in Path(trl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    below = {name for name, bases in found.items() if "GRPOTrainer" in bases}
    assert "GRPOTrainer" in found
    assert {name for name in below if not name.startswith("_")} - {"MiniLLMTrainer"} == {"GMPOTrainer"}


# ---------------------------------------------------------------------------------------------- the table


def try_below_grpo(base: type, plugin: dict[str, Any], model: Path, folder: Path) -> None:
    """One step of a trainer of GRPO's kind with one plugin."""
    chosen = dict(plugin)
    hooks = [chosen.pop("advantage_hooks")()] if "advantage_hooks" in chosen else None
    run = train(model, folder, mixed(base), max_steps=1, loss_type="grpo", hooks=hooks, **chosen)
    assert any(bool(gradient.any()) for gradient in run.gradients[0].values())


def try_beside_grpo(
    base: type, config: type, settings: dict[str, Any], plugin: dict[str, Any], model: Path, folder: Path, sums: Dataset
) -> None:
    """One step of a trainer that is no GRPOTrainer: rewards as plain functions, anything else mixed in."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    common: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 1, "use_cpu": True, "bf16": False}
    common |= {"report_to": "none", "save_strategy": "no", "learning_rate": 1e-3, "disable_tqdm": True}
    args = config(output_dir=str(folder), **common, **settings)
    if "rewards" not in plugin:
        mixed(base)(str(model), length_reward, args, sums, processing_class=tokenizer)
        raise AssertionError(f"{base.__name__} took {plugin}")
    functions, scores = load_rewards(plugin["rewards"]), list[float]()

    def watched(**columns: Any) -> Any:
        given = functions[0](**columns)
        scores.extend(given)
        return given

    trainer = base(model=str(model), reward_funcs=watched, args=args, train_dataset=sums, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 1
    assert scores
    assert {*scores} <= {0.0, 1.0}


Try = Callable[[dict[str, Any], Path, Path, Dataset], None]


def below(base: type) -> Try:
    return lambda plugin, model, folder, sums: try_below_grpo(base, plugin, model, folder)


def beside(base: type, config: type, **settings: Any) -> Try:
    return lambda plugin, model, folder, sums: try_beside_grpo(base, config, settings, plugin, model, folder, sums)


TRAINERS: dict[str, Try] = {
    "GRPOTrainer": below(GRPOTrainer),
    "GMPOTrainer": below(GMPOTrainer),
    "Decayed": below(theirs("Decayed")),
    "PerCompletion": below(theirs("PerCompletion")),
    "PerToken": below(theirs("PerToken")),
    "RLOOTrainer": beside(RLOOTrainer, RLOOConfig, num_generations=4, max_completion_length=8),
    "OnlineDPOTrainer": beside(OnlineDPOTrainer, OnlineDPOConfig, max_new_tokens=8, max_length=40),
    "SDPOTrainer": beside(SDPOTrainer, SDPOConfig, num_generations=4, max_completion_length=8),
    "A2POTrainer": beside(A2POTrainer, A2POConfig, max_completion_length=8, num_value_samples=2),
}


def table() -> dict[str, dict[str, str]]:
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("|")]
    (head,) = [line for line in lines if line[0] == "trainer"]
    rows = [line for line in lines if line[0].strip("`") in TRAINERS]
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_table_names_every_trainer_and_plugin() -> None:
    assert table().keys() == TRAINERS.keys()
    assert all(cells.keys() == PLUGINS.keys() for cells in table().values())


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_cell_of_the_table(tiny_model: Path, tmp_path: Path, sums: Dataset, trainer: str, plugin: str) -> None:
    attempt = functools.partial(TRAINERS[trainer], PLUGINS[plugin], tiny_model, tmp_path, sums)
    if table()[trainer][plugin] == "works":
        attempt()
    else:
        assert table()[trainer][plugin] == "refused"
        with pytest.raises(ConfigurationError, match=trainer):  # a refusal names the class
            attempt()


# ---------------------------------------------------------------------------------------------- GMPO by numbers


def gmpo(model: Path, folder: Path, *, ours: bool = True, **overrides: Any) -> Recorder:
    """A training with GMPO's own config where it is plain, and ours where it is mixed."""
    recorder, hooks = Recorder(), overrides.pop("advantage_hooks", None)
    settings = {"epsilon": 0.4, "max_steps": 1, **overrides}
    args = arguments(folder, GRPOExtConfig if ours else GMPOConfig, **settings)
    trainer_class = mixed(GMPOTrainer) if ours else GMPOTrainer
    more = {"advantage_hooks": hooks} if hooks else {}
    trainer_class(
        str(model),
        length_reward,
        args,
        train_dataset=prompts(),
        callbacks=[recorder],
        rollout_func=scripted_rollout,
        **more,
    ).train()
    return recorder


def test_gmpo_with_nothing_selected_is_gmpo_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
    plain = gmpo(tiny_model, tmp_path / "p", ours=False, max_steps=2, num_iterations=2, beta=0.04)
    ours = gmpo(tiny_model, tmp_path / "o", max_steps=2, num_iterations=2, beta=0.04)
    assert ours.logs == plain.logs
    for our_step, their_step in zip(ours.gradients, plain.gradients, strict=True):
        assert all(torch.equal(our_step[name], their_step[name]) for name in their_step)


def test_what_gmpo_cannot_do_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    why = "geometric mean of a completion's importance ratios, which is no sum over its tokens"
    missing = str(tmp_path / "no model here")
    for plugins in {"loss_aggregation": "token_mean"}, {"compact_updates": "exact"}:
        with pytest.raises(ConfigurationError, match=f"with the loss of GMPOTrainer: it takes the {why}"):
            mixed(GMPOTrainer)(missing, length_reward, arguments(tmp_path, **plugins), train_dataset=prompts())


# ---------------------------------------------------------------------------------------------- rewards in RLOO


def test_a_trainer_that_is_no_grpo_trainer_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"MineRLOOTrainer is not a subclass of TRL's GRPOTrainer.*Rewards work in any"
    ):
        mixed(RLOOTrainer)(str(tiny_model), length_reward, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
