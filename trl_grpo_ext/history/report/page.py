"""One self-contained HTML page of runs: curves, settings, plugins, and every completion token by token.

Everything from a run is untrusted. So the page's content security policy forbids all connections, and all scripts and
styles but its own, named by their hashes; the template escapes, and the scripts write data only as text.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...errors import ConfigurationError
from ...records.findings import findings_of
from ...records.manifest import Manifest, PluginRecord, records_by_name
from ...records.writing import write_atomically
from .page_data import page_data
from .trained_run import Run

_STYLES = ("page", "browser", "narrow")
_SCRIPTS = ("chunks", "text", "state", "tooltip", "cards", "results", "keys", "theme", "start")
"""Files of `assets`, joined in this order into one style and one script."""

_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_ABSENT = "–"
_ASSETS = Path(__file__).parent / "assets"


def write_page(runs: Sequence[Run], path: str | os.PathLike[str], *, limit: int = 1000) -> list[str]:
    """Write the page with at most `limit` completions, in whole groups; returned are sentences on what it lacks."""
    html, notes = page(runs, limit)
    try:
        write_atomically(path, html.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigurationError(f"The page cannot be written to {path}: {error.strerror or error}.") from error
    return notes


def page(runs: Sequence[Run], limit: int) -> tuple[str, list[str]]:
    """The page as text, and sentences on what is missing from it and why."""
    from .figures import FINDINGS, svgs

    drawn = list(svgs(runs))
    figures = [
        {"name": plot.name, "title": plot.title, "caption": plot.caption, "svg": Markup(svg)}
        for plot, svg in drawn
        if svg is not None
    ]
    absent = [f"{plot.title}: {plot.absent}" for plot, svg in drawn if svg is None]
    data = page_data(runs if limit else [], limit)
    notes = list(dict.fromkeys([*(sentence for run in runs for sentence in run.missing), *data.notes]))
    style = _joined(f"{name}.css" for name in _STYLES)
    script = f'(() => {{\n"use strict";\n{_joined(f"{name}.js" for name in _SCRIPTS)}\n}})();'
    html = _ENVIRONMENT.get_template("report.html.jinja").render(
        # Nothing but this style, this script, and images inside the page.
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        runs=[{"name": run.name, "steps": run.last_step, "summary": summaries(run)} for run in runs],
        notes=notes,
        findings=[
            (run.name, [(one, *FINDINGS[one.name]) for one in found])
            for run in runs
            if (found := findings_of(run.folder, run.history))
        ],
        titles={one["name"]: one["title"] for one in figures},
        with_completions=[run["name"] for run in data.index["runs"] if run["steps"]],
        figures=figures,
        absent=absent,
        settings=settings(runs),
        plugins=plugins(runs),
        index=script_json(data.index),
        chunks={name: Markup(chunk) for name, chunk in data.chunks.items()},
    )
    return html, [*notes, *absent]


def script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element: pure ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def visible(text: str) -> str:
    """Show control characters as symbols, and what reverses or hides others as escapes, as `assets/text.js` does."""

    def symbol(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"

    return _HIDDEN.sub(symbol, text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _joined(names: Iterable[str]) -> str:
    return "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names)


_ENVIRONMENT = Environment(
    loader=PackageLoader("trl_grpo_ext.history.report"),
    undefined=StrictUndefined,
    autoescape=True,
    finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    trim_blocks=True,
    lstrip_blocks=True,
)

Line = tuple[str, Sequence[str], bool]  # of a table: a name, a text for each run, whether they differ

_OTHERS = ("completions/mean_length", "completions/clipped_ratio", "entropy", "kl", "frac_reward_zero_std")


def summaries(run: Run) -> list[tuple[str, ...]]:
    """Of the key metrics each one's name, the first and the last value, the best and its step, as text."""
    keys = run.keys()
    held_out = [key for key in keys if re.fullmatch(r"eval_((pass|mean)@.*|reward|rewards/.*/mean)", key, re.DOTALL)]
    rewards = [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]
    lines: list[tuple[str, ...]] = []
    for key in dict.fromkeys([*held_out, "reward", *rewards, *_OTHERS]):
        steps, values = run.series(key)
        if values:
            name = f"{key.removeprefix('eval_')} (held out)" if key in held_out else key
            best, step = max(zip(values, steps, strict=True), key=lambda pair: pair[0])
            of_best = (_ABSENT, _ABSENT) if key in _OTHERS else (f"{best:.4g}", str(step))
            lines.append((name, f"{values[0]:.4g}", f"{values[-1]:.4g}", *of_best))
    return lines


def settings(runs: Sequence[Run]) -> list[Line]:
    """Hyper-parameters, those that differ first."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    tables = [{str(name): text(value) for name, value in run.settings.items()} for run in runs]
    return lines_of(tables, sorted({name for table in tables for name in table}))


def plugins(runs: Sequence[Run]) -> list[Line]:
    """The plugins of each run in order and the versions of libraries, those that differ first."""
    tables = []
    for manifest in (run.manifest or Manifest() for run in runs):
        table = {name: _describe(record) for name, record in records_by_name(manifest).items()}
        tables.append(table | {f"version of {name}": str(one or _ABSENT) for name, one in manifest.versions.items()})
    names = list(dict.fromkeys(name for table in tables for name in table))
    return lines_of(tables, sorted(names, key=lambda name: name.startswith("version of ")))


def lines_of(tables: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[Line]:
    """A line for each name, those in which the runs differ first."""
    cells = [[table.get(name, _ABSENT) for table in tables] for name in names]
    lines = [(name, texts, len(set(texts)) > 1) for name, texts in zip(names, cells, strict=True)]
    return sorted(lines, key=lambda line: not line[2])


def _describe(record: PluginRecord) -> str:
    parts = [record.origin, record.target, f"role {record.role}" if record.role else ""]
    parts.append("" if record.weight is None else f"weight {record.weight:g}")
    parts += [json.dumps(values, ensure_ascii=False) for values in (record.parameters, record.switches) if values]
    parts.append(f"source {record.source_hash[:12]}" if record.source_hash else "")
    return "\n".join(part for part in parts if part)
