"""The plugins of a trainer, from Python and its config: their order and weights, and what a base class may change."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.support import arguments, length_reward, prompts, relative_gap, scripted_rollout, train
from tests.trainer.support import EXACT, mixed
from trl_grpo_ext import GRPOExtMixin, GRPOExtTrainer, load_rewards
from trl_grpo_ext.advantages.estimators import LeaveOneOut
from trl_grpo_ext.advantages.forward import EntropyShaping
from trl_grpo_ext.aggregation.means import ConstantLength
from trl_grpo_ext.errors import ConfigurationError


def test_rewards_of_the_config_come_behind_those_of_python(tiny_model: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, rewards=["think_format"])
    for given, names in ((None, []), (length_reward, ["length_reward"]), ([length_reward], ["length_reward"])):
        trainer = GRPOExtTrainer(str(tiny_model), given, args, train_dataset=prompts())
        assert trainer.reward_func_names == [*names, "think_format"]


def test_a_plain_config_with_plugins_given_in_python(tiny_model: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, GRPOConfig, max_steps=1)
    rewards = [length_reward, *load_rewards(["think_format", "gsm8k_accuracy"])]
    plugins: dict[str, Any] = {"advantage_hooks": ["leave_one_out", EntropyShaping(alpha=0.2)]}
    plugins["loss_aggregation"] = {"name": "constant_length", "length": 8}
    data = {"train_dataset": prompts(), "rollout_func": scripted_rollout}
    trainer = GRPOExtTrainer(str(tiny_model), rewards, args, **data, **plugins)
    trainer.train()
    names = ("length_reward", "think_format", "gsm8k_accuracy")
    assert {f"rewards/{name}/mean" for name in names} <= trainer.state.log_history[0].keys()
    assert isinstance(trainer.loss_aggregation, ConstantLength)
    assert [type(hook) for hook in trainer.advantage_hooks] == [LeaveOneOut, EntropyShaping]


def test_the_weights_of_load_rewards_come_along(tiny_model: Path, tmp_path: Path) -> None:
    rewards = load_rewards(["gsm8k_accuracy", {"name": "think_format", "weight": 0.25}])
    trainer = GRPOExtTrainer(str(tiny_model), rewards, arguments(tmp_path), train_dataset=prompts())
    assert trainer.reward_weights.tolist() == [1.0, 0.25]
    trainer = GRPOExtTrainer(str(tiny_model), [length_reward, *rewards], arguments(tmp_path), train_dataset=prompts())
    assert trainer.reward_weights.tolist() == [1.0, 1.0, 0.25]
    stated = arguments(tmp_path, reward_weights=[2.0, 3.0])
    assert GRPOExtTrainer(str(tiny_model), rewards, stated, train_dataset=prompts()).reward_weights.tolist() == [2, 3]


def test_a_base_class_may_change_settings_but_no_selection(tiny_model: Path, tmp_path: Path) -> None:
    class Changing(GRPOTrainer):
        def __init__(self, *, args: Any, **keywords: Any) -> None:
            args = copy.copy(args)
            vars(args).update(self.changed)
            super().__init__(args=args, **keywords)

    class Trainer(GRPOExtMixin, Changing):
        changed: ClassVar[dict[str, Any]] = {"token_records": 2}

    given: Any = {"model": str(tiny_model), "reward_funcs": length_reward, "train_dataset": prompts()}
    trainer = Trainer(args=arguments(tmp_path), **given)
    assert trainer._trl_grpo_ext.plugins.settings.token_records == 2
    Trainer.changed = {"advantage_hooks": ["leave_one_out"]}
    with pytest.raises(ConfigurationError, match="leave_one_out"):
        Trainer(args=arguments(tmp_path), **given)


def test_a_weight_whose_function_was_replaced_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    class Replaces(GRPOTrainer):
        def __init__(self, model: Any, reward_funcs: Any, args: Any, **more: Any) -> None:
            super().__init__(model, [length_reward, lambda **columns: reward_funcs[0](**columns)], args, **more)

    rewards = load_rewards([{"name": "think_format", "weight": 0.25}, {"name": "tag_format", "weight": 0.5}])
    with pytest.raises(ConfigurationError):
        mixed(Replaces)(str(tiny_model), [length_reward, *rewards], arguments(tmp_path), train_dataset=prompts())
    with pytest.raises(ConfigurationError, match=r"0\.7"):
        mixed(Weighs)(str(tiny_model), rewards, arguments(tmp_path), train_dataset=prompts())


class Weighs(GRPOTrainer):
    """Weighs its rewards itself, each batch differently."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.reward_weights = torch.tensor([0.3, 0.7])

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.reward_weights = self.reward_weights.flip(0)
        return batch


@pytest.mark.slow
def test_weights_that_a_subclass_sets_are_its_own(tiny_model: Path, tmp_path: Path) -> None:
    def second(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(ids[0] % 3) for ids in completion_ids]

    settings: dict[str, Any] = {"reward_funcs": [length_reward, second], "max_steps": 2}
    theirs = train(tiny_model, tmp_path, Weighs, **settings)
    for selected in ({}, {"loss_aggregation": "token_mean"}):
        ours = train(tiny_model, tmp_path, mixed(Weighs), **settings, **selected)
        assert [log["reward"] for log in ours.logs[:2]] == [log["reward"] for log in theirs.logs[:2]]
        assert ours.trainer.reward_weights.tolist() == theirs.trainer.reward_weights.tolist()
        assert all(relative_gap(mine, its) < EXACT for mine, its in zip(ours.gradients, theirs.gradients, strict=True))
