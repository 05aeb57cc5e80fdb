"""What is checked of a plugin's form when it is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from trl_grpo_ext import available, load_advantage_hooks, load_group_filter, load_rewards
from trl_grpo_ext.errors import PluginContractError
from trl_grpo_ext.plugins.checking import check_contract
from trl_grpo_ext.plugins.kinds import KINDS, Kind
from trl_grpo_ext.plugins.loading import resolve
from trl_grpo_ext.types import HookDeclaration, RewardDeclaration


class Hook:
    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: Any, rollout: Any) -> Any:
        return 2.0 * advantages_B_T


class Silent:
    def on_rollout(self, advantages_B_T: Any, rollout: Any) -> Any:
        return advantages_B_T


class Aggregation:
    def weights(self, rollout: Any) -> Any:
        return rollout.mask_B_T / rollout.totals.tokens


class Filter:
    def keep(self, rollout: Any) -> Any:
        return [True] * len(rollout.texts)


BASES: dict[Kind, type] = {"advantage_hook": Hook, "loss_aggregation": Aggregation, "group_filter": Filter}


def plugin(kind: Kind, **attributes: Any) -> Any:
    return type("Mine", (BASES[kind],), attributes)()


@pytest.mark.parametrize("kind", KINDS)
def test_check_contract_on_the_built_in_plugins(kind: Kind) -> None:
    names = [info.name for info in available(kind) if info.builtin]
    assert len(names) > 2
    if kind not in ("reward", "prompt_sampler"):  # some of these need parameters; tests/test_every_plugin.py loads them
        for name in set(names) - {"all_of", "reward_schedule"}:
            resolve(kind, name)


SIGNATURES: list[tuple[Kind, dict[str, Any], str]] = [
    (
        "advantage_hook",
        {"on_rollout": lambda advantages_B_T: 0},
        r"on_rollout.* as on_rollout\(advantages_B_T, rollout\)",
    ),
    ("advantage_hook", {"on_rollout": lambda a, b, c: 0}, "missing a required argument: 'c'"),
    ("advantage_hook", {"on_rollout": lambda *, advantages_B_T, rollout: 0}, "too many positional arguments"),
    ("advantage_hook", {"load_state_dict": lambda: 0}, r"as load_state_dict\(state\)"),
    ("advantage_hook", {"state_dict": lambda more: 0}, r"as state_dict\(\)"),
    ("loss_aggregation", {"weights": lambda: 0}, r"as weights\(rollout\)"),
    ("group_filter", {"keep": lambda rollout, rows: 0}, r"as keep\(rollout\)"),
]


@pytest.mark.parametrize(("kind", "methods", "sentence"), SIGNATURES)
def test_check_contract_refuses_signatures(kind: Kind, methods: dict[str, Any], sentence: str) -> None:
    wrong = plugin(kind)
    vars(wrong).update(methods)
    with pytest.raises(PluginContractError, match=rf"^It: .*{sentence}"):
        check_contract(kind, wrong, "It")


def test_check_contract_refuses_async_methods() -> None:
    async def keep(rollout: Any) -> Any: ...

    with pytest.raises(PluginContractError, match=r"async.*keep\(rollout\)"):
        load_group_filter(SimpleNamespace(keep=keep))


def test_check_contract_takes_more_parameters_with_defaults() -> None:
    wide = SimpleNamespace(declares=HookDeclaration(role="transform"), on_rollout=lambda a, r, scale=2.0, *more: a)
    assert load_advantage_hooks([wide]) == [wide]
    assert load_rewards([len]) == [len]  # a reward's call is the kit's to judge


def test_check_contract_and_role() -> None:
    with pytest.raises(PluginContractError, match=r"on_rollout .*role"):
        load_advantage_hooks([Silent()])
    assert RewardDeclaration.of(load_rewards(["gsm8k_accuracy"])[0]).reference_column == "answer"
