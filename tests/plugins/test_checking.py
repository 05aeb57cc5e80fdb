"""What is checked of a plugin's form when it is loaded: slips in names, signatures, and whom they must not touch."""

from types import SimpleNamespace
from typing import Any

import pytest

from trl_grpo_ext import load_advantage_hooks, load_group_filter, load_loss_aggregation, load_rewards
from trl_grpo_ext.errors import PluginContractError
from trl_grpo_ext.plugins.checking import check_contract
from trl_grpo_ext.plugins.kinds import KINDS, Kind
from trl_grpo_ext.types import AggregationDeclaration, FilterDeclaration, HookDeclaration


class Hook:
    declares = HookDeclaration(role="transform")

    def on_rollout(self, advantages_B_T: Any, rollout: Any) -> Any:
        return 2.0 * advantages_B_T


METHODS: dict[Kind, Any] = {
    "reward": {"__call__": lambda self, completions, **columns: [0.0] * len(completions)},
    "advantage_hook": {"declares": Hook.declares, "on_rollout": Hook.on_rollout},
    "loss_aggregation": {"weights": lambda self, rollout: rollout.mask_B_T},
    "group_filter": {"keep": lambda self, rollout: [True] * len(rollout.texts)},
    "token_loss": {"loss": lambda self, terms: 0.0},
    "prompt_sampler": {"draw": lambda self, count, round_number: None},
}


def plugin(kind: Kind, **attributes: Any) -> Any:
    return type("Mine", (), {**METHODS[kind], **attributes})()


def method(*given: Any) -> None: ...


MISSPELT: list[tuple[Kind, str, Any, str]] = [
    # The form of attributes, which nobody reads.
    ("advantage_hook", "role", "estimator", r"declares = HookDeclaration\(role=...\)"),
    ("advantage_hook", "needs", ("old_logps",), "needs=..."),
    ("loss_aggregation", "needs_step_totals", True, "needs_step_totals"),
    ("group_filter", "reads_advantages", True, "reads_advantages"),
    # One letter off.
    ("advantage_hook", "makes_singal", True, "makes_signal"),
    ("loss_aggregation", "need_step_totals", True, "step_totals"),
    ("reward", "per_completions", False, "per_completion"),
    # Methods.
    ("advantage_hook", "onForward", method, "the method 'on_forward'"),
    ("reward", "start_scorring", method, "the method 'start_scoring'"),
]


@pytest.mark.parametrize(("kind", "name", "value", "right"), MISSPELT)
def test_check_contract_refuses_slips(kind: Kind, name: str, value: Any, right: str) -> None:
    for wrong in (plugin(kind, **{name: value}), plugin(kind)):
        vars(wrong).setdefault(name, value)  # of the class, or of the object
        with pytest.raises(PluginContractError, match=rf"^It .*{name!r}.*: .*{right}"):
            check_contract(kind, wrong, "It")


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("kind", ["advantage_hook", "prompt_sampler"])
def test_check_contract_refuses_half_of_a_state(kind: Kind, method: str) -> None:
    half = plugin(kind, state_dict=lambda self: {}, load_state_dict=lambda self, state: None)
    setattr(type(half), method, None)
    with pytest.raises(PluginContractError, match="alone"):
        check_contract(kind, half, "It")


def test_check_contract_refuses_a_declaration_of_another_name() -> None:
    aggregation = plugin("loss_aggregation", settings=AggregationDeclaration(per_step=True))
    with pytest.raises(PluginContractError, match=r"'settings'.*`declares`"):
        load_loss_aggregation(aggregation)


HONEST: dict[str, Any] = {
    "roles": ("user", "assistant"),
    "need": ("x",),
    "dependent": True,
    "per_steps": True,
    "needs_gpu": True,
    # The names of declarations with values that they would not take, or that change nothing.
    "role": "assistant",
    "last": 5,
    "deterministic": True,
    "get_state_dict": method,
    "state_dicts": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HONEST)
def test_check_contract_leaves_authors_attributes_alone(kind: Kind, name: str) -> None:
    check_contract(kind, plugin(kind, **{name: HONEST[name]}), "It")
    own = plugin(kind)
    vars(own)[name] = HONEST[name]
    check_contract(kind, own, "It")


class WithParameters(Hook):
    """Its parameters have names of declarations, and mean something else; and it knows what another plugin declares."""

    def __init__(self, last: bool = True, role: str = "forward") -> None:
        self.last = last
        self.role = role
        self.inner = FilterDeclaration(needs=("advantages",))


def test_check_contract_leaves_parameters_alone() -> None:
    hook = WithParameters()
    assert load_advantage_hooks(hook) == [hook]


SIGNATURES: list[tuple[Kind, dict[str, Any], str]] = [
    ("advantage_hook", {"on_rollout": lambda *, advantages_B_T, rollout: 0}, "too many positional arguments"),
    ("advantage_hook", {"load_state_dict": lambda: 0}, r"as load_state_dict\(state\)"),
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


def test_check_contract_takes_more_parameters_with_defaults_but_no_hook_without_a_role() -> None:
    wide = SimpleNamespace(declares=HookDeclaration(role="transform"), on_rollout=lambda a, r, scale=2.0, *more: a)
    assert load_advantage_hooks([wide]) == [wide]
    assert load_rewards([len]) == [len]  # a reward's call is the kit's to judge
    with pytest.raises(PluginContractError, match=r"on_rollout .*role"):
        load_advantage_hooks([SimpleNamespace(on_rollout=wide.on_rollout)])
