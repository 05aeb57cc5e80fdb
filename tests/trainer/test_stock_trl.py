"""The rewards alone work in TRL's own trainers; weights that these would ignore are refused."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.support import length_reward
from trl_grpo_ext import GRPOExtTrainer, load_rewards
from trl_grpo_ext.errors import ConfigurationError

SELECTIONS: list[Any] = [
    "gsm8k_accuracy",
    {"name": "think_format", "weight": 0.2},
    {"name": "soft_overlong", "max_completion_length": 8, "cache": 4, "weight": 0.5},
]
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
SETTINGS |= {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none"}
SETTINGS |= {"save_strategy": "no"}


def sums() -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{n} plus {n} is " for n in range(8)], "answer": [f"#### {2 * n}" for n in range(8)]}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("trainer_class", "config_class"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_rewards_in_trls_trainers(tiny_model: Path, tmp_path: Path, trainer_class: type, config_class: type) -> None:
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


class Subclass(GRPOTrainer):
    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)


def construct(trainer_class: type, model: Path, args: Any, rewards: Any = length_reward) -> Any:
    return trainer_class(model=str(model), reward_funcs=rewards, args=args, train_dataset=sums(), eval_dataset=sums())


@pytest.mark.slow
def test_weights_that_a_trainer_ignores_stop(tiny_model: Path, tmp_path: Path) -> None:
    rewards = load_rewards(SELECTIONS)
    plain = GRPOConfig(output_dir=str(tmp_path), **SETTINGS)
    rloo = RLOOConfig(output_dir=str(tmp_path), **SETTINGS)
    for trainer_class, config in ((GRPOTrainer, plain), (Subclass, plain), (RLOOTrainer, rloo)):
        with pytest.raises(ConfigurationError, match=f"{trainer_class.__name__} .*reward_weights"):
            construct(trainer_class, tiny_model, config, rewards)
    own = GRPOConfig(output_dir=str(tmp_path), reward_weights=[1.0, 1.0, 1.0], **SETTINGS)
    assert construct(GRPOTrainer, tiny_model, own, rewards).reward_weights.tolist() == [1.0, 1.0, 1.0]
    assert construct(GRPOTrainer, tiny_model, plain, load_rewards(["think_format"])).reward_weights.tolist() == [1.0]
    ours = construct(GRPOExtTrainer, tiny_model, plain, rewards)
    assert ours.reward_weights.tolist() == pytest.approx([1.0, 0.2, 0.5])
    assert pickle.loads(pickle.dumps(rewards)).weights == rewards.weights  # TRL's asynchronous trainer sends them on


def test_weights_of_trls_asynchronous_trainer_stop() -> None:
    loop = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")._AsyncRolloutLoop
    rest = [name for name, one in inspect.signature(loop).parameters.items() if one.default is one.empty]
    given = {**dict.fromkeys(rest), "dataset": []}
    with pytest.raises(ConfigurationError, match=r"reward_weights.*weighted"):
        loop(**{**given, "reward_funcs": load_rewards(SELECTIONS)})
    with pytest.raises(AttributeError):  # it goes on until it misses the tokenizer
        loop(**{**given, "reward_funcs": load_rewards([{"name": "weighted", "rewards": SELECTIONS[:2]}])})
