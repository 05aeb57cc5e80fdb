"""No built-in without a test, a worked example, an entry in the docs that loads, and the manners of its kind."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docs.site import plugins_directory
from docs.site.worked import WITHOUT, all_worked
from tests.contexts import make_forward, make_rollout
from tests.tiny_classifier import save_tiny_classifier
from trl_grpo_ext import available, load_advantage_hooks, load_group_filter, load_loss_aggregation, load_rewards
from trl_grpo_ext.credit import flow
from trl_grpo_ext.guard.calls import check_scores
from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.plugins.loading import Kind, PluginInfo
from trl_grpo_ext.testing import check
from trl_grpo_ext.testing.kit import project_options
from trl_grpo_ext.types import StepTotals, implements

ROOT = Path(__file__).parent.parent
FOLDERS: dict[Kind, str] = {
    "reward": "rewards",
    "advantage_hook": "advantages",
    "loss_aggregation": "aggregation",
    "group_filter": "filters",
}
BUILT_IN = [info for info in available() if info.builtin]


def of_kind(kind: Kind) -> Any:
    infos = [info for info in BUILT_IN if info.kind == kind]
    return pytest.mark.parametrize("info", infos, ids=lambda info: info.name)


def documented_example(info: PluginInfo) -> Any:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    section = re.search(rf"^### `{info.name}`\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"docs/plugins.md has no entry '### `{info.name}`'"
    block = re.search(r"```yaml\n(.*?)```", section.group(1), re.DOTALL)
    assert block, f"the entry of {info.name} has no yaml example"
    selection = yaml.safe_load(block.group(1))
    for key in FACTS[info.kind].setting:
        selection = selection[key]
    return selection


COLUMNS: dict[str, Any] = {
    "answer": "#### 18",
    "solution": "18",
    "numbers": [3, 18, 1],
    "tests": ["assert add(1, 2) == 3"],
    "task": "math",
}
"""A row of every column that a built-in reward reads."""
OFTEN_SILENT = {"language", "classifier"}
"""Rewards that have nothing to say about short or empty texts."""


def columns_of(rows: int) -> dict[str, list[Any]]:
    return {name: [value] * rows for name, value in COLUMNS.items()}


@pytest.fixture(scope="module")
def classifier_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_tiny_classifier(tmp_path_factory.mktemp("classifier"), tiny_model)


def runnable_reward(info: PluginInfo, classifier_model: Path) -> Any:
    """The documented reward, with a model that is here in the place of one of the hub's."""
    (selection,) = documented_example(info)
    if info.name == "classifier":
        selection |= {"model": str(classifier_model), "label": 1}
    (reward,) = load_rewards([selection])
    return reward


def documented_plugin(info: PluginInfo) -> Any:
    selection = documented_example(info)
    if not FACTS[info.kind].several:
        return (load_loss_aggregation if info.kind == "loss_aggregation" else load_group_filter)(selection)
    (plugin,) = load_rewards(selection) if info.kind == "reward" else load_advantage_hooks(selection)
    return plugin


def test_there_are_built_ins_of_every_kind() -> None:
    assert {info.kind for info in BUILT_IN} == set(FOLDERS)


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
class TestEvery:
    def test_is_in_its_room_with_a_test_and_a_worked_example(self, info: PluginInfo) -> None:
        assert info.target.startswith(f"trl_grpo_ext.{FOLDERS[info.kind]}.")
        assert (info.kind, info.name) in {*all_worked(), *WITHOUT}, "docs/site/worked_*.py has no example of it"
        tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests" / FOLDERS[info.kind]).glob("test_*.py"))
        attribute = info.target.split(":")[1]
        named = re.search(rf"\b({info.name}|{attribute})\b", tests)
        assert named, f"no test in tests/{FOLDERS[info.kind]} names {info.name} or {attribute}"

    def test_the_documented_example_loads_and_pickles(self, info: PluginInfo) -> None:
        plugin = documented_plugin(info)
        assert plugin.__name__ == info.name  # the name of its metrics
        assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)

    def test_the_docstring_says_what_and_whence(self, info: PluginInfo) -> None:
        module, attribute = info.target.split(":")
        doc = inspect.getdoc(getattr(import_module(module), attribute)) or ""
        assert len(doc.splitlines()) > 3
        if info.kind != "reward":
            assert "Source:" in doc
            assert "Departures:" in doc


