"""The roles table of `docs/plugins.md`, from the hooks themselves, and every pair of them.

`python -m docs.site.hook_pairs` writes it. `tests/credit/test_pairs.py` compares it, and shows for each pair that is
accepted that both hooks change the advantages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import acting_order, role_of

PAGE = Path(__file__).parents[1] / "plugins.md"
BEGIN, END = "<!-- roles: python -m docs.site.hook_pairs -->", "<!-- end of the roles -->"

VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "kl_in_reward": ({}, {"form": "completion"}),
    "prefix_tree": ({}, {"mode": "add"}),
    "process_rewards": ({}, {"mode": "add"}),
    "reward_schedule": ({"weights": {"plain": [[0, 4.0]]}},),
    "teacher_log_ratio": ({}, {"mode": "add"}),
}
"""Parameters of the hooks whose role depends on them, one set for each role."""


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook with its label, what selects it, and its role; "mask" for a transform that is `last`."""

    label: str
    selection: Mapping[str, Any]
    role: str
    loaded: Any


@cache
def hooks() -> tuple[Hook, ...]:
    """All built-in hooks, in the order in which they act."""
    found = []
    for name in sorted(info.name for info in available("advantage_hook") if info.builtin):
        variants = VARIANTS.get(name, ({},))
        for parameters in variants:
            selection = {"name": name, **parameters}
            (hook,) = load_advantage_hooks([selection])
            words = ", ".join(f"{key}: {value}" for key, value in parameters.items())
            role = "mask" if role_of(hook) == "transform" and hook.declares.last else role_of(hook)
            found.append(Hook(f"{name} ({words})" if words and len(variants) > 1 else name, selection, role, hook))
    return tuple(sorted(found, key=lambda hook: (acting_order(hook.loaded), hook.label)))


@cache
def refusal(first: Hook, second: Hook) -> str:
    """The sentence that refuses two hooks selected in this order; empty if they are accepted."""
    try:
        HookChain([first.loaded, second.loaded])
    except ConfigurationError as error:
        return str(error)
    return ""


def renewed(page: str) -> str:
    """The page with the hooks of each role as they are now."""
    lines = ["| role | hooks |", "| --- | --- |"]
    for role in dict.fromkeys(hook.role for hook in hooks()):
        links = [f"[`{hook.label}`](#{hook.selection['name']})" for hook in hooks() if hook.role == role]
        lines.append(f"| {role} | {', '.join(links)} |")
    before, _, rest = page.partition(BEGIN)
    table = "\n".join(lines)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
