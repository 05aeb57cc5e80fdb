"""Rewards selected inside a reward's parameters, and the `guard` of a selection."""

import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from trl_grpo_ext.errors import ConfigurationError, PluginParameterError, PluginTypeError, UnknownPluginError
from trl_grpo_ext.plugins.loading import RewardList, Selection, load_advantage_hooks, load_rewards, parse_selection

SOURCE = """
from trl_grpo_ext.types import RewardDeclaration

class Keeps:
    declares = RewardDeclaration(takes=("inner", "other"))

    def __init__(self, inner=None, other=None, note=None):
        self.inner, self.other, self.note = inner, other, note

    def __call__(self, completions, **columns):
        return [0.0] * len(completions)


def length(completions, scale=1.0, **columns):
    return [scale * len(text) for text in completions]


def fails(completions, **columns):
    raise RuntimeError("no, thank you")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_combinators.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_combinators  # type: ignore[import-not-found]

    yield own_combinators
    del sys.modules["own_combinators"]


def keeps(**parameters: Any) -> Any:
    [reward] = load_rewards({"name": "own_combinators:Keeps", **parameters})
    return reward


def test_one_selection_becomes_the_reward(own: ModuleType) -> None:
    for selection in ("own_combinators:length", "{name: own_combinators:length}", {"name": "own_combinators:length"}):
        assert keeps(inner=selection).inner is own.length
    assert keeps(inner={"name": "own_combinators:length", "scale": 3.0}).inner(completions=["ab"]) == [6.0]


def test_a_list_becomes_a_reward_list_with_the_weights(own: ModuleType) -> None:
    inner = keeps(inner=["own_combinators:length", {"name": "think_format", "weight": 0.5}] * 2).inner
    assert isinstance(inner, RewardList)
    assert inner.weights == [1.0, 0.5] * 2
    assert inner.names == ["length", "think_format", "length_2", "think_format_2"]


def test_what_else_a_parameter_may_select(own: ModuleType) -> None:
    assert keeps(inner={"math": own.length, 2: "own_combinators:length"}).inner == {"math": own.length, 2: own.length}
    assert keeps(inner=own.length, other=None).inner is own.length
    assert keeps(inner=RewardList([own.length], [0.25])).inner.weights == [0.25]
    assert keeps(inner=None).inner is None
    assert keeps(note=["think_format"]).note == ["think_format"]


def test_it_works_at_any_depth_and_pickles(own: ModuleType) -> None:
    inner: Any = "own_combinators:length"
    for _ in range(5):
        inner = {"name": "own_combinators:Keeps", "inner": [inner]}
    reward = load_rewards(inner)[0]
    for _ in range(5):
        [reward] = pickle.loads(pickle.dumps(reward)).inner
    assert reward is own.length


@pytest.mark.parametrize(
    ("inner", "error", "says"),
    [
        (["think_format", "think_fromat"], UnknownPluginError, ", in inner[1]: "),
        ({"a": {"name": "soft_overlong"}}, PluginParameterError, ", in inner['a']: "),
        (3, PluginTypeError, ", in inner: "),
        ({"name": "think_format", "weight": 2.0}, ConfigurationError, "the weight 2.0 of 'think_format'"),
    ],
)
def test_nested_errors_name_plugin_and_parameter(
    own: ModuleType, inner: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)) as caught:
        keeps(inner=inner)
    assert "Keeps" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_refused_parameter_ends_in_one_full_stop() -> None:
    with pytest.raises(PluginParameterError, match=r"must be.*[^.]\.$"):
        load_advantage_hooks([{"name": "entropy_shaping", "alpha": 0.0}])


def test_a_typo_outside_comes_before_what_is_inside(own: ModuleType) -> None:
    with pytest.raises(PluginParameterError, match="'iner'"):
        keeps(iner="x", inner="nothing_like_it")


def test_plain_reads_as_the_same_selection_and_is_plain() -> None:
    inner = [{"name": "b", "weight": 0.5}, Selection("c", guard={"timeout": 2}), {"x": Selection("d", "e", {"y": 1})}]
    plain = parse_selection("reward", {"name": "w", "rewards": inner, "weight": -2.0}).plain()
    assert parse_selection("reward", plain).plain() == plain
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain


def test_every_way_to_write_a_guard() -> None:
    built = Selection("a", parameters={"x": 1}, guard={"timeout": 5, "on_error": None})
    for value in (built.plain(), "{name: a, guard: {timeout: 5, on_error: null}, x: 1}", built):
        assert parse_selection("reward", value) == built


def test_guard_of_a_selection(own: ModuleType) -> None:
    from trl.trainer.utils import get_callable_name

    selection: Mapping[str, Any] = {"name": "own_combinators:fails", "guard": {"on_error": -1.0}}
    rewards = load_rewards([selection, "own_combinators:fails", "{name: think_format, weight: 0.5, guard: {}}"])
    assert rewards.names == ["fails", "fails_2", "think_format"]
    assert rewards.weights == [1.0, 1.0, 0.5]
    assert [get_callable_name(reward) for reward in rewards] == ["fails", "fails", "think_format"]
    assert rewards[0](prompts=["?"], completions=["x"], completion_ids=[[1]]) == [-1.0]
    with pytest.raises(RuntimeError):
        rewards[1](prompts=["?"], completions=["x"], completion_ids=[[1]])


def test_a_guard_that_is_refused_names_the_reward() -> None:
    with pytest.raises(ConfigurationError, match="guard of the reward 'a' is True"):
        parse_selection("reward", {"name": "a", "guard": True})
    for guard in ({"timeout": -1}, {"timout": 5}):
        with pytest.raises(ConfigurationError, match=rf"think_format.*guard: .*{min(guard)}"):
            load_rewards({"name": "think_format", "guard": guard})
