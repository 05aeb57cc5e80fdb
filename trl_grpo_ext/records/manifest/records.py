"""The manifest: one record for each plugin of a run, in their order, and the versions of what runs them."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ...errors import ManifestError
from ...plugins.loading import Kind, Loaded, LoadedList
from ...plugins.metadata import installed_distributions, owner_of, provenance
from ...plugins.selection import KINDS, Selection
from ...types import CONTRACT_VERSION
from .source import Source, SourceReader, of_text

FILE = "trl_grpo_ext_plugins.json"
"""The manifest's name, in a run's folder and in each checkpoint."""

_FORMAT = 1
_VERSIONS_OF = ("trl-grpo-ext", "trl", "transformers", "torch", "accelerate")
_HIDDEN = "(not recorded)"
_SECRET = re.compile(r"api_?key|secret|passw(or)?d|credential|(access|auth|hf|bearer)_?token", re.IGNORECASE)
_WRAPPERS = {
    ("trl_grpo_ext.guard.calls", "Renamed"): "reward",
    ("trl_grpo_ext.guard.calls", "RenamedAsync"): "reward",
    ("trl_grpo_ext.guard.guarded", "Guarded"): "reward",
    ("trl_grpo_ext.guard.guarded", "AsyncGuarded"): "reward",
    ("trl_grpo_ext.credit.composition", "Preserving"): "hook",
    ("trl_grpo_ext.credit.signal", "SkipZeroVariance"): "aggregation",
}
"""Our own objects around a plugin, with the attribute that holds it."""


@dataclass(frozen=True)
class PluginRecord:
    """One plugin as a run used it.

    Attributes:
        kind: "reward", "advantage_hook" or "loss_aggregation".
        name: The entry point's name, or what TRL or messages call an object that was given in Python.
        distribution: The distribution that it comes from; None for a module of the user's own.
        version: That distribution's version; None where it has none.
        target: `module:attribute` that was loaded; for an object given in Python its function or class.
        parameters: What was selected, as JSON; for an object given in Python what its constructor took, as far as it
            keeps that under the same names; None where that is not known.
        weight: Of a reward that the trainer calls, or that stands in a list inside another; None for others.
        switches: What the selection asked for beyond parameters: `guard`, `preserve_sign` and so on.
        source_hash: SHA-256 of its source (see `manifest.source`); None where there is none to read.
        source: What that hash covers, or why there is none.
        inside: For a reward among another reward's parameters, that reward and the place; else None.
        selected: Whether it was selected by name or path; else it was given in Python.
    """

    kind: Kind
    name: str
    distribution: str | None = None
    version: str | None = None
    target: str = ""
    parameters: dict[str, Any] | None = None
    weight: float | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    source_hash: str | None = None
    source: str = ""
    inside: str | None = None
    selected: bool = True

    @property
    def origin(self) -> str:
        """Distribution and version in words, or the module."""
        if self.distribution is None:
            return f"the module {self.target.partition(':')[0]}"
        return f"{self.distribution} {self.version or '(version unknown)'}"


@dataclass(frozen=True)
class Manifest:
    """The plugins of a run.

    Attributes:
        plugins: In the order in which they are called: rewards, advantage hooks, the loss aggregation; those inside a
            reward follow it.
        versions: Of this package and the libraries under it, by distribution.
        contract_version: `trl_grpo_ext.types.CONTRACT_VERSION` of the run.
    """

    plugins: tuple[PluginRecord, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    contract_version: int = CONTRACT_VERSION

    @classmethod
    def of(cls, trainer: Any, aggregation: Loaded | None = None) -> Manifest:
        """The manifest of a constructed trainer; TRL's own will do, with rewards alone.

        Args:
            trainer: A `GRPOTrainer` or one that extends it.
            aggregation: What its loss aggregation was made of, if that is known.
        """
        weights = [_short(weight) for weight in trainer.reward_weights.tolist()]
        weights += [1.0] * (len(trainer.reward_funcs) - len(weights))
        made = _Recorder()
        records: list[PluginRecord] = []
        for loaded, name, weight in zip(
            _loaded(trainer.reward_funcs), trainer.reward_func_names, weights, strict=False
        ):
            records += made.records("reward", loaded, name=name, weight=weight)
        for loaded in _loaded(getattr(trainer, "advantage_hooks", [])):
            records += made.records("advantage_hook", loaded)
        if (given := getattr(trainer, "loss_aggregation", None)) is not None:
            known = aggregation if aggregation is not None and aggregation.object is given else Loaded(given)
            records += made.records("loss_aggregation", known)
        return cls(tuple(records), {name: _version(name) for name in _VERSIONS_OF})

    def plain(self) -> dict[str, Any]:
        """The manifest as JSON has it."""
        return {
            "format": _FORMAT,
            "contract_version": self.contract_version,
            "versions": dict(self.versions),
            "plugins": [asdict(record) for record in self.plugins],
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, in one step, so that no half of it is ever there.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="ascii")
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read what `write` wrote.

        Raises:
            FileNotFoundError: There is none.
            ManifestError: It cannot be read, or is no manifest.
        """
        try:
            return cls.from_plain(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ManifestError) else f"{type(error).__name__}: {error}"
            raise ManifestError(
                f"{path} cannot be read as a record of plugins: {reason.rstrip('.')}. Restore the file; or delete it, "
                "or set plugin_changes: warn, and nobody checks whether the plugins are the same."
            ) from error

    @classmethod
    def from_plain(cls, value: Any) -> Manifest:
        """Make it of what `plain` returned, or of anything that came in a file.

        Raises:
            ManifestError: It is not of that form; the message says where.
        """
        whole = _of_type(value, dict, "the whole")
        if whole.get("format") != _FORMAT:
            raise ManifestError(f"its format is {whole.get('format')!r:.40}, and this version reads {_FORMAT}")
        versions = _of_type(whole.get("versions"), dict, "versions")
        for name, number in versions.items():
            _of_type(number, (str, type(None)), f"the version of {name!r:.40}")
        entries = _of_type(whole.get("plugins"), list, "plugins")
        records = tuple(_record(entry, f"plugins[{index}]") for index, entry in enumerate(entries))
        return cls(records, versions, _of_type(whole.get("contract_version"), int, "contract_version"))


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("kind", "name", "target", "source"), str),
    **dict.fromkeys(("distribution", "version", "source_hash", "inside"), (str, type(None))),
    "parameters": (dict, type(None)),
    "weight": (int, float, type(None)),
    "switches": dict,
    "selected": bool,
}


