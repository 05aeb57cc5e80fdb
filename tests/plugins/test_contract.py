"""A plugin that says which contract it was written for loads where that is understood, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trl_grpo_ext import load_advantage_hooks, load_rewards
from trl_grpo_ext.errors import BrokenPluginError, PluginContractError
from trl_grpo_ext.types import CONTRACT_VERSION

SOURCE = """
built = []

class Hook:
    contract_version = {version}
    role = "transform"

    def __init__(self):
        built.append(self)

    def on_rollout(self, advantages_B_T, rollout):
        return advantages_B_T

def reward(completions, **columns):
    return [1.0] * len(completions)

reward.contract_version = {version}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    (tmp_path / "own_contract.py").write_text(SOURCE.format(version=request.param))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_contract", None)


def written_for(*versions: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("module", versions, indirect=True)


@written_for(None, 1, CONTRACT_VERSION)
def test_this_contract_and_none_at_all_load(module: None) -> None:
    (reward,) = load_rewards(["own_contract:reward"])
    assert reward(completions=["a"]) == [1.0]
    assert len(load_advantage_hooks(["own_contract:Hook"])) == 1


@written_for(CONTRACT_VERSION + 1)
def test_a_newer_contract_is_refused_before_anything_is_built(module: None) -> None:
    with pytest.raises(PluginContractError) as raised:
        load_advantage_hooks(["own_contract:Hook"])
    assert str(raised.value) == (
        "The advantage hook 'Hook' from your own module own_contract was written for version "
        f"{CONTRACT_VERSION + 1} of the plugin contract, and this trl-grpo-ext has version {CONTRACT_VERSION}. Upgrade "
        "trl-grpo-ext, or install a version of it for that."
    )
    assert sys.modules["own_contract"].built == []
    with pytest.raises(PluginContractError):
        load_rewards(["own_contract:reward"])


@written_for("'1'", True, 0, -1, 1.0)
def test_what_is_no_version(module: None) -> None:
    with pytest.raises(BrokenPluginError, match="must be a whole number from 1 up"):
        load_rewards(["own_contract:reward"])
