"""No built-in without a test, a worked example, an entry in the docs that loads, and the rules of its kind kept."""

import inspect
import pickle
import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docs.site.catalogue import documented_yaml
from docs.site.worked import WITHOUT, all_worked
from tests.contexts import make_rollout
from tests.judge_server import judge_server
from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.plugins.loading import Kind, PluginInfo, resolve
from trl_grpo_ext.testing import check
from trl_grpo_ext.types import HookDeclaration

ROOT = Path(__file__).parent.parent
FOLDERS: dict[Kind, str] = {
    "reward": "rewards",
    "advantage_hook": "advantages",
    "loss_aggregation": "aggregation",
    "group_filter": "filters",
    "prompt_sampler": "prompt_samplers",
    "token_loss": "token_losses",
}
BUILT_IN = [info for info in available() if info.builtin]
WORKED = {*all_worked(), *WITHOUT}
TESTS = {
    kind: "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / folder).glob("test_*.py"))
    for kind, folder in FOLDERS.items()
}
COMPARE = {"gsm8k_accuracy", "math_accuracy", "json_fields", "lines"}
"""Rewards that compare with a reference."""
CLASSIFIER = {"model": str(ROOT / "recipes" / "embedded" / "detox" / "classifier"), "label": "rude"}
OPTIONS: dict[str, Any] = {"classifier": CLASSIFIER, "process_rewards": {"reward": "right"}}
"""What a plugin cannot declare itself: where a model is, and which of two rewards with parts is meant."""


def documented_example(info: PluginInfo) -> Any:
    """The selection in a plugin's entry in the docs."""
    selection = yaml.safe_load(documented_yaml(info))
    for key in FACTS[info.kind].setting:
        selection = selection[key]
    return selection


def documented_plugin(info: PluginInfo) -> Any:
    selection = documented_example(info)
    if FACTS[info.kind].several:
        (selection,) = selection
    return resolve(info.kind, selection).object


def test_there_are_built_ins_of_every_kind() -> None:
    assert {info.kind for info in BUILT_IN} == set(FOLDERS)


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_plugin_is_tested_and_documented(info: PluginInfo) -> None:
    module, attribute = info.target.split(":")
    assert module.startswith(f"trl_grpo_ext.{FOLDERS[info.kind]}.")
    assert (info.kind, info.name) in WORKED, "docs/site/worked_*.py has no example of it"
    named = re.search(rf"\b({info.name}|{attribute})\b", TESTS[info.kind])
    assert named, f"no test in tests/{FOLDERS[info.kind]} names {info.name} or {attribute}"
    doc = inspect.getdoc(getattr(import_module(module), attribute)) or ""
    assert len(doc.splitlines()) > 3
    assert info.kind == "reward" or "Source:" in doc
    plugin = documented_plugin(info)
    assert plugin.__name__ == info.name  # the name of its metrics
    assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)


@pytest.mark.slow
@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_it_keeps_every_rule_as_the_command_checks_it(info: PluginInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server() if info.name == "judge" else nullcontext() as server:
        if server is not None:
            monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        report = check(info.kind, f"trl-grpo-ext:{info.name}", parameters=OPTIONS.get(info.name))
    assert report.ok, str(report)
    assert not report.no_effect, str(report)
    assert ("reward.outcomes" in {rule.name for rule in report.passed}) == (info.name in COMPARE)


def test_hooks_that_say_so_look_at_each_group_by_itself() -> None:
    entropies_B_T = torch.rand(6, 3, dtype=torch.float64)
    advantages_B = torch.tensor([0.5, -0.5, 0.0, 1.0, -0.2, -0.8], dtype=torch.float64)
    columns = ([3, 1, 2, 2, 3, 1], [1.0, 0.0, 0.5, 2.0, 0.3, 0.9], [0, 0, 0, 1, 1, 1])  # lengths, rewards, groups

    def result(hook: Any, rows: slice) -> torch.Tensor:
        entropies = entropies_B_T[rows]
        logps: dict[str, Any] = {"old_logps_B_T": -entropies, "ref_logps_B_T": -2 * entropies}
        logps["sampling_logps_B_T"] = -entropies - 0.001 * torch.arange(3)
        logps["teacher_logps_B_T"] = {"policy given teacher_prompt": -2 * entropies}
        picked = (values[rows] for values in columns)
        rollout = make_rollout(*picked, width=3, old_entropies_B_T=entropies, **logps)
        return flow.apply_hooks(advantages_B[rows], [hook], rollout)

    hooks = [documented_plugin(info) for info in BUILT_IN if info.kind == "advantage_hook"]
    independent = [hook for hook in hooks if HookDeclaration.of(hook).independent]
    for hook in independent:
        apart = torch.cat([result(hook, slice(3)), result(hook, slice(3, 6))])
        torch.testing.assert_close(apart, result(hook, slice(6)), rtol=0, atol=1e-12)
    assert len(independent) > 5
    assert not {"batch_whitening", "whiten"} & {hook.__name__ for hook in independent}
    (adaptive,) = load_advantage_hooks([{"name": "kl_in_reward", "target": 0.1}])
    assert not adaptive.declares.independent
