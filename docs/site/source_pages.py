"""Source files as pages of the site, with an anchor for each line: `source/trl_grpo_ext/.../name.html#L-12`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx

from .catalogue import source_page


def _collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    formatter = HtmlFormatter(lineanchors="L", anchorlinenos=True, linenos="inline", cssclass="highlight")
    for name in app.config.source_files:
        place = source_page(Path(name))
        code = highlight(Path(name).read_text(encoding="utf-8"), PythonLexer(), formatter)
        title = place.removeprefix("source/") + ".py"
        yield place, {"title": title, "body": f'<h1 class="source">{title}</h1>{code}'}, "page.html"


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the pages of the files in the setting `source_files`."""
    app.add_config_value("source_files", [], "html", list)
    app.connect("html-collect-pages", _collect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
