"""The pages as the site takes them: those of `docs/` and of the root in one folder, with their links corrected.

In the repository a page links to files as they lie there, so that the links work where its files are read. In the site
all pages lie in one folder, and files that are no page of it are named without a link.
"""

import os
import re
import shutil
from pathlib import Path

from .navigation import FROM_THE_ROOT, toctrees
from .rule_tables import with_rules

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(\s*)(```+|~~~+)")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|`[^`]*`)*)\]\((?P<target>[^()\s]+)\)")
_PICTURES = ("*.png", "*.svg")


def pages() -> dict[str, Path]:
    """By place in the site, the file of every page that is written by hand."""
    found = {page: ROOT / name for name, page in FROM_THE_ROOT.items()}
    found |= {file.name: file for file in sorted(DOCS.glob("*.md"))}
    return found | {"examples/README.md": DOCS / "examples" / "README.md"}


def stage(folder: Path) -> None:
    """Put all pages and pictures into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = pages()
    places = {file: place for place, file in written.items()}
    for place, file in written.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = with_rules(file.read_text(encoding="utf-8"))
        target.write_text(corrected(text, file, places), encoding="utf-8")
    for pattern in _PICTURES:
        for picture in (*DOCS.glob(pattern), *DOCS.glob(f"images/{pattern}")):
            target = folder / picture.relative_to(DOCS)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(picture, target)


def close(folder: Path) -> None:
    """Add the table of contents to the front page, once all pages are there."""
    front = folder / "index.md"
    there = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.md")}
    front.write_text(front.read_text(encoding="utf-8") + "\n" + toctrees(there), encoding="utf-8")


def corrected(text: str, file: Path, places: dict[Path, str]) -> str:
    """A page's text with links for its place in the site; code is left alone."""
    lines, fence = [], ""
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if match and (not fence or line.strip() == fence):
            fence = "" if fence else match[2]
        lines.append(line if fence or match else _LINK.sub(lambda link: _mend(link, file, places), line))
    return "\n".join(lines)


def _mend(link: re.Match[str], file: Path, places: dict[Path, str]) -> str:
    target, _, anchor = link["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = (file.parent / target).resolve()
    if not path.exists():
        raise FileNotFoundError(f"{file.relative_to(ROOT)} links to {link['target']!r}, which does not exist.")
    if path in places:
        new = places[path]
    elif path.is_relative_to(DOCS) and path.suffix in (".png", ".svg"):
        new = path.relative_to(DOCS).as_posix()
    else:
        return link["text"]  # a file of the repository that is no page
    here = Path(places[file]).parent.as_posix()
    new = os.path.relpath(new, here)
    text = "" if path in places and link["text"].strip("`").endswith(path.name) else link["text"]  # "": its title
    return f"{link['image']}[{text}]({new}{'#' + anchor if anchor else ''})"
