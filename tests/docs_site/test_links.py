"""Links as they are read in the repository: files and anchors are there, addresses are well formed."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from docs.site import navigation, staging
from tests.docs_site.blocks import pages

LINK = re.compile(r"\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"``.+?``|`[^`\n]+`", "code", text)


def slug(heading: str) -> str:
    """The anchor that the forge gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        address = urlsplit(link)
        if address.scheme:
            if address.scheme not in ("http", "https") or "." not in address.netloc or address.netloc.endswith("."):
                wrong.append(link)
            continue
        target = page if not address.path else (page.parent / address.path).resolve()
        if not target.exists() or (address.fragment and address.fragment not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_every_page_is_in_the_side_bar_once() -> None:
    listed = sorted(page for page in navigation.PAGES if page != "catalogue/index")
    assert listed == sorted({place.removesuffix(".md") for place in staging.pages()} - {"index"})
