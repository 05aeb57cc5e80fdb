"""Write the tables of `docs/plugins-directory.md` from real runs of the kit: `python -m docs.site.plugins_directory`.

Each distribution named in `docs/plugins-directory.yaml` is installed into an environment of its own, on top of the
packages installed here, and all its plugins are checked as by `trl-grpo-ext check --distribution`. With `--check`
nothing is written, and any difference from the page is an error.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tests.plugins_env import make_environment
from trl_grpo_ext.plugins.kinds import LABELS
from trl_grpo_ext.testing.reports import lowest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plugins-directory.md"
KNOWN = PAGE.with_suffix(".yaml")
BEGIN, END = "<!-- tables: python -m docs.site.plugins_directory -->", "<!-- end of the tables -->"


@dataclass(frozen=True)
class Tried:
    """What the kit found out about a distribution.

    Attributes:
        known: Its entry in `KNOWN`.
        tested: Its version, and those of what it was tried with.
        plugins: Of each plugin its name, kind, level, and what the next level needs.
    """

    known: dict[str, str]
    tested: tuple[str, ...]
    plugins: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def level(self) -> str:
        """That of its lowest plugin."""
        return lowest(plugin[2] for plugin in self.plugins)  # type: ignore[misc]


def known() -> list[dict[str, str]]:
    """The entries of `KNOWN`."""
    entries: list[dict[str, str]] = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    return entries


def versions() -> tuple[str, ...]:
    """What distributions are tried with here: trl-grpo-ext, TRL and Python."""
    return (*map(importlib.metadata.version, ("trl-grpo-ext", "trl")), ".".join(platform.python_version_tuple()[:2]))


def tried(entry: dict[str, str], folder: Path) -> Tried:
    """Install a distribution into a new environment and run the kit over it."""
    made = make_environment(folder / entry["name"])
    command = [str(made.python), "-P", "-m", "trl_grpo_ext.cli.main"]
    if "install" in entry:
        pip = [str(made.python), "-m", "pip", "install", "--quiet", entry["install"]]
        subprocess.run(pip, cwd=ROOT, check=True)
    project = ROOT / entry.get("install", ".")
    done = subprocess.run(
        [*command, "check", "--distribution", entry["name"], "--json"],
        cwd=project if project.is_dir() else folder,  # whose pyproject.toml may say what the checks need
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise SystemExit(f"{entry['name']} was not checked, for the reason above.")
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    version = subprocess.run([made.python, "-c", code, entry["name"]], stdout=subprocess.PIPE, text=True, check=True)
    return Tried(entry, (version.stdout.strip(), *versions()), [_row(report) for report in json.loads(done.stdout)])


def _row(report: dict[str, Any]) -> tuple[str, ...]:
    missing = report["missing"] or "" if "missing" in report else report["error"]
    return f"`{report['subject']}`", LABELS[report["kind"]], report.get("level", "none"), " ".join(missing.split())


def tables(found: Sequence[Tried]) -> str:
    """The part of the page between its markers."""
    lines = _table(
        ("distribution", "level", "version", "trl-grpo-ext", "trl", "Python", "what it offers"),
        [(f"[{one.known['name']}]({one.known['page']})", one.level, *one.tested, one.known["about"]) for one in found],
    )
    for one in found:
        lines += ["", f"## {one.known['name']}", ""]
        alike = groupby(one.plugins, key=lambda plugin: plugin[1:])
        rows = [(", ".join(name for name, *_ in plugins), *rest) for rest, plugins in alike]
        lines += _table(("plugins", "kind", "level", "what the next level needs"), rows)
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def read(page: str) -> list[Tried]:
    """What the page says, by the entries that are known now."""
    between = page.partition(BEGIN)[2].partition(END)[0]
    summary, *parts = between.split("\n## ")
    plugins = {
        part.partition("\n")[0]: [(name, *rest) for names, *rest in _rows(part) for name in names.split(", ")]
        for part in parts
    }
    tested = {row[0].partition("]")[0].removeprefix("["): row[2:6] for row in _rows(summary)}
    return [
        Tried(entry, tested.get(entry["name"], ()), plugins.get(entry["name"], []))  #
        for entry in known()
    ]


def _rows(text: str) -> list[tuple[str, ...]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip().replace("\\|", "|") for cell in line[2:-2].split(" | ")) for line in lines]


def renewed(page: str, found: Sequence[Tried]) -> str:
    """The page with its tables made again."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Run the kit, and write the page or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where the page differs")
    given = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        now = renewed(page, [tried(entry, Path(folder)) for entry in known()])
    if not given.check:
        PAGE.write_text(now, encoding="utf-8")
    elif now != page:
        sys.exit("\n".join(difflib.unified_diff(page.splitlines(), now.splitlines(), "the page", "the kit", n=0)))


if __name__ == "__main__":
    main()