def _record(value: Any, place: str) -> PluginRecord:
    entry = _of_type(value, dict, place)
    unknown = entry.keys() ^ {item.name for item in fields(PluginRecord)}
    if unknown:
        raise ManifestError(f"{place} lacks, or should not have, {min(unknown)!r:.40}")
    for name, types in _TYPES.items():
        _of_type(entry[name], types, f"{place}.{name}")
    if entry["kind"] not in KINDS:
        raise ManifestError(f"{place}.kind is {entry['kind']!r:.40}, not one of {', '.join(KINDS)}")
    return PluginRecord(**entry)


def _of_type(value: Any, types: Any, place: str) -> Any:
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise ManifestError(f"{place} is {value!r:.60}, which has another type than it should")
    return value


class _Recorder:
    """Makes records; reads each source file and the installed distributions once."""

    def __init__(self) -> None:
        self._sources = SourceReader()

    def records(
        self, kind: Kind, loaded: Loaded, *, name: str | None = None, weight: float | None = None, inside: str = ""
    ) -> Iterator[PluginRecord]:
        """The record of one plugin, then those of the rewards among its parameters."""
        if loaded.info is not None and loaded.selection is not None:
            info, asked = loaded.info, loaded.selection
            source = self._sources.of_module(info.target.partition(":")[0].strip(), info.distribution)
            switches: dict[str, Any] = dict.fromkeys(sorted(asked.switches), True)
            if asked.guard is not None:
                switches["guard"] = _plain_mapping(asked.guard)
            weight = weight if weight is not None else asked.weight
            record = PluginRecord(
                *(kind, info.name, info.distribution, info.version, info.target),
                parameters=_plain_mapping(asked.parameters),
                weight=weight,
                switches=switches,
                source_hash=source.hash,
                source=source.covers,
                inside=inside or None,
            )
        else:
            record = self._given_in_python(kind, loaded.object, name, weight, inside)
        yield record
        for place, reward in loaded.inner:
            within = f"{record.name}, {place}" if not inside else f"{inside}: {record.name}, {place}"
            yield from self.records(kind, reward, inside=within)

    def _given_in_python(
        self, kind: Kind, thing: Any, name: str | None, weight: float | None, inside: str
    ) -> PluginRecord:
        name = name or str(getattr(thing, "__name__", type(thing).__name__))
        switches: dict[str, Any] = {}
        parameters: dict[str, Any] | None = None
        while True:
            if isinstance(thing, functools.partial):
                parameters = {**_plain_mapping(thing.keywords), **(parameters or {})}
                thing = thing.func
            elif (attribute := _WRAPPERS.get((type(thing).__module__, type(thing).__qualname__))) is not None:
                switches |= _switches(thing)
                thing = getattr(thing, attribute)
            else:
                break
        while _is_model(thing) and _is_model(getattr(thing, "module", None)):  # an engine has wrapped it
            thing = thing.module
        defined = thing if hasattr(thing, "__qualname__") else type(thing)
        module = str(getattr(defined, "__module__", None) or "__main__")
        owner = None if module == "__main__" else owner_of(module, self._installed)
        distribution, number = provenance(*owner) if owner else (None, None)
        if _is_model(thing):
            path = getattr(getattr(thing, "config", None), "_name_or_path", None)
            parameters = {"name_or_path": None if path is None else str(path)}
            source = Source(None, "not hashed: it is a model, and its weights are not compared")
        else:
            if parameters is None and defined is not thing and not callable(getattr(thing, "state_dict", None)):
                parameters = _constructed_with(thing)
            source = of_text(defined) if module == "__main__" else self._sources.of_module(module, distribution)
        return PluginRecord(
            *(kind, name, distribution, number, f"{module}:{defined.__qualname__}"),
            parameters=parameters,
            weight=weight,
            switches=switches,
            source_hash=source.hash,
            source=source.covers,
            inside=inside or None,
            selected=False,
        )

    @functools.cached_property
    def _installed(self) -> dict[str, Any]:
        return dict(installed_distributions())


