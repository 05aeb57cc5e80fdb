"""Plugins are selected the same way in Python, in YAML and on the command line, and end up where they belong."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
from trl import GRPOConfig, GRPOTrainer, TrlParser

from tests.support import arguments, length_reward, prompts, scripted_rollout
from trl_grpo_ext import GRPOExtConfig, GRPOExtMixin, GRPOExtTrainer, load_rewards
from trl_grpo_ext.advantages.estimators import LeaveOneOut
from trl_grpo_ext.advantages.forward import EntropyShaping
from trl_grpo_ext.aggregation.means import ConstantLength
from trl_grpo_ext.errors import ConfigurationError

Selected = tuple[Any, Any, Any]  # rewards, advantage hooks, loss aggregation


def selected(args: GRPOExtConfig) -> Selected:
    return args.rewards, args.advantage_hooks, args.loss_aggregation


def parsed(folder: Path, *words: str, yaml: str | None = None) -> GRPOExtConfig:
    """What a script that uses TRL's parser gets from its command line."""
    line = ["--output_dir", str(folder / "out"), "--use_cpu", "True", "--bf16", "False", *words]
    if yaml is not None:
        (folder / "run.yaml").write_text(yaml)
        line += ["--config", str(folder / "run.yaml")]
    (args,) = TrlParser([GRPOExtConfig]).parse_args_and_config(line)
    return args  # type: ignore[no-any-return]


EVERYTHING: Selected = (
    ["gsm8k_accuracy", {"name": "think_format", "weight": 0.2}, "trl-grpo-ext:tag_format"],
    ["leave_one_out", {"name": "entropy_shaping", "alpha": 0.1, "kappa": 3.0}],
    {"name": "constant_length", "length": 8},
)

YAML = """
rewards: [gsm8k_accuracy, {name: think_format, weight: 0.2}, "trl-grpo-ext:tag_format"]
advantage_hooks:
  - leave_one_out
  - name: entropy_shaping
    alpha: 0.1
    kappa: 3.0
loss_aggregation: {name: constant_length, length: 8}
"""

COMMAND_LINE = [
    *["--rewards", "gsm8k_accuracy", "{name: think_format, weight: 0.2}", "trl-grpo-ext:tag_format"],
    *["--advantage_hooks", "leave_one_out", "{name: entropy_shaping, alpha: 1e-1, kappa: 3.0}"],
    *["--loss_aggregation", "{name: constant_length, length: 8}"],
]


def test_selection_in_python_yaml_and_command(tmp_path: Path) -> None:
    rewards, hooks, aggregation = EVERYTHING
    in_python = arguments(tmp_path, rewards=rewards, advantage_hooks=hooks, loss_aggregation=aggregation)
    assert selected(in_python) == EVERYTHING
    assert selected(parsed(tmp_path, yaml=YAML)) == EVERYTHING
    assert selected(parsed(tmp_path, *COMMAND_LINE)) == EVERYTHING


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


@pytest.mark.parametrize("word", ["none", "null", "None"])
def test_none_on_the_command_line_switches_off_what_yaml_selects(tmp_path: Path, word: str) -> None:
    off = ["--rewards", word, "--advantage_hooks", word, "--loss_aggregation", word]
    assert selected(parsed(tmp_path, *off, yaml=YAML)) == (None, None, None)


def test_resume_of_the_command_line_is_no_folder(tmp_path: Path) -> None:
    for word, expected in {"true": True, "False": None, "out/true": "out/true"}.items():
        assert parsed(tmp_path, "--resume_from_checkpoint", word).resume_from_checkpoint == expected
    assert parsed(tmp_path, yaml="resume_from_checkpoint: true").resume_from_checkpoint is True


def test_settings_of_compact_updates(tmp_path: Path) -> None:
    assert parsed(tmp_path, yaml="compact_updates: off").compact_updates == "off"  # which YAML reads as False
    with pytest.raises(ConfigurationError):
        arguments(tmp_path, share_prompts=True)


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
