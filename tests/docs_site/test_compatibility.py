"""`docs/compatibility.md` says what the files say that decide, and what is installed where the tests run."""

from __future__ import annotations

from docs.site import compatibility
from docs.site.compatibility import PAGE, renewed

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_files_say() -> None:
    python = compatibility.tested_pythons(TEXT)[0]
    assert renewed(TEXT, python) == TEXT, "run: python -m docs.site.compatibility"
