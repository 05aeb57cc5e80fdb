"""Building, kind checks and dotted paths, on modules written for the test."""

import functools
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.distributions import write_distribution
from tests.support import length_reward
from trl_grpo_ext.errors import (
    AmbiguousPluginError,
    BrokenPluginError,
    ConfigurationError,
    PluginBlockedError,
    PluginContractError,
    PluginParameterError,
    PluginTypeError,
    UnknownPluginError,
)
from trl_grpo_ext.plugins.loading import (
    RewardList,
    available,
    find,
    implements,
    load_advantage_hooks,
    load_loss_aggregation,
    load_rewards,
    resolve,
)
from trl_grpo_ext.types import CONTRACT_VERSION, AdvantageHook, Reward, RewardDeclaration


def test_find_names_near_names_and_names_of_another_kind() -> None:
    info = find("reward", "think_format")
    assert info == find("reward", "trl-grpo-ext:think_format") == find("reward", "TRL_GRPO.ext:think_format")
    assert (info.builtin, info.distribution) == (True, "trl-grpo-ext")
    meant = {"Think-Fromat": "'think_format'", "entropy_shaping": "advantage hook", "zzzz": "gsm8k_accuracy"}
    for name, says in {**meant, "pkg.mod.fn": "'pkg.mod:fn'"}.items():
        with pytest.raises(UnknownPluginError, match=says):
            find("reward", name)


def test_variable_and_the_built_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("  ", "NONE", "trl-grpo-ext"):
        monkeypatch.setenv("TRL_GRPO_EXT_PLUGINS", value)
        assert find("reward", "think_format").builtin
        assert find("reward", "trl_grpo_ext.rewards:anything").builtin
    for value in (",", "none,tge-good"):
        monkeypatch.setenv("TRL_GRPO_EXT_PLUGINS", value)
        with pytest.raises(ConfigurationError):
            find("reward", "think_format")


SOURCE = """
import functools
from trl_grpo_ext.types import HookDeclaration


def plain(completions, answer, scale=1.0, *, shift=0.0, **columns):
    return [scale * len(text) + shift for text in completions]


def positional(completions, factor, /, **columns):
    return []


class Factory:
    def __init__(self, target, slack=2):
        self.target, self.slack = target, slack

    def __call__(self, completions, **columns):
        return [float(self.target)] * len(completions)

    @staticmethod
    def nested(completions, **columns):
        return [1.0]


class Slots:
    __slots__ = ()

    def __call__(self, **columns):
        return []


class Refuses:
    def __init__(self, error="ValueError", threshold=0):
        raise {"ValueError": ValueError, "KeyError": KeyError, "SystemExit": SystemExit}[error]("no, thank you")


class Early:
    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages, rollout):
        return advantages


class Late:
    def on_forward(self, advantages, forward):
        return advantages


class OtherName(Late):
    __name__ = "another_name"


class NamedByParameter(Late):
    def __init__(self, word="x"):
        self.__name__ = f"says_{word}"


shared = Late()


class Weighs:
    on_forward = None

    def weights(self, rollout):
        return None


class Newer(Early):
    declares = HookDeclaration(role="transform", contract_version=99)

    def __init__(self):
        raise RuntimeError("it was built")


instance = Factory(7)
partial = functools.partial(plain, scale=3.0)
number = 3
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write modules where the interpreter finds them, and forget them again."""

    def write(name: str, source: str) -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture
def own(write_module: Callable[..., None]) -> ModuleType:
    write_module("own_plugins", SOURCE)
    import own_plugins  # type: ignore[import-not-found]

    return own_plugins


def test_resolve_dotted_paths(own: ModuleType) -> None:
    loaded = resolve("reward", "own_plugins:plain")
    assert loaded.object is own.plain
    assert loaded.info is not None
    assert (loaded.info.distribution, loaded.info.dotted, loaded.info.builtin) == (None, True, False)
    assert loaded.info.source == "your own module own_plugins"
    assert resolve("reward", "own_plugins:Factory.nested").object is own.Factory.nested


def test_dotted_path_into_an_installed_distribution_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    info = find("reward", "hypothesis.strategies:text")
    assert info.distribution == "hypothesis"
    assert info.version
    assert find("reward", "trl_grpo_ext.rewards:x").builtin
    assert find("reward", "json:loads").distribution is None
    monkeypatch.setenv("TRL_GRPO_EXT_PLUGINS", "pytest")
    with pytest.raises(PluginBlockedError, match="hypothesis"):
        find("reward", "hypothesis.strategies:text")
    assert find("reward", "json:loads").distribution is None


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("own_nothing:x", "there is no module 'own_nothing'"),
        ("own_package.nothing:x", "there is no module 'own_package.nothing'"),
        ("own_package.inner:lenght", "Did you mean 'length'?"),
        ("./own_file.py:x", "is not a module's name"),
    ],
)
def test_dotted_path_that_leads_nowhere(write_module: Callable[..., None], path: str, says: str) -> None:
    write_module("own_package.__init__", "")
    write_module("own_package.inner", "def length(completions, **columns): return []")
    with pytest.raises(UnknownPluginError, match=re.escape(says)) as caught:
        resolve("reward", path)
    assert f"no installed distribution is called '{path.partition(':')[0]}'" in str(caught.value)


