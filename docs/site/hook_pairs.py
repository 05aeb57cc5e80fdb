"""Tables of `docs/hook_pairs.md` and `docs/plugins.md` from the hooks themselves: `python -m docs.site.hook_pairs`.

Every two built-in hooks are put into a chain. `tests/credit/test_pairs.py` compares the page, and shows for each pair
that is accepted that both hooks change the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import acting_order, role_of

PAGE, CATALOGUE = (Path(__file__).parents[1] / name for name in ("hook_pairs.md", "plugins.md"))
BLOCKS = {
    PAGE: ("<!-- tables: python -m docs.site.hook_pairs -->", "<!-- end of the tables -->"),
    CATALOGUE: ("<!-- roles: python -m docs.site.hook_pairs -->", "<!-- end of the roles -->"),
}
"""By page, between which lines its tables stand."""

VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "kl_in_reward": ({}, {"form": "completion"}),
    "prefix_tree": ({}, {"mode": "add"}),
    "process_rewards": ({}, {"mode": "add"}),
    "teacher_log_ratio": ({}, {"mode": "add"}),
}
"""Parameters of the hooks whose role depends on them, one set for each role."""

REFUSED, REORDERED, ACCEPTED = "refused", "reordered", "accepted"


@dataclass(frozen=True, eq=False)
class Hook:
    """A row of the table.

    Attributes:
        label: Its name, with the parameters that decide about its role.
        selection: What selects it.
        role: Its role; "mask" for a transform that is `last`.
        loaded: The hook.
    """

    label: str
    selection: Mapping[str, Any]
    role: str
    loaded: Any


@cache
def hooks() -> tuple[Hook, ...]:
    """All built-in hooks, in the order in which they act."""
    found = []
    for name in sorted(info.name for info in available("advantage_hook") if info.builtin):
        for parameters in VARIANTS.get(name, ({},)):
            selection = {"name": name, **parameters}
            (hook,) = load_advantage_hooks([selection])
            words = ", ".join(f"{key}: {value}" for key, value in parameters.items())
            role = "mask" if role_of(hook) == "transform" and getattr(hook, "last", False) else role_of(hook)
            found.append(Hook(f"{name} ({words})" if words else name, selection, role, hook))
    return tuple(sorted(found, key=lambda hook: (acting_order(hook.loaded), hook.label)))


@cache
def verdict(first: Hook, second: Hook) -> tuple[str, str]:
    """What becomes of two hooks selected in this order, and, where they are refused, the sentence that says so."""
    try:
        HookChain([first.loaded, second.loaded])
    except ConfigurationError as error:
        return REFUSED, str(error)
    return (ACCEPTED if acting_order(first.loaded) <= acting_order(second.loaded) else REORDERED), ""


def tables() -> str:
    """The pairs that are refused, by the reason."""
    pairs: dict[str, list[str]] = {}
    for first, second in combinations(hooks(), 2):
        symbol, sentence = verdict(first, second)
        if symbol != REFUSED:
            continue
        for hook in (first, second):
            sentence = sentence.replace(repr(hook.selection["name"]), "…")
        both = (
            "any two estimators" if first.role == second.role == "estimator" else f"`{first.label}`, `{second.label}`"
        )
        pairs.setdefault(sentence, []).append(both)
    lines = ["| refused | what the error says, without the names |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {'<br>'.join(dict.fromkeys(both))} | {why} |" for why, both in pairs.items())])


def by_role() -> str:
    """The hooks of each role."""
    lines = ["| role | hooks |", "| --- | --- |"]
    for role in dict.fromkeys(hook.role for hook in hooks()):
        names = [hook for hook in hooks() if hook.role == role]
        links = [f"[`{hook.label}`](#{hook.selection['name']})" for hook in names]
        lines.append(f"| {role} | {', '.join(links)} |")
    return "\n".join(lines)


def renewed(page: Path) -> str:
    """A page with its tables as they are now."""
    begin, end = BLOCKS[page]
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_too, after = rest.partition(end)
    if not (found and found_too):
        raise SystemExit(f"{page} has lost one of the lines {begin!r} and {end!r}.")
    return f"{before}{begin}\n\n{tables() if page == PAGE else by_role()}\n\n{end}{after}"


if __name__ == "__main__":
    for page in BLOCKS:
        page.write_text(renewed(page), encoding="utf-8")
    sys.stdout.write(f"{len(hooks())} hooks, on {', '.join(page.name for page in BLOCKS)}.\n")
