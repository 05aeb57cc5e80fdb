"""Discovery and loading against distributions that pip really installed, probed in interpreters of their own."""

from pathlib import Path
from typing import Any

import pytest

from tests.plugins_env import BROKEN, Environment, plugin_environment, plugin_wheels

pytestmark = pytest.mark.slow

__all__ = ["plugin_environment", "plugin_wheels"]  # fixtures

GOOD = {
    "target_length": "reward",
    "has_digit": "reward",
    "count_word": "reward",
    "scale": "advantage_hook",
    "first_token": "loss_aggregation",
}
BROKEN_ONES: dict[str, tuple[str, list[str]]] = {
    "raises": (
        "RuntimeError: boom at import",
        ["tge-raises 0.1.0", "'tge_raises.boom:reward'", "trl_grpo_ext.rewards"],
    ),
    "needs_missing": ("ModuleNotFoundError: No module named 'tge_no_such_dependency'", ["tge-raises 0.1.0"]),
    "exits": ("SystemExit: tge-exits has had enough", ["tge-exits 0.1.0", "must export a function"]),
    "no_attribute": (
        "AttributeError: module 'tge_no_attribute' has no attribute 'lenght'",
        ["tge-no-attribute 0.1.0", "has no attribute 'lenght'. Did you mean 'length'?"],
    ),
}
"""By name of the reward: the cause of the error, and what its message says beside it."""


@pytest.fixture(scope="module")
def seen(plugin_environment: Environment) -> dict[str, Any]:
    """What one interpreter saw: first what imports nothing, then the good ones, then those that cannot be had."""
    answer: dict[str, Any] = plugin_environment.probe(
        f"""
import pickle
answer = {{"infos": [vars(info) for info in plugins.available()]}}
names = ["slow", "raises", "exits", "tge-good:has_digit", "tge_good.rewards:has_digit", "tge_slow:reward"]
answer["found"] = [plugins.find("reward", name).source for name in names]
answer["alias"] = plugins.find("loss_aggregation", "first").name
answer["alias of nothing"] = attempt(plugins.find, "loss_aggregation", "of_nothing")
answer["imported by finding"] = imported()
rewards = plugins.load_rewards(
    ["has_digit", {{"name": "target_length", "target": 3, "weight": 0.5}}, "{{name: tge-good:count_word, word: a}}"]
)
rewards = pickle.loads(pickle.dumps(rewards))
[hook] = plugins.load_advantage_hooks({{"name": "scale", "factor": 3.0}})
answer["good"] = {{
    "rewards": [reward(prompts=["", ""], completions=["a 1", "abcde"], completion_ids=[[], []]) for reward in rewards],
    "weights": rewards.weights,
    "names": rewards.names,
    "hook": hook.on_rollout(2.0, None),
    "aggregation": type(plugins.load_loss_aggregation("first_token")).__name__,
    "by alias": type(plugins.load_loss_aggregation("tge-good:first")).__name__,
}}
answer["imported by loading"] = imported()
answer["broken"] = [attempt(plugins.resolve, "reward", name) for name in {[*BROKEN_ONES]}]
answer["twins"] = [
    attempt(plugins.resolve, "reward", "twin"),
    plugins.load_rewards("tge-twin-a:twin")[0](completions=[""]),
    plugins.load_rewards("TGE_Twin.B:twin")[0](completions=[""]),
]
"""
    )
    return answer


def test_available_shows_provenance_without_imports(seen: dict[str, Any]) -> None:
    infos = seen["infos"]
    assert {i["name"]: i["kind"] for i in infos if i["distribution"] == "tge-good"} == GOOD
    assert {"tge-slow", "tge-twin-a", "tge-twin-b", "trl-grpo-ext", *BROKEN} <= {i["distribution"] for i in infos}
    assert {i["distribution"] for i in infos if i["builtin"]} == {"trl-grpo-ext"}
    [scale] = [i for i in infos if i["name"] == "scale"]
    assert (scale["version"], scale["target"], scale["builtin"]) == ("0.1.0", "tge_good.hooks:Scale", False)
    assert next(i for i in infos if i["name"] == "first_token")["aliases"] == ["first"]
    sources = ["tge-slow", "tge-raises", "tge-exits", "tge-good", "tge-good", "tge-slow"]
    assert seen["found"] == [f"{name} 0.1.0" for name in sources]
    assert seen["alias"] == "first_token"
    assert "'of_nothing'" in seen["alias of nothing"]["message"]
    assert seen["imported by finding"] == []


