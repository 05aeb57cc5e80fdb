"""What the measurements share: where they ran, in words, and tables for the terminal and for pages."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table


def machine() -> str:
    """This one, in words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def versions(*names: str) -> str:
    return ", ".join(f"{name} {version(name)}" for name in names)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown whose first column is text and whose others are numbers."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], said: str, page: Path | None) -> None:
    """Print a table with a sentence below, and write both into a page if one is given."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=150)
    console.print(table)
    console.print(said, highlight=False)
    if page is not None:
        write_block(page, title, f"{markdown(columns, rows)}\n\n{said}", create=True)


def write_block(page: Path, name: str, content: str, *, create: bool = False) -> None:
    """Write between the markers that a page has under this name; `create` puts them at its end if it has none."""
    begin = f"<!-- {name} -->"
    end = f"<!-- end of {name} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if create and begin not in text:
        text = f"{text}\n{begin}\n{end}\n" if text else f"{begin}\n{end}\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"error: {page} has no place for them: a line {begin} and one {end} below it.")
    page.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}", encoding="utf-8")
