"""Declarations: what they take and refuse, and how they travel."""

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from trl_grpo_ext.errors import PluginContractError
from trl_grpo_ext.plugins.kinds import FACTS
from trl_grpo_ext.types import (
    CONTRACT_VERSION,
    NEEDS,
    ROLES,
    AggregationDeclaration,
    Declaration,
    FilterDeclaration,
    HookDeclaration,
    RewardDeclaration,
)

FLAGS = {"deterministic": False, "independent": True, "last": True, "makes_signal": True, "uses_total_reward": False}
FLAGS |= {"uses_weights": False, "changes_weights": True}
OTHERS: dict[str, Any] = {"takes": ("hooks",), "teachers": ("org/teacher",), "contract_version": CONTRACT_VERSION}
OTHERS |= {"needs": ["old_logps", "offsets"], "conformance": {"parameters": {"n": 2}}}  # lists become tuples
FULL = HookDeclaration(role="transform", **FLAGS, **OTHERS)

REFUSED: list[tuple[type[Declaration], dict[str, Any], str]] = [
    (HookDeclaration, {"role": "tranform"}, "role .*'shaper', .* got 'tranform'"),
    (HookDeclaration, {"role": ["shaper"]}, r"role .* got \['shaper'\]"),
    (HookDeclaration, {"needs": ("old_logp",)}, "needs .*'old_logps', .* got"),
    (HookDeclaration, {"needs": "old_logps"}, "needs"),
    (HookDeclaration, {"needs": ("advantages",)}, "needs"),
    (HookDeclaration, {"last": 1}, "last .*got 1"),
    (AggregationDeclaration, {"needs": ("old_logp",)}, "'old_logps', .*'step_totals', got"),
    (FilterDeclaration, {"needs": ("advantage",)}, "'advantages', got"),
    (RewardDeclaration, {"needs": ("old_logps",)}, "needs"),
    (RewardDeclaration, {"reference_column": ""}, "reference_column"),
    *((RewardDeclaration, {"contract_version": one}, "contract_version") for one in ("1", True, 0, 1.0)),
]


@pytest.mark.parametrize(("declaration", "given", "sentence"), REFUSED)
def test_declaration_refuses(declaration: type[Declaration], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PluginContractError, match=sentence) as raised:
        declaration(**given)
    assert declaration.__name__ in str(raised.value)
    with pytest.raises(TypeError, match="no_field"):
        declaration(no_field=True)  # type: ignore[call-arg]


def test_declaration_travels_and_does_not_change() -> None:
    assert FULL.needs == ("old_logps", "offsets")
    assert FULL.shown().keys() == {one.name for one in fields(FULL)}
    assert HookDeclaration().shown() == {}
    assert pickle.loads(pickle.dumps(FULL)) == FULL == copy.deepcopy(FULL)
    assert replace(FULL, last=False).shown().keys() == FULL.shown().keys() - {"last"}
    with pytest.raises(FrozenInstanceError):
        FULL.last = False  # type: ignore[misc]
    for facts in FACTS.values():
        facts.declaration()
    assert [HookDeclaration(role=role).role for role in ROLES] == list(ROLES)
    assert HookDeclaration(needs=NEEDS).needs == NEEDS == FilterDeclaration(needs=NEEDS).needs


class Fixed:
    declares = HookDeclaration(role="transform", last=True)


class ByParameters:
    def __init__(self, last: bool) -> None:
        self.declares = HookDeclaration(role="transform", last=last)


class ByProperty:
    @property
    def declares(self) -> HookDeclaration:
        return Fixed.declares


class Wrong:
    declares = {"role": "transform"}  # noqa: RUF012


class Newer:
    declares = HookDeclaration(role="transform", contract_version=CONTRACT_VERSION + 1)


def test_declaration_of() -> None:
    for plugin in (Fixed, Fixed(), ByParameters(last=True), ByProperty()):
        assert HookDeclaration.of(plugin) == Fixed.declares
    for silent in (ByParameters, ByProperty, object(), len):
        assert HookDeclaration.of(silent) == HookDeclaration()
    assert Declaration.of(Fixed()).needs == ()  # any kind's
    with pytest.raises(PluginContractError, match=r"Wrong .*\{'role': 'transform'\}"):
        HookDeclaration.of(Wrong())
    with pytest.raises(PluginContractError, match=r"Fixed .*HookDeclaration"):
        FilterDeclaration.of(Fixed())
    with pytest.raises(PluginContractError, match=f"version {CONTRACT_VERSION + 1} .* has {CONTRACT_VERSION}"):
        HookDeclaration.of(Newer())
