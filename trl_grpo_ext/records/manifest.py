"""The plugins of a run: recorded beside it and in every checkpoint, and compared when the run resumes.

`trl_grpo_ext_plugins.json` lies in the output folder, in every checkpoint and wherever a model is saved.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..errors import ManifestError
from ..guard.calls import is_model, parameters_of, unique_names
from ..guard.guarded import Guarded
from ..guard.untrusted import one_line
from ..plugins.discovery import installed_version, module_spec, owner_of, provenance
from ..plugins.kinds import FACTS, KINDS, LABELS, PLURALS
from ..plugins.loading import Kind, Loaded, with_origin
from ..plugins.selection import Selection
from ..types import role_of
from .writing import write_atomically

__all__ = ["FILE", "Manifest", "PluginRecord", "differences", "version_notes"]

FILE = "trl_grpo_ext_plugins.json"
"""The manifest's name, in a run's folder and in each checkpoint."""

_OTHERS: tuple[Kind, ...] = ("advantage_hook", "token_loss", "loss_aggregation", "prompt_sampler", "group_filter")
_VERSIONS_OF = ("trl-grpo-ext", "trl", "transformers", "torch", "accelerate", "vllm")
HIDDEN = "(not recorded)"
_SECRET = re.compile(
    r"api[_-]?key|secret|passw(or)?d|credential|authorization|x-auth|(access|auth|hf|bearer)_?token"
    r"|(^|(?<!pad)(?<!eos)(?<!bos)(?<!unk)_)token$|(^|[_-]|(?-i:(?<=[a-z])(?=K)))key$",
    re.I,
)
_SECRET_IN_TEXT = re.compile(
    r"(://)[^/@\s]+(?=@)|(\bBearer )(?=\S*\d)[^\s'\"]+"
    r"|([?&](?i:\w*key|\w*token|secret|password|sig|signature)=)[^&#\s]+"
    r"|\b(?:(?:hf_|gh[opsu]_)[A-Za-z0-9]{30,}|(?:sk-|github_pat_|glpat-|xox[abp]-)(?=[\w-]*\d)[\w-]{16,})"
)


@dataclass(frozen=True)
class PluginRecord:
    """One plugin as a run used it."""

    kind: Kind  # one of `KINDS`
    name: str  # the entry point's name, or, for an object given in Python, the name that TRL or messages use
    distribution: str | None = None  # its distribution; None for the user's own module
    version: str | None = None  # that distribution's version; None if it has none
    target: str = ""  # `module:attribute` that was loaded; for an object given in Python its function or class
    # the selected ones, as JSON; for an object given in Python those that it keeps; None if they are unknown
    parameters: dict[str, Any] | None = None
    weight: float | None = None  # of a reward, also of one that another reward lists; None for other plugins
    switches: dict[str, Any] = field(default_factory=dict)  # of the selection: `guard`, `skip_zero_variance`
    source_hash: str | None = None  # SHA-256 of its module's file; None if it has none, or in a script
    inside: str | None = None  # for a reward inside another reward's parameters, that reward and parameter; else None
    selected: bool = True  # whether it was selected by name or path, rather than given in Python
    role: str | None = None  # role of an advantage hook; None for other plugins

    @property
    def origin(self) -> str:
        """Distribution and version in words, or the module."""
        if self.distribution is None:
            return f"the module {self.target.partition(':')[0]}"
        return f"{self.distribution} {self.version or '(version unknown)'}"


@dataclass(frozen=True)
class Manifest:
    """The plugins of a run."""

    plugins: tuple[PluginRecord, ...] = ()  # in calling order, by kind; rewards inside a reward follow it
    versions: dict[str, str] = field(default_factory=dict)  # of this package and the libraries under it

    @classmethod
    def of(cls, trainer: Any, known: Mapping[Kind, Loaded] | None = None) -> Manifest:
        """The manifest of a constructed trainer; of TRL's own trainer it holds rewards alone.

        `known` says what plugins were loaded from, by kind, of the kinds of which a trainer has one at most.
        """
        # Without false float32 digits: 0.2 rather than 0.20000000298.
        weights = [float(f"{weight:.7g}") for weight in trainer.reward_weights.tolist()]
        weights += [1.0] * (len(trainer.reward_funcs) - len(weights))
        records: list[PluginRecord] = []
        rewards = with_origin(trainer.reward_funcs)
        for loaded, name, weight in zip(rewards, trainer.reward_func_names, weights, strict=False):
            records += _records_of("reward", loaded, name=name, weight=weight)
        for kind in _OTHERS:
            if FACTS[kind].several:
                for loaded in with_origin(getattr(trainer, FACTS[kind].setting[0], [])):
                    records += _records_of(kind, loaded)
            elif (one := getattr(trainer, kind, None)) is not None:
                origin = (known or {}).get(kind)
                records += _records_of(kind, origin if origin is not None and origin.object is one else Loaded(one))
        versions = {name: installed_version(name) for name in _VERSIONS_OF}
        return cls(tuple(records), {name: found for name, found in versions.items() if found is not None})

    def line(self) -> str:
        """Every plugin and its origin in one line; empty if there is none."""
        parts = []
        for kind in dict.fromkeys(record.kind for record in self.plugins):
            records = [record for record in self.plugins if record.kind == kind and record.inside is None]
            names = unique_names([_text(record.name) for record in records])  # as in metrics
            listed = [f"{name} ({_text(record.origin)})" for name, record in zip(names, records, strict=True)]
            parts.append(f"{PLURALS[kind] if len(listed) > 1 else LABELS[kind]} {', '.join(listed)}")
        return "; ".join(parts)

    def plain(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        return {"format": 1, "versions": self.versions, "plugins": [asdict(record) for record in self.plugins]}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it atomically as JSON."""
        write_atomically(path, json.dumps(self.plain(), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read what `write` wrote; a `ManifestError` if it cannot be read, or a `FileNotFoundError`."""
        try:
            return cls.from_plain(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise ManifestError(f"{path} cannot be read as a record of plugins ({reason}): delete it.") from error

    @classmethod
    def from_plain(cls, value: Any) -> Manifest:
        """Make a manifest from what `plain` returned, perhaps in an untrusted file; a `ManifestError` if malformed."""
        match value:
            case {"format": 1, "versions": dict() as versions, "plugins": list() as plugins}:
                return cls(tuple(map(_read_record, plugins)), versions)
        raise ManifestError("it is no mapping with format 1, versions and plugins")


def _read_record(value: Any) -> PluginRecord:
    match value:
        case {
            "kind": str() as kind,
            "name": str(),
            "distribution": str() | None,
            "version": str() | None,
            "target": str(),
            "parameters": dict() | None,
            "weight": int() | float() | None,
            "switches": dict(),
            "source_hash": str() | None,
            "inside": str() | None,
            "selected": bool(),
            "role": str() | None,
            **more,
        } if kind in KINDS and not more:
            return PluginRecord(**value)
    raise ManifestError(f"it is no record of a plugin: {value!r:.300}")


def _records_of(
    kind: Kind, loaded: Loaded, *, name: str | None = None, weight: float | None = None, inside: str | None = None
) -> Iterator[PluginRecord]:
    """The record of one plugin, then those of the rewards among its parameters."""
    info = loaded.info
    asked = loaded.selection
    if info is None or asked is None:
        record = _given_in_python(kind, loaded.object, name)
    else:
        guard = {} if asked.guard is None else {"guard": plain_mapping(asked.guard)}
        record = PluginRecord(
            kind=kind,
            name=info.name,
            distribution=info.distribution,
            version=info.version,
            target=info.target,
            parameters=plain_mapping(asked.parameters),
            switches={**dict.fromkeys(sorted(asked.switches), True), **guard},
            source_hash=hash_of_module(info.target.partition(":")[0].strip()),
        )
        weight = asked.weight if weight is None else weight
    role = role_of(loaded.object) if kind == "advantage_hook" else None
    yield replace(record, weight=weight, inside=inside, role=role)
    for place, reward in loaded.inner:
        within = f"{record.name}, {place}"
        yield from _records_of(kind, reward, inside=within if inside is None else f"{inside}: {within}")


def _given_in_python(kind: Kind, thing: Any, name: str | None) -> PluginRecord:
    name = name or str(getattr(thing, "__name__", type(thing).__name__))
    switches: dict[str, Any] = {}
    parameters: dict[str, Any] | None = None
    while isinstance(thing, functools.partial | Guarded):
        if isinstance(thing, Guarded):
            asked = {name: getattr(thing, name) for name in ("timeout", "retries", "workers", "batch_size")}
            asked["outcomes"] = dict(thing.policy.changed) or None
            switches["guard"] = {name: value for name, value in asked.items() if value is not None}
            thing = thing.reward
        else:
            parameters = plain_mapping(thing.keywords) | (parameters or {})
            thing = thing.func
    if is_model(thing):
        thing = getattr(thing, "module", thing)  # an engine may have wrapped it
        parameters = {"name_or_path": getattr(getattr(thing, "config", None), "_name_or_path", None)}
    defined = thing if hasattr(thing, "__qualname__") else type(thing)
    if parameters is None and defined is not thing and not callable(getattr(thing, "state_dict", None)):
        parameters = _constructed_with(thing)
    module = str(getattr(defined, "__module__", None) or "__main__")
    owner = None if module == "__main__" else owner_of(module)
    distribution, number = provenance(owner) if owner else (None, None)
    return PluginRecord(
        kind=kind,
        name=name,
        distribution=distribution,
        version=number,
        target=f"{module}:{defined.__qualname__}",
        parameters=parameters,
        switches=switches,
        source_hash=hash_of_module(module),
        selected=False,
    )


def _constructed_with(thing: Any) -> dict[str, Any] | None:
    """Simple values that an object keeps under the names of its constructor's parameters; None if there are none."""
    kept = getattr(thing, "__dict__", {})
    names = [name for name in parameters_of(type(thing)) or () if name in kept]
    simple = (str, bool, Real, Mapping, list, tuple, type(None))
    return plain_mapping({name: kept[name] for name in names if isinstance(kept[name], simple)}) or None


def hash_of_module(module: str) -> str | None:
    """SHA-256 of a module's file, which is not imported; None if it has none, or for the script that runs."""
    spec = None if module == "__main__" else module_spec(module)
    if spec is None or not spec.has_location or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def plain_mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Parameters as JSON; what a name or a text's form says to be a key, token or password becomes `HIDDEN`."""
    return {str(key): HIDDEN if _SECRET.search(str(key)) else plain_value(value) for key, value in values.items()}


def plain_value(value: Any) -> Any:
    """A value as JSON: a configuration its mapping; what JSON cannot hold the name of its function or class."""
    match value:
        case enum.Enum():
            return plain_value(value.value)
        case None | bool():
            return value
        case str():
            return _SECRET_IN_TEXT.sub(lambda found: "".join(filter(None, found.groups())) + HIDDEN, value)
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else str(float(value))
        case Selection():
            return plain_value(value.plain())
        case Mapping():
            return plain_mapping(value)
        case list() | tuple():
            return [plain_value(inner) for inner in value]
        case set() | frozenset():
            return sorted((plain_value(inner) for inner in value), key=repr)
    if isinstance(value, os.PathLike) or (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value)
    if not isinstance(value, type) and callable(to_dict := getattr(value, "to_dict", None)):
        return plain_value(to_dict())
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return f"<{named.__module__}:{named.__qualname__}>"


def differences(old: Manifest, new: Manifest) -> list[str]:
    """List the differences between the plugins of a checkpoint and of this run; empty if there are none.

    Plugins are matched by kind and name, and compared by origin, version, source, parameters, switches, weight and
    order. Sources are compared if both are known and the versions are equal, since another version has another source.
    Versions of the libraries don't count: see `version_notes`.
    """
    before = records_by_name(old)
    here = records_by_name(new)
    texts = []
    for name, record in {**before, **here}.items():
        if name in here and name in before:
            texts += [f"{name}: {text}" for text in _changes(before[name], record)]
        else:
            where = "here and not in the checkpoint" if name in here else "in the checkpoint and not here"
            texts.append(f"{name} ({_text(record.origin)}) is {where}")
    for kind in KINDS:
        both = [name for name, one in before.items() if one.kind == kind and name in here]
        order = [name for name in here if name in both]
        if order != both:
            then, now = (", ".join(_text(here[name].name) for name in names) for names in (both, order))
            texts.append(f"{PLURALS[kind]}: the order is {then} in the checkpoint, {now} here")
    return texts


def version_notes(old: Manifest, new: Manifest) -> list[str]:
    """List the libraries with different versions; these alone don't count as a change of plugins."""
    return [
        f"{_text(name)} {_text(old.versions.get(name))} in the checkpoint, {_text(new.versions.get(name))} here"
        for name in sorted({**old.versions, **new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]


def records_by_name(manifest: Manifest) -> dict[str, PluginRecord]:
    """The records by kind, name and place, as a sentence has them; duplicates are numbered."""
    names = []
    for one in manifest.plugins:
        place = f" (inside {_text(one.inside)})" if one.inside else ""
        names.append(f"{LABELS[one.kind]} {_text(one.name)}{place}")
    return dict(zip(unique_names(names), manifest.plugins, strict=True))


def _changes(old: PluginRecord, new: PluginRecord) -> Iterator[str]:
    before = _facts(old, new)
    here = _facts(new, old)
    origins = {(one.distribution, one.version, one.target) for one in (old, new)}
    if len(origins) == 1 and len({old.source_hash, new.source_hash} - {None}) > 1:
        yield "its source differs, although its version does not"
    for key in {**before, **here}:
        if key not in before or key not in here or not _same(before[key], here[key]):
            texts = [_text(json.dumps(of[key])) if key in of else "not set" for of in (before, here)]
            yield f"{_text(key)} {texts[0]} in the checkpoint, {texts[1]} here"


def _facts(record: PluginRecord, other: PluginRecord) -> dict[str, Any]:
    """What two runs compare of a plugin, by the words for it; parameters if both runs know them."""
    facts = {name: getattr(record, name) for name in ("distribution", "version", "target", "weight")} | record.switches
    facts["parameters"] = "not known" if record.parameters is None else "known"
    if record.parameters is not None and other.parameters is not None:
        facts |= {f"parameter {name}": value for name, value in record.parameters.items()}
    return facts


def _same(old: Any, new: Any) -> bool:
    """Whether two JSON values are equal; unlike in Python, true is not 1."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True) or (
        type(old) in (int, float) and type(new) in (int, float) and old == new
    )


def _text(value: str | None) -> str:
    """A string from a file or a plugin, for a sentence."""
    return one_line(value, 200)