@of_kind("reward")
def test_a_reward_gives_one_number_per_completion_whatever_the_completion(
    info: PluginInfo, classifier_model: Path
) -> None:
    reward = runnable_reward(info, classifier_model)
    texts = ["", "18", "<think>a</think><answer>18</answer>", "\x00\ud800 ١٨ \u202e", "#### " + "9" * 5000]
    for completions in (texts, [[{"role": "assistant", "content": text}] for text in texts]):
        columns: dict[str, Any] = {"prompts": ["p"] * len(texts), **columns_of(len(texts))}
        returned = reward(completions=completions, completion_ids=[[1] * len(t) for t in texts], **columns)
        scores = check_scores(returned, len(texts), info.name)
        assert isinstance(returned, list)
        if info.name not in OFTEN_SILENT:
            assert all(isinstance(score, float) and math.isfinite(score) for score in scores)


@of_kind("reward")
def test_a_reward_does_not_depend_on_the_neighbours(info: PluginInfo, classifier_model: Path) -> None:
    reward = runnable_reward(info, classifier_model)
    texts = [r"The answer is \boxed{18}.", "nothing at all is to be seen here", "<think>x</think><answer>3</answer>"]

    def scored(batch: list[str]) -> list[float | None]:
        ids = [[1] * (len(text) * 25) for text in batch]
        scores = reward(prompts=batch, completions=batch, completion_ids=ids, **columns_of(len(batch)))
        # Padding to the neighbours changes the last digits of a model's scores.
        return [round(score, 5) if score and info.name == "classifier" else score for score in scores]

    together = scored(texts)
    assert scored(texts[::-1]) == together[::-1]
    assert [scored([text])[0] for text in texts] == together


@of_kind("advantage_hook")
def test_a_hook_keeps_shape_mask_rows_and_padding_apart(info: PluginInfo) -> None:
    hook = documented_plugin(info)
    lengths, rewards = [3, 1, 0, 2], [1.0, 0.0, 0.5, 2.0]
    order = [2, 0, 3, 1]

    def result(order: list[int], padding: int) -> torch.Tensor:
        torch.manual_seed(0)
        entropies = torch.rand(4, 6, dtype=torch.float64)[order, : 3 + padding]
        rollout = make_rollout(
            [lengths[i] for i in order],
            [rewards[i] for i in order],
            width=3 + padding,
            old_logps_B_T=-entropies,
            old_entropies_B_T=entropies,
            ref_logps_B_T=-2 * entropies,
        )
        advantages = torch.tensor([0.5, -0.5, 0.0, 1.0], dtype=torch.float64)[order]
        if implements(hook, "on_rollout"):
            advantages = flow.apply_rollout_hooks(advantages, [hook], rollout)
        if implements(hook, "on_forward"):
            forward = make_forward(-entropies, entropies, rollout.mask_B_T)
            advantages = flow.apply_forward_hooks(advantages, [hook], forward)
        assert advantages.shape == rollout.mask_B_T.shape
        assert not advantages[rollout.mask_B_T == 0].any()
        return advantages

    plain = result([0, 1, 2, 3], 0)
    assert plain.any()
    torch.testing.assert_close(result(order, 0), plain[order], rtol=0, atol=1e-12)
    torch.testing.assert_close(result([0, 1, 2, 3], 3)[:, :3], plain, rtol=0, atol=0)


