"""The directory of plugins that others published, and what `check` says of them.

    python -m docs.site.directory            # docs/plugins.md's table from directory.toml and directory.json
    python -m docs.site.directory --check    # first install each into an environment of its own and check it

With `--check` it exits with 1 if a distribution that passed before no longer does: before a release, that is our fault
until shown otherwise.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENTRIES, RESULTS, PAGE = ROOT / "docs/directory.toml", ROOT / "docs/directory.json", ROOT / "docs/plugins.md"
BEGIN, END = "<!-- table: python -m docs.site.directory -->", "<!-- end of the table -->"
KEYS = {"name", "source", "by", "about"}
PASSED = "passed"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r"[^\n|<>`\[\]]{1,120}")


def entries(text: str) -> list[dict[str, str]]:
    """The entries of `directory.toml`, in its order, each key checked: others write them, and they go into a page.

    Raises:
        ValueError: A key is missing or unknown, a value is not one plain line, or a name occurs twice.
    """
    found: list[dict[str, str]] = tomllib.loads(text).get("distribution", [])
    for entry in found:
        if set(entry) != KEYS:
            raise ValueError(f"An entry has the keys {', '.join(sorted(KEYS))}; got {entry}.")
        for key, value in entry.items():
            if not isinstance(value, str) or not (_NAME if key == "name" else _LINE).fullmatch(value):
                raise ValueError(f"{key} is one line of plain text, 120 characters at most; got {value!r}.")
        if entry["source"].startswith("-"):
            raise ValueError(f"source is what pip installs, not an option; got {entry['source']!r}.")
    names = [entry["name"] for entry in found]
    if len(set(names)) < len(names):
        raise ValueError(f"Each distribution is listed once; got {names}.")
    return found


def verdict(reports: Sequence[Mapping[str, Any]]) -> str:
    """`passed`, or which plugins broke which rules, from the reports of `check --json`."""
    if not reports:
        return "offers no plugin"
    broken = []
    for report in reports:
        if not report["ok"]:
            rules = [one["rule"] for one in report.get("violations", [])]
            broken.append(f"{report['subject']}: {', '.join(rules) or 'cannot be loaded'}")
    return "; ".join(broken) or PASSED


def checked(entry: Mapping[str, str]) -> dict[str, Any]:
    """Install a distribution into an environment of its own, beside this tree, and check all of its plugins."""
    from tests.plugins_env import make_environment

    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": None,
        "plugins": [],
        "trl_grpo_ext": version("trl-grpo-ext"),
        "trl": version("trl"),
    }
    with tempfile.TemporaryDirectory() as scratch:
        made = make_environment(Path(scratch) / "venv")
        source = entry["source"]
        if (ROOT / source).is_dir():  # a copy, as building leaves files
            source = shutil.copytree(ROOT / source, Path(scratch) / "source", ignore=shutil.ignore_patterns("build"))
        pip = [made.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", source]
        done = subprocess.run(pip, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            return result | {"verdict": "cannot be installed", "details": done.stderr[-2000:]}
        words = ["-m", "trl_grpo_ext.cli.main", "check", "--distribution", entry["name"], "--json"]
        done = subprocess.run([made.python, *words], cwd=scratch, capture_output=True, text=True, check=False)
        try:
            reports = json.loads(done.stdout)
        except ValueError:
            return result | {"verdict": "cannot be checked", "details": done.stderr[-2000:]}
        found = made.probe(f"import importlib.metadata\nanswer = importlib.metadata.version({entry['name']!r})")
    plugins = sorted(report["subject"] for report in reports)
    return result | {"version": found, "plugins": plugins, "verdict": verdict(reports)}


def worse(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One sentence for each distribution that passed before and does not now."""
    return [
        f"{name} passed with trl-grpo-ext {before[name]['trl_grpo_ext']}; now: {result['verdict']}."
        for name, result in now.items()
        if result["verdict"] != PASSED and before.get(name, {}).get("verdict") == PASSED
    ]


def table(listed: Sequence[Mapping[str, str]], results: Mapping[str, Any]) -> str:
    """The part of the page between its markers."""
    lines = ["| distribution | by | plugins | `check` said |", "| --- | --- | --- | --- |"]
    for entry in listed:
        result = results.get(entry["name"])
        said, plugins = "not checked yet", ""
        if result is not None:
            versions = (
                f"{result['version'] or 'no version'}, trl-grpo-ext {result['trl_grpo_ext']}, trl {result['trl']}"
            )
            said = f"{result['verdict']} ({versions}; {result['date']})"
            plugins = ": " + ", ".join(f"`{name}`" for name in result["plugins"]) if result["plugins"] else ""
        place = entry["source"].removeprefix("docs/")
        shown = f"[{entry['name']}]({place})" if (ROOT / entry["source"]).is_dir() else f"`pip install {place}`"
        lines.append(f"| {shown} | {entry['by']} | {entry['about']}{plugins} | {said} |")
    return "\n".join(lines)


def renewed(page: str, listed: Sequence[Mapping[str, str]], results: Mapping[str, Any]) -> str:
    """The page with its table made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(listed, results)}\n\n{END}{after}"


def main() -> None:
    """Check if asked to, and write the table."""
    options = argparse.ArgumentParser(prog="python -m docs.site.directory", description=__doc__)
    options.add_argument("--check", action="store_true", help="install and check each distribution first")
    check = options.parse_args().check
    listed = entries(ENTRIES.read_text(encoding="utf-8"))
    before: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = before
    if check:
        results = {}
        for entry in listed:
            results[entry["name"]] = checked(entry)
            print(f"{entry['name']}: {results[entry['name']]['verdict']}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), listed, results), encoding="utf-8")
    if sentences := worse(before, results):
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main()
