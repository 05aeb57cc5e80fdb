"""Which version of the contract a plugin was written for, if it says so.

`contract_version = 1` on a plugin (its class, or its function) says so. Nothing has to: a plugin that says nothing is
taken to fit, and is held to its distribution's own requirement on trl-grpo-ext by pip.
"""

from __future__ import annotations

from typing import Any

from ..errors import BrokenPluginError, PluginContractError
from ..types import CONTRACT_VERSION
from .discovery import PluginInfo, called

OLDEST_CONTRACT = 1
"""The oldest version of the contract that is still understood."""


def check_contract(info: PluginInfo, exported: Any) -> None:
    """Refuse a plugin that was written for a contract that this package does not have.

    Args:
        info: Where it comes from.
        exported: What its entry point names: a class, a function or an object.

    Raises:
        PluginContractError: It needs a newer contract, or one that is no longer understood.
        BrokenPluginError: What it says is not a version.
    """
    version = getattr(exported, "contract_version", None)
    if version is None:
        return
    subject = f"{called(info)} from {info.source}"
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise BrokenPluginError(
            f"{subject} has contract_version = {version!r}, which must be a whole number from 1 up."
        )
    if version > CONTRACT_VERSION:
        raise PluginContractError(
            f"{subject} was written for version {version} of the plugin contract, and this trl-grpo-ext has version "
            f"{CONTRACT_VERSION}. Upgrade trl-grpo-ext, or install a version of {info.distribution or 'it'} for that."
        )
    if version < OLDEST_CONTRACT:
        raise PluginContractError(
            f"{subject} was written for version {version} of the plugin contract, and this trl-grpo-ext understands "
            f"{OLDEST_CONTRACT} to {CONTRACT_VERSION}. Upgrade {info.distribution or 'it'}, or install an older "
            "trl-grpo-ext."
        )
