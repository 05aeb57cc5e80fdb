"""How the plugins of two runs differ, in sentences: what a checkpoint was trained with, and what is here now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...guard.printable import escaped
from ...plugins.selection import KINDS, LABELS
from .records import Manifest, PluginRecord

_LONGEST = 200
_Key = tuple[str, str | None, str, int]


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Say what makes the plugins of two manifests different ones; empty where they are the same.

    Plugins are matched by kind and name. What counts is where they come from, their versions and sources, parameters,
    switches and weights, their order, and which there are. Sources count where both are known and the versions are
    equal, since another version has another source. The versions of the libraries beneath don't count: see
    `version_notes`.

    Args:
        old: Of the checkpoint.
        new: Of this run.
    """
    before, here = _keyed(old), _keyed(new)
    texts = []
    for key in {**before, **here}:
        if key not in here:
            texts.append(f"{_called(before[key])} ({_text(before[key].origin)}) is in the checkpoint and not here")
        elif key not in before:
            texts.append(f"{_called(here[key])} ({_text(here[key].origin)}) is here and not in the checkpoint")
        else:
            texts += [f"{_called(here[key])}: {text}" for text in _changes(before[key], here[key])]
    for kind in KINDS:
        order = [key for key in before if key[0] == kind and key in here]
        order_here = [key for key in here if key[0] == kind and key in before]
        if order != order_here:
            names, names_here = (", ".join(_text(key[2]) for key in keys) for keys in (order, order_here))
            texts.append(f"{LABELS[kind]}s: the order is {names} in the checkpoint, {names_here} here")
    return texts


def version_notes(old: Manifest, new: Manifest) -> list[str]:
    """Say which of the libraries beneath have other versions; this alone makes no plugin another one."""
    notes = [
        f"{_text(name)} {_text(old.versions.get(name) or 'none')} in the checkpoint, {new.versions.get(name)} here"
        for name in sorted({*old.versions, *new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]
    if old.contract_version != new.contract_version:
        notes.append(f"plugin contract {old.contract_version} in the checkpoint, {new.contract_version} here")
    return notes


def _keyed(manifest: Manifest) -> dict[_Key, PluginRecord]:
    """The records by kind, place and name, and the how-manieth of these each one is."""
    keyed: dict[_Key, PluginRecord] = {}
    for record in manifest.plugins:
        number = 0
        while (key := (record.kind, record.inside, record.name, number)) in keyed:
            number += 1
        keyed[key] = record
    return keyed


def _changes(old: PluginRecord, new: PluginRecord) -> Iterator[str]:
    if (old.distribution, old.version) != (new.distribution, new.version):
        here = _text(new.origin) if old.distribution != new.distribution else _text(new.version or "no version")
        yield f"{_text(old.origin)} in the checkpoint, {here} here"
    if old.target != new.target:
        yield f"it is {_text(old.target)} in the checkpoint, {_text(new.target)} here"
    elif (
        (old.distribution, old.version) == (new.distribution, new.version)
        and None not in (old.source_hash, new.source_hash)
        and old.source_hash != new.source_hash
    ):
        same = f"although the version {_text(new.version)} is the same" if new.version else f"({_text(new.origin)})"
        yield f"its source differs {same}"
    if None in (old.parameters, new.parameters):
        if old.parameters != new.parameters:
            known = {False: "known", True: "not known"}
            yield (
                f"its parameters are {known[old.parameters is None]} in the checkpoint, "
                f"{known[new.parameters is None]} here"
            )
    else:
        yield from _of_values("parameter ", old.parameters or {}, new.parameters or {})
    yield from _of_values("", old.switches, new.switches)
    if old.weight != new.weight:
        yield f"weight {_value(old.weight)} in the checkpoint, {_value(new.weight)} here"


def _of_values(what: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in {**old, **new}:
        if name in old and name in new and _same(old[name], new[name]):
            continue
        here = _value(new[name]) if name in new else "not set"
        before = _value(old[name]) if name in old else "not set"
        yield f"{what}{_text(name)} {before} in the checkpoint, {here} here"


def _same(old: Any, new: Any) -> bool:
    """Whether two JSON values are equal; other than in Python, true is not 1."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True) or (
        type(old) in (int, float) and type(new) in (int, float) and old == new
    )


def _called(record: PluginRecord) -> str:
    within = f" (inside {_text(record.inside)})" if record.inside else ""
    return f"{LABELS[record.kind]} {_text(record.name)}{within}"


def _value(value: Any) -> str:
    return _cut(json.dumps(value))


def _text(value: str | None) -> str:
    """A string from a file or a plugin, without what a terminal would obey."""
    text = str(value)
    return _cut(escaped(text))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