def test_the_good_ones_load_beside_the_broken_ones(seen: dict[str, Any]) -> None:
    assert seen["good"] == {
        "rewards": [[1.0, 0.0], [0.0, -2.0], [1.0, 0.0]],
        "weights": [1.0, 0.5, 1.0],
        "names": ["has_digit", "target_length", "count_word"],
        "hook": 6.0,
        "aggregation": "FirstToken",
        "by alias": "FirstToken",
    }
    assert seen["imported by loading"] == ["tge_good", "tge_good.aggregations", "tge_good.hooks", "tge_good.rewards"]


def test_loading_a_broken_plugin_tells_all(seen: dict[str, Any]) -> None:
    for (name, (cause, says)), answer in zip(BROKEN_ONES.items(), seen["broken"], strict=True):
        assert answer["type"] == "BrokenPluginError", name
        assert f"{answer['cause']}: {answer['cause_message']}" == cause, name
        assert all(text in answer["message"] for text in says), name
        assert name == "no_attribute" or cause in answer["message"], name


def test_two_distributions_with_one_name(seen: dict[str, Any]) -> None:
    bare, *named = seen["twins"]
    assert bare["type"] == "AmbiguousPluginError"
    for text in ("tge-twin-a 1.0", "tge-twin-b 2.5", "tge-twin-a:twin or tge-twin-b:twin"):
        assert text in bare["message"]
    assert named == [[1.0], [2.0]]


def test_variable_none_leaves_only_the_built_ins(plugin_environment: Environment) -> None:
    answer = plugin_environment.probe(
        """
answer = {
    "name": attempt(plugins.resolve, "reward", "has_digit"),
    "dotted": attempt(plugins.resolve, "reward", "tge_good.rewards:has_digit"),
    "listed": len(plugins.available("advantage_hook")),
    "allowed": sorted({info.distribution for info in plugins.available() if plugins.is_allowed(info)}),
    "imported": imported(),
}
""",
        TRL_GRPO_EXT_PLUGINS="none",
    )
    for way in ("name", "dotted"):
        assert answer[way]["type"] == "PluginBlockedError"
        assert "tge-good" in answer[way]["message"]
    assert answer["listed"] >= 3
    assert answer["allowed"] == ["trl-grpo-ext"]
    assert answer["imported"] == []


def test_variable_lists_distributions_however_they_are_spelt(plugin_environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "my_own.py").write_text(
        "def length(completions, **columns):\n    return [float(len(completions[0]))]\n"
    )
    answer = plugin_environment.probe(
        """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    answer = {
        "good": plugins.load_rewards(["has_digit", "tge_good.rewards:count_word"]).names,
        "twin": plugins.load_rewards("twin")[0](completions=[""]),
        "slow": attempt(plugins.resolve, "reward", "slow"),
        "own": plugins.load_rewards("my_own:length")[0](completions=["abc"]),
    }
answer |= {"warnings": [str(item.message) for item in caught], "imported": imported()}
""",
        path=(tmp_path,),
        TRL_GRPO_EXT_PLUGINS="Tge_Good, tge.twin.a,tge-absent",
    )
    assert answer["good"] == ["has_digit", "count_word"]
    assert answer["twin"] == [1.0], "a blocked twin does not make the name ambiguous"
    assert answer["slow"]["type"] == "PluginBlockedError"
    assert answer["own"] == [3.0], "a file of the user's own belongs to no distribution"
    assert {"'tge-absent'" in warning for warning in answer["warnings"]} == {True}
    assert answer["imported"] == ["tge_good", "tge_good.rewards", "tge_twin_a"]