@of_kind("loss_aggregation")
def test_an_aggregation_gives_masked_tokens_no_gradient(info: PluginInfo) -> None:
    aggregation = documented_plugin(info)
    rollout = make_rollout([3, 0, 1], width=4)
    rollout = replace(rollout, advantages_B_T=rollout.mask_B_T * torch.tensor([[1.0], [0.0], [-1.0]]))
    totals = replace(rollout.totals, step=StepTotals(tokens=4, sequences=3))
    loss_B_T = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    if implements(aggregation, "weights"):
        loss = (flow.token_weights(aggregation, rollout) * loss_B_T).sum()
    else:
        loss = flow.reduced_loss(aggregation, loss_B_T, rollout.mask_B_T, totals)
    (gradient,) = torch.autograd.grad(loss, loss_B_T)
    assert bool((gradient[rollout.mask_B_T == 0] == 0).all())
    live = gradient[rollout.mask_B_T > 0]
    assert bool((live > 0).all()) or (info.name == "tail_mean" and bool((live >= 0).all()) and bool(live.any()))


# ---------------------------------------------------------------------------------------------- the conformance kit

LEVELS = {
    (kind, name.strip("`")): level
    for tried in plugins_directory.read(plugins_directory.PAGE.read_text(encoding="utf-8"))
    if tried.known["name"] == "trl-grpo-ext"
    for name, kind, level, _ in tried.plugins
}
"""What `docs/plugins-directory.md` says, by label and name."""


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_it_keeps_every_rule_as_the_command_checks_it_and_has_its_level_in_the_directory(
    info: PluginInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # as the command does, whose options are in pyproject.toml there
    report = check(info.kind, f"trl-grpo-ext:{info.name}", **project_options(ROOT).get(info.name, {}))
    assert report.ok, str(report)
    assert not report.no_effect, str(report)
    assert report.level == LEVELS[FACTS[info.kind].label, info.name], str(report)
    compares = "reward.outcomes" in {rule.name for rule in report.passed}
    assert compares == (info.name in {"gsm8k_accuracy", "math_accuracy", "reasoning_accuracy"})


@of_kind("advantage_hook")
def test_a_hook_that_says_so_looks_at_each_group_by_itself(info: PluginInfo) -> None:
    hook = documented_plugin(info)
    if not getattr(hook, "per_group", False):
        return
    lengths, rewards, groups = [3, 1, 2, 2, 3, 1], [1.0, 0.0, 0.5, 2.0, 0.3, 0.9], [0, 0, 0, 1, 1, 1]

    def result(rows: list[int]) -> torch.Tensor:
        torch.manual_seed(0)
        entropies = torch.rand(6, 6, dtype=torch.float64)[rows, :3]
        rollout = make_rollout(
            [lengths[i] for i in rows],
            [rewards[i] for i in rows],
            [groups[i] for i in rows],
            width=3,
            old_logps_B_T=-entropies,
            old_entropies_B_T=entropies,
            ref_logps_B_T=-2 * entropies,
        )
        advantages = torch.tensor([0.5, -0.5, 0.0, 1.0, -0.2, -0.8], dtype=torch.float64)[rows]
        return flow.apply_rollout_hooks(advantages, [hook], rollout)

    together = result([*range(6)])
    apart = torch.cat([result([0, 1, 2]), result([3, 4, 5])])
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-12)


def test_hooks_of_the_whole_batch_do_not_say_so() -> None:
    for selection in ("batch_whitening", "whiten", {"name": "kl_in_reward", "target": 0.1}):
        (hook,) = load_advantage_hooks([selection])
        assert not getattr(hook, "per_group", False)


def test_what_a_selection_adds_to_a_plugin_keeps_the_rules() -> None:
    selections: list[tuple[Kind, dict[str, Any]]] = [
        ("advantage_hook", {"name": "entropy_shaping", "preserve_sign": True, "preserve_sum": True}),
        ("loss_aggregation", {"name": "token_mean", "skip_zero_variance": True}),
        ("reward", {"name": "think_format", "guard": {"timeout": 5}}),
    ]
    for kind, selection in selections:
        report = check(kind, selection)
        assert report.ok, str(report)
