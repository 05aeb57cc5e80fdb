"""The table of `docs/compatibility.md`, from what the repository itself says: `python -m docs.site.compatibility`.

Nothing is typed in by hand that a file already states: the supported ranges come from `pyproject.toml`, the tested
versions from `constraints.txt`, TRL's from `trainer/upstream/contract.py`.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- tables: python -m docs.site.compatibility -->", "<!-- end of the tables -->"

PACKAGES = ("trl", "transformers", "torch", "accelerate", "peft", "bitsandbytes", "deepspeed", "math-verify")
_PYTHON = re.compile(r"^\| Python \| .*? \| (?P<tested>[\d., ]+) \|$", re.MULTILINE)


def project() -> dict[str, object]:
    """`pyproject.toml`'s table `project`."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def ranges() -> dict[str, str]:
    """By distribution, the versions that pip may install."""
    table = project()
    optional = table["optional-dependencies"]
    assert isinstance(optional, dict)
    named = [*table["dependencies"], *(one for extra in optional.values() for one in extra)]  # type: ignore[misc]
    found = [Requirement(one) for one in named]
    return {one.name: ", ".join(sorted(map(str, one.specifier), reverse=True)) for one in reversed(found)}


def pinned() -> dict[str, str]:
    """By distribution, the version in `constraints.txt`, with which the whole suite runs."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def assigned(file: str, name: str) -> object:
    """A constant of a Python file, read and not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise LookupError(f"{file} has no {name}")


def tables(tested_python: str) -> str:
    """The part of the page between its markers."""
    may, have = ranges(), pinned()
    lines = [
        "| what | may be installed | tested |",
        "| --- | --- | --- |",
        f"| Python | {project()['requires-python']} | {tested_python} |",
    ]
    for name in PACKAGES:
        lines.append(f"| {name} | {may[name]} | {have[name]} |")
    return "\n".join(lines)


def tested_pythons(page: str) -> list[str]:
    """The versions of Python that the page calls tested."""
    match = _PYTHON.search(page)
    return re.findall(r"[\d.]+", match["tested"]) if match else []


def renewed(page: str, python: str) -> str:
    """The page with its tables made again; a Python that it does not have yet is added."""
    pythons = sorted({*tested_pythons(page), python}, key=lambda text: [int(part) for part in text.split(".")])
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(', '.join(pythons))}\n\n{END}{after}"


if __name__ == "__main__":
    written = renewed(PAGE.read_text(encoding="utf-8"), f"{sys.version_info.major}.{sys.version_info.minor}")
    PAGE.write_text(written, encoding="utf-8")
