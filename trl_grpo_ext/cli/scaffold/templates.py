"""Filling in a template: Jinja, where an unknown name is an error, and filters for each place a text may go to."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.cells import cell_len

LINE_LENGTH = 120
"""As the scaffold's own pyproject.toml sets it."""

DOCSTRING_WIDTH = 108
"""Columns for a docstring's text: 120, less the indentation and the quotes, and some to spare."""


def fill(template: str, values: Mapping[str, object]) -> str:
    """Fill in one template.

    Args:
        template: Its path under `templates/`, without `.jinja`.
        values: What stands in it.
    """
    return _environment().get_template(f"{template}.jinja").render(values)


def quoted(text: str) -> str:
    """As a string of TOML, which a string of JSON also is, once it holds no DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def docstring(text: str) -> str:
    """As the beginning of a class's docstring: no double quotes or lone backslashes in it, and wrapped."""
    safe = text.replace("\\", "\\\\").replace('"', "'")
    wide = cell_len(safe) != len(safe)  # a wide character takes two columns
    width = DOCSTRING_WIDTH // 2 if wide else DOCSTRING_WIDTH
    return "\n    ".join(textwrap.wrap(safe, width, break_long_words=False, break_on_hyphens=False))


def markdown(text: str) -> str:
    """As a paragraph of Markdown that neither begins another element nor opens a code span, a link or a tag."""
    escaped = re.sub(r"([\\`\[<&])", r"\\\1", text)
    return re.sub(r"^(\d*)([#>+\-=~*_|.)])", r"\1\\\2", escaped)


def imported(name: str, module: str) -> str:
    """The import of one name, in parentheses where the line would be longer than ruff and its formatter leave it."""
    line = f"from {module} import {name}"
    return line if len(line) <= LINE_LENGTH else f"from {module} import (\n    {name},\n)"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trl_grpo_ext.cli.scaffold"),
        undefined=StrictUndefined,
        autoescape=False,  # nothing here is HTML; the filters below escape for TOML, Python and Markdown
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quoted": quoted, "docstring": docstring, "markdown": markdown, "imported": imported}
    return environment
