"""The plugins in a model card: a table, and how to install them."""

from __future__ import annotations

import json
import re

from ...guard.printable import escaped
from ...plugins.selection import LABELS
from .records import Manifest, PluginRecord

_BEGIN, _END = "<!-- trl-grpo-ext: plugins -->", "<!-- trl-grpo-ext: end of plugins -->"
_SECTION = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
_CITATIONS = re.compile(r"^## Citations?$", re.MULTILINE)
_PLAIN = re.compile(r"[\w .,:;=/+(){}\"'@<>!?%^&#$*\[\]~-]*", re.ASCII)
"""What means nothing to Markdown between backticks in a table."""
_NAME, _VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"), re.compile(r"[A-Za-z0-9.!+_-]+")
_LONGEST = 400


def with_plugins(card: str, manifest: Manifest) -> str:
    """A model card with the section on plugins, before the citations or at the end; replaces the one that it has.

    Args:
        card: Markdown.
        manifest: Of the run that trained the model.
    """
    card = _SECTION.sub("\n\n", card)
    found = _CITATIONS.search(card)
    at = found.start() if found else len(card)
    before, behind = card[:at].rstrip("\n"), card[at:].lstrip("\n")
    return f"{before}\n\n{section(manifest)}\n" + (f"\n{behind}" if behind else "")


def section(manifest: Manifest) -> str:
    """The section as Markdown, between two comments that mark it."""
    own = manifest.versions.get("trl-grpo-ext")
    lines = [
        _BEGIN,
        "## Plugins",
        "",
        f"Trained with trl-grpo-ext {_cell(own) if own else '(version unknown)'} and these plugins:",
        "",
        "| kind | name | distribution | version | parameters |",
        "| --- | --- | --- | --- | --- |",
        *(_row(record) for record in manifest.plugins),
    ]
    wanted = {"trl-grpo-ext": own} | {r.distribution: r.version for r in manifest.plugins if r.distribution}
    named = [f"{name}=={number}" for name, number in wanted.items() if _can_be_installed(name, number)]
    if named:
        lines += [
            "",
            "To install them:",
            "",
            "```sh",
            f"pip install {' '.join(named)}",
            "```",
        ]
    loose = [record for record in manifest.plugins if record.distribution is None]
    if loose:
        modules = ", ".join(dict.fromkeys(_cell(record.target) for record in loose))
        lines += ["", f"In no distribution, so not to be installed: {modules}."]
    return "\n".join([*lines, _END])


def _row(record: PluginRecord) -> str:
    name = _cell(record.name) + (f" inside {_cell(record.inside)}" if record.inside else "")
    asked = dict(record.switches)
    if record.weight is not None:
        asked["weight"] = record.weight
    asked |= record.parameters or {}
    said = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in asked.items())
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ... (all of it is in the file of the checkpoint)"
    parameters = [_cell(said)] if said else []
    if record.parameters is None:
        parameters.append("given in Python")
    cells = [LABELS[record.kind], name, _cell(record.distribution), _cell(record.version), ", ".join(parameters)]
    return f"| {' | '.join(cells)} |"


def _cell(text: str | None) -> str:
    """A string that may hold anything, as a cell of a Markdown table that shows it and obeys none of it."""
    if not text:
        return ""
    if text == text.strip() and _PLAIN.fullmatch(text):
        return f"`{text}`"
    text = escaped(text)
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


def _can_be_installed(name: str, number: str | None) -> bool:
    return _NAME.fullmatch(name) is not None and number is not None and _VERSION.fullmatch(number) is not None
