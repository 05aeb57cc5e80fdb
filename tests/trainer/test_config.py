"""The settings: selected alike in Python, in YAML and on the command line, and refused where nothing reads them."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer, RLOOTrainer, TrlParser

from tests.support import arguments
from tests.trainer.test_stock_trl import Subclass, construct
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.errors import ConfigurationError, TRLGRPOExtError


@dataclasses.dataclass
class MoreSettings(GRPOExtConfig):
    mine: int = 0


IGNORED: dict[str, Any] = {
    "rewards": ["think_format"],
    "loss_aggregation": "prompt_mean",
    "resample": "signal",
    "compact_updates": "exact",
    "token_records": 4,
}


@pytest.mark.parametrize("setting", IGNORED)
def test_config_in_a_plain_trainer_stops(tiny_model: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        construct(GRPOTrainer, tiny_model, arguments(tmp_path, **{setting: IGNORED[setting]}))


@pytest.mark.slow
def test_config_however_it_came_stops(tiny_model: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, compact_updates="exact")
    construct(GRPOExtTrainer, tiny_model, args)  # after which it may not go on into another trainer either
    construct(GRPOTrainer, tiny_model, arguments(tmp_path, rewards=None, compact_updates=False)).evaluate()
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--compact_updates", "exact"]
    (parsed,) = TrlParser([GRPOExtConfig]).parse_args_and_config(words)
    copies = [args, pickle.loads(pickle.dumps(args)), dataclasses.replace(args, generation_batch_size=None), parsed]
    copies.append(arguments(tmp_path, MoreSettings, compact_updates="exact"))
    for trainer_class in (GRPOTrainer, Subclass):
        for copy in copies:
            with pytest.raises(ConfigurationError, match=f"{trainer_class.__name__} .*compact_updates='exact'"):
                construct(trainer_class, tiny_model, copy)
    with pytest.raises((ConfigurationError, AttributeError)):
        construct(RLOOTrainer, tiny_model, args)


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


def test_resample_that_cannot_be_read(tmp_path: Path) -> None:
    for wrong in ({"filter": "signal", "rounds": 3}, {"filter": "signal", "max_rounds": 0}, {"filter": "sgnal"}):
        with pytest.raises(TRLGRPOExtError):
            arguments(tmp_path, resample=wrong)


REFUSED: dict[str, dict[str, Any]] = {
    "8 completions": {"pass_at_k": [1, 8]},
    "got 0": {"pass_at_k": [0]},
    "got 'high'": {"pass_at_k": [1], "pass_thresholds": {"a": "high"}},
    "without pass_at_k": {"pass_thresholds": {"a": 1.0}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_pass_at_k_that_cannot_be_is_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        arguments(tmp_path, **REFUSED[said])