def test_a_misspelt_group_is_named(write_module: Callable[..., None], tmp_path: Path) -> None:
    write_module("own_group", "def lost(completions, **columns): return []")
    write_distribution(tmp_path, "group-dist", {"trl_grpo_ext.reward": {"lost": "own_group:lost"}})
    with pytest.raises(UnknownPluginError, match=r"group-dist declares it in the group 'trl_grpo_ext\.reward'"):
        resolve("reward", "lost")


def test_dotted_path_whose_module_fails(write_module: Callable[..., None]) -> None:
    write_module("own_fails", "1 / 0")
    with pytest.raises(BrokenPluginError, match=r"own module own_fails .* ZeroDivisionError") as c:
        resolve("reward", "own_fails:x")
    assert isinstance(c.value.__cause__, ZeroDivisionError)
    assert "entry point" not in str(c.value)


def test_distribution_that_declares_a_name_twice(write_module: Callable[..., None], tmp_path: Path) -> None:
    write_module("own_twice", "def one(completions): return []\ndef other(completions): return []")
    points = "twice = own_twice:one\ntwice = own_twice:other\nsame = own_twice:one\nsame = own_twice:one\n"
    write_distribution(tmp_path, "twice-dist", f"[trl_grpo_ext.rewards]\n{points}")
    for name in ("twice", "twice-dist:twice"):
        with pytest.raises(AmbiguousPluginError, match=r"own_twice:one or own_twice:other"):
            resolve("reward", name)
    assert load_rewards("same").names == ["one"]


def test_same_distribution_in_two_folders_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("two", "one"):
        write_distribution(tmp_path / folder, "dup-one", {"reward": {f"of_{folder}": "dup:reward"}})
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert {info.name for info in available() if info.distribution == "dup-one"} == {"of_one"}


def _with(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": f"own_plugins:{name}", **parameters}


def test_parameters_make_a_picklable_partial_or_an_object(own: ModuleType) -> None:
    reward = load_rewards(_with("plain", scale=2.0, shift=1.0))[0]
    assert isinstance(reward, functools.partial)
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(prompts=[""], completions=["abc"], completion_ids=[[]], answer=["x"]) == [7.0]
    assert resolve("reward", _with("partial", shift=1.0)).object(completions=["a"], answer=[""]) == [4.0]
    [made] = load_rewards(_with("Factory", target=4))
    assert (made.target, made.slack) == (4, 2)
    assert resolve("reward", "own_plugins:instance").object is own.instance


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (_with("plain", scael=2.0), "'scael'. Did you mean 'scale'? It takes: answer, scale=1.0, shift=0.0."),
        (_with("plain", wieght=0.5), "Did you mean 'weight'?"),
        (_with("plain", completions=[]), "no parameter 'completions'."),
        (_with("positional", factor=1), "no parameter 'factor'."),
        (_with("Factory", slack=2), "missing 1 required positional argument: 'target'"),
        (_with("instance", target=1), "target=1"),
        (_with("Refuses", threshold="1e-3"), "YAML 1.1 reads threshold='1e-3'"),
    ],
)
def test_parameters_that_do_not_fit(own: ModuleType, selection: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginParameterError, match=re.escape(says)) as caught:
        resolve("reward", selection)
    assert "your own module own_plugins" in str(caught.value)


@pytest.mark.parametrize("error", ["KeyError", "SystemExit"])
def test_constructor_that_breaks(own: ModuleType, error: str) -> None:
    with pytest.raises(BrokenPluginError, match=f"raised {error}") as caught:
        resolve("reward", _with("Refuses", error=error))
    assert type(caught.value.__cause__).__name__ == error


def test_each_kind_refuses_the_others(own: ModuleType) -> None:
    wrong: list[tuple[Any, Any]] = [("reward", own.number), ("reward", "own_plugins:number")]
    wrong += [("advantage_hook", "own_plugins:plain"), ("loss_aggregation", own.Late())]
    for kind, wanted in [*wrong, ("advantage_hook", own.Late)]:  # a class in place of its instance
        with pytest.raises(PluginTypeError):
            resolve(kind, wanted)


def test_load_refuses_a_newer_contract(own: ModuleType) -> None:
    with pytest.raises(PluginContractError, match=r"'Newer' from your own module own_plugins: .*version 99"):
        load_advantage_hooks("own_plugins:Newer")
    for version in (None, CONTRACT_VERSION):
        own.plain.declares = RewardDeclaration(contract_version=version)
        assert load_rewards("own_plugins:plain") == [own.plain]


def test_stubs_inherited_from_a_protocol_are_not_methods() -> None:
    class Late(AdvantageHook):
        def on_forward(self, advantages_B_T: Any, forward: Any) -> Any:
            return advantages_B_T

    class NoCall(Reward):
        pass

    assert load_advantage_hooks(Late())
    assert not implements(Late(), "on_rollout")
    with pytest.raises(PluginTypeError):
        resolve("reward", NoCall())