def _loaded(plugins: Sequence[Any]) -> list[Loaded]:
    return plugins.loaded if isinstance(plugins, LoadedList) else [Loaded(plugin) for plugin in plugins]


def _is_model(thing: Any) -> bool:
    torch = sys.modules.get("torch")  # a model can only be there if torch is
    return torch is not None and isinstance(thing, torch.nn.Module)


def _switches(wrapper: Any) -> dict[str, Any]:
    """What one of our own wrappers was asked for, as a selection would say it."""
    asked = {name: value for name, value in (_constructed_with(wrapper) or {}).items() if name != "name"}
    if type(wrapper).__qualname__.endswith("Guarded"):
        return {"guard": {name: value for name, value in asked.items() if value is not None}}
    if type(wrapper).__qualname__ == "SkipZeroVariance":
        return {"skip_zero_variance": True}
    return {name: True for name, value in asked.items() if value is True}


def _constructed_with(thing: Any) -> dict[str, Any] | None:
    """Simple values that an object keeps under the names of its constructor's parameters, which is a common habit.

    Not asked of one with a state of its own, whose values change while it trains. None where nothing is found.
    """
    try:
        names = inspect.signature(type(thing)).parameters
    except (TypeError, ValueError):  # some extension types have none
        return None
    kept = getattr(thing, "__dict__", {})
    simple = {name: kept[name] for name in names if name in kept and _is_simple(kept[name])}
    return _plain_mapping(simple) if simple else None


def _is_simple(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_simple(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_simple(inner) for inner in value)
    return value is None or isinstance(value, (str, bool, Real, enum.Enum, os.PathLike))


def _plain_mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _HIDDEN if _SECRET.search(str(key)) else _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """A parameter as JSON; of what JSON has no word for, the name of its function or class."""
    if isinstance(value, Selection):
        return _plain(value.plain())
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(inner) for inner in value), key=repr)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (str, bool)):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(os.fspath(value))
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    return f"<{named.__module__}:{named.__qualname__}>"


def _short(weight: float) -> float:
    """A float32 without the digits that it does not have: 0.2 and not 0.20000000298."""
    return float(f"{weight:.7g}") if math.isfinite(weight) else weight


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
