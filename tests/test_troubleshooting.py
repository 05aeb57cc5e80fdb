"""Every setting, command, option, plugin, metric and outcome that docs/troubleshooting.md names exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
from trl import ModelConfig

from tests.public_api.surface import commands
from tests.test_metrics_reference import ALL
from trl_grpo_ext import GRPOExtConfig, errors
from trl_grpo_ext.guard.outcomes import Outcome
from trl_grpo_ext.plugins.loading import KINDS, find, parse_selection

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
NAMED = sorted({*re.findall(r"`([^`\n]+)`", PAGE)})
SYMPTOMS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)

FIELDS = {field.name for config in (GRPOExtConfig, ModelConfig) for field in dataclasses.fields(config)}
IN_SELECTIONS = {"weight", "skip_zero_variance", "guard", "target", "horizon"}
"""Keys of a selection's mapping. The last two are parameters of `kl_in_reward`."""
OF_RECIPES = {"engine", "processes", "detox_grpo.py"}
OTHERS = {
    *("scoring with ...", "train()", "trl_grpo_ext_log.jsonl", "TRL_GRPO_EXT_PLUGINS"),
    *("pkg.module:attribute", "distribution:name", "qlora+vllm", "dapo", "grpo", "SafeCheckpoints", "EngineCheck"),
    *("AssertionError", "CUDA out of memory", "accelerate launch --config_file", "py-spy dump"),
    *("pip install --editable", "python -m pip show NAME"),
    "UnknownPluginError: No installed distribution offers ...",
}
"""Other people's commands and messages, and what the tests below look up by hand."""


def plugin_exists(name: str) -> bool:
    for kind in KINDS:
        try:
            find(kind, parse_selection(kind, name))
        except (errors.PluginError, errors.ConfigurationError):
            continue
        return True
    return False


def problem(named: str) -> str | None:
    """What is wrong with something that the page names; None where it exists."""
    if named.startswith("trl-grpo-ext"):
        return command_problem(shlex.split(named)[1:])
    if setting := re.fullmatch(r"([a-z0-9_]+): (.+)", named):
        return None if setting[1] in FIELDS | IN_SELECTIONS else f"no setting {setting[1]}"
    known = FIELDS | IN_SELECTIONS | OF_RECIPES | OTHERS | {*ALL} | {outcome.value for outcome in Outcome}
    if named in known or hasattr(errors, named) or plugin_exists(named):
        return None
    return "neither a setting, a metric, an outcome, an error nor a plugin"


def command_problem(words: list[str]) -> str | None:
    if not words or words[0] not in commands():
        return f"no command {words[:1]}"
    options = {option for parameter in commands()[words[0]].params for option in parameter.opts}
    missing = [word for word in words[1:] if word.startswith("-") and word not in options]
    return f"no options {missing}" if missing else None


@pytest.mark.parametrize("named", NAMED)
def test_what_the_page_names_exists(named: str) -> None:
    assert problem(named) is None


def test_what_does_not_exist_is_found() -> None:
    wrong = ["trl-grpo-ext plot", "trl-grpo-ext doctor --gpus 2", "completion_length: 5", "maths_accuracy", "kl/mean"]
    assert [name for name in wrong if problem(name) is None] == []


def test_every_symptom_says_why_and_what_to_do() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    for section in sections:
        title = section.split("\n")[0]
        for part in ("**You see**", "**Why", "**How to check.**", "**What to do"):
            assert part in section, (title, part)
    asked = ["loss is 0", "reward doesn't move", "hangs in rewards", "OOM at the update", "metrics differ after resume"]
    asked += ["QLoRA with vLLM", "completions are all truncated", "KL explodes", "plugin isn't found"]
    assert {*asked, "loss differs from TRL's"} <= {*SYMPTOMS}


def test_the_metrics_page_points_at_symptoms_that_are_there() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in SYMPTOMS}
    pointed = re.findall(r"troubleshooting\.md#([a-z0-9-]+)", page)
    assert pointed
    assert {*pointed} <= anchors


def test_what_is_named_outside_of_settings_is_there_too() -> None:
    from trl_grpo_ext.advantages.policies import KLInReward
    from trl_grpo_ext.launch.doctor.rules import RULES
    from trl_grpo_ext.plugins.discovery import ENVIRONMENT_VARIABLE
    from trl_grpo_ext.trainer.live import LOG_FILE

    assert LOG_FILE == "trl_grpo_ext_log.jsonl"
    assert ENVIRONMENT_VARIABLE == "TRL_GRPO_EXT_PLUGINS"
    assert KLInReward(target=1.0, horizon=10.0) is not None
    assert "qlora+vllm" in {rule.subject for rule in RULES}
    assert GRPOExtConfig.__dataclass_fields__["loss_type"].default == "dapo"
    source = (ROOT / "recipes" / "gsm8k_grpo.py").read_text(encoding="utf-8")
    assert all(f"    {name}: " in source for name in ("engine", "processes"))
    assert "scoring with" in Path(sys.modules["trl_grpo_ext.trainer.live.bars"].__file__ or "").read_text(
        encoding="utf-8"
    )