def test_plugins_carry_the_name_by_which_they_were_selected(
    own: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = {"late": "own_plugins:Late", "other": "own_plugins:OtherName", "word": "own_plugins:NamedByParameter"}
    write_distribution(tmp_path / "installed", "named-dist", {"hook": hooks})
    monkeypatch.syspath_prepend(tmp_path / "installed")
    selected = ["late", "other", "late", "word", "own_plugins:OtherName", "own_plugins:Late"]
    names = [hook.__name__ for hook in load_advantage_hooks(selected)]
    assert names == ["late", "other", "late_2", "says_x", "another_name", "Late"]
    held = load_advantage_hooks(["own_plugins:shared", own.shared])
    assert held == [own.shared, own.shared]
    assert not hasattr(own.shared, "__name__")  # others hold it too


def test_reward_list_keeps_weights_and_the_names_that_trl_gives(own: ModuleType) -> None:
    from trl.trainer.utils import get_callable_name

    weighed = ["{name: own_plugins:Factory, target: 1, weight: 0.25}", _with("plain", scale=2.0, weight=2)]
    rewards = load_rewards([*weighed, length_reward, "own_plugins:Slots", "own_plugins:Factory.nested"])
    assert isinstance(rewards, list)
    assert rewards.weights == [0.25, 2.0, 1.0, 1.0, 1.0]
    assert rewards.names == ["Factory", "plain", "length_reward", "Slots", "nested"]
    assert rewards.names == [get_callable_name(reward) for reward in rewards]
    rewards = load_rewards([_with("Factory", target=1, weight=0.5), "own_plugins:plain"])
    for copy in (pickle.loads(pickle.dumps(rewards)), load_rewards(rewards)):
        assert isinstance(copy, RewardList)
        assert (copy.weights, copy.names) == (rewards.weights, rewards.names)
        assert copy[1] is own.plain


def test_one_selection_or_several(own: ModuleType) -> None:
    assert load_rewards("own_plugins:plain") == load_rewards((own.plain,)) == [own.plain]
    assert load_rewards([]) == []
    hooks = load_advantage_hooks(["own_plugins:Late", own.Early()])
    assert [type(hook).__name__ for hook in hooks] == ["Early", "Late"], "in the order in which they act"
    with pytest.raises(ConfigurationError):
        load_loss_aggregation(["own_plugins:Weighs"])


def test_rewards_of_one_name_get_a_number(own: ModuleType) -> None:
    def plain_2(completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    rewards = load_rewards(["own_plugins:plain", _with("plain", scale=2.0), own.plain, plain_2])
    assert rewards.names == ["plain", "plain_3", "plain_4", "plain_2"]
    assert rewards[0] is own.plain
    assert own.plain.__name__ == "plain", "what was passed in stays as it is"
    assert [reward(completions=["abc"], answer=[""]) for reward in rewards] == [[3.0], [6.0], [3.0], [0.0]]
    assert load_rewards(rewards).names == rewards.names


def test_load_numbers_objects_without_changing_them(own: ModuleType) -> None:
    rewards = load_rewards([_with("Factory", target=1), _with("Factory", target=2), "own_plugins:instance"])
    assert rewards.names == ["Factory", "Factory_2", "Factory_3"]
    assert pickle.loads(pickle.dumps(rewards[1])).__name__ == "Factory_2"
    assert not hasattr(own.instance, "__name__")
    weighed = [load_rewards(_with("instance", weight=weight))[0] for weight in (0.5, 2.0)]
    assert [vars(each)["trl_grpo_ext_weight"] for each in weighed] == [0.5, 2.0]  # in whatever list they are put
    assert vars(own.instance) == {"target": 7, "slack": 2}
    slots = load_rewards(["own_plugins:Slots", "own_plugins:Slots"])
    assert slots.names == ["Slots", "Slots_2"]  # the trainer's metrics, not the objects


def test_every_alias_selects_its_plugin_and_is_listed() -> None:
    listed = {info.name: info.aliases for info in available("loss_aggregation") if info.builtin}
    aliases = [alias for names in listed.values() for alias in names]
    assert len(set(aliases)) == len(aliases) > 5
    assert not set(aliases) & listed.keys()
    for name, names in listed.items():
        for alias in names:
            assert find("loss_aggregation", alias).name == name
            assert find("loss_aggregation", f"trl-grpo-ext:{alias}").name == name
            assert load_loss_aggregation(alias).__name__ == name
    assert listed["length_power"] == ("delta_l_norm", "vl_norm")


def test_load_calls_reward_factories_once() -> None:
    pytest.importorskip("trl.rewards")
    name = "trl.rewards:get_soft_overlong_punishment"
    [reward] = load_rewards([{"name": name, "max_completion_len": 10, "soft_punish_cache": 4}])
    assert reward(prompts=["?"] * 2, completions=["x"] * 2, completion_ids=[[1] * 8, [1] * 11]) == [-0.5, -1]
    with pytest.raises(PluginParameterError, match="'max_completion_len'"):
        load_rewards([name])
    with pytest.raises(PluginParameterError, match=r"\*\*columns .*'/a'"):
        load_rewards([{"name": "posixpath:normpath", "path": "/a"}])
