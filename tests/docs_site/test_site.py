"""The site: built without a warning or the network, every link in it leads somewhere, and a browser reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.site import navigation
from docs.site.catalogue import FOLDERS, built_in
from tests.docs_site.blocks import ROOT

pytestmark = pytest.mark.slow


def run_build(out: Path, code: str = "sys.exit(build.main())") -> subprocess.CompletedProcess[str]:
    """Build in a process of its own that cannot make a connection."""
    without_network = (
        "import socket, sys\n"
        "def refuse(*words): raise OSError('the build asked for the network')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "from docs.site import build\n"
    )
    return subprocess.run(
        [sys.executable, "-c", without_network + code, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    done = run_build(out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a warning would be here
    return out


@dataclass
class Page(HTMLParser):
    """What a page links to, loads and can be linked to."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loads += [values[name] for name in ("src", "srcset", "poster", "data") if name in values and tag != "a"]
        if tag == "link" and values.get("rel") not in ("next", "prev", "index", "search"):
            self.loads.append(values["href"])


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Page]:
    pages = {}
    for file in sorted(site.rglob("*.html")):
        pages[file] = Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    return pages


def test_every_page_is_there(site: Path) -> None:
    wanted = [f"{page}.html" for page in navigation.PAGES] + ["index.html", "search.html"]
    wanted += [f"catalogue/{FOLDERS[info.kind]}/{info.name}.html" for info in built_in()]
    assert [name for name in wanted if not (site / name).is_file()] == []


def test_every_link_inside_leads_to_a_file_and_an_anchor(site: Path, parsed: dict[Path, Page]) -> None:
    wrong = []
    for file, page in parsed.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or link.startswith("//"):
                continue
            target = (file.parent / unquote(address.path)).resolve() if address.path else file
            anchor = unquote(address.fragment)
            if target.suffix != ".html" and target.is_file() and not anchor:
                continue  # a picture, say
            if target not in parsed or (anchor and anchor not in parsed[target].ids):
                wrong.append(f"{file.relative_to(site)} -> {link}")
    assert sum(len(page.links) for page in parsed.values()) > 1000
    assert wrong == []


def test_a_page_loads_nothing_from_elsewhere(site: Path, parsed: dict[Path, Page]) -> None:
    for file, page in parsed.items():
        for load in page.loads:
            address = urlsplit(load)
            assert not address.scheme or address.scheme == "data", f"{file.relative_to(site)} loads {load}"
            assert not load.startswith("//")
            if not address.scheme:
                assert (file.parent / unquote(address.path)).resolve().is_file(), f"{file.relative_to(site)}: {load}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text.replace("'", "").replace('"', "")
        assert "@import" not in text


@pytest.mark.parametrize(("link", "status"), [("#a", 0), ("#nowhere", 1)])
def test_a_warning_fails_the_build(link: str, status: int, tmp_path: Path) -> None:
    broken = (
        "from docs.site import staging\nfrom pathlib import Path\n"
        f"stage = Path({str(tmp_path)!r}) / 'pages'\nstage.mkdir()\n"
        f"(stage / 'index.md').write_text('# A\\n\\n[b]({link})\\n')\n"
        "staging.stage = staging.close = lambda folder: None\n"
        "build.catalogue.write = lambda folder: []\n"
        f"sys.exit(build.build(Path({str(tmp_path)!r}) / 'out', stage))\n"
    )
    done = run_build(tmp_path / "out", broken)
    assert done.returncode == status, done.stderr
    assert ("WARNING" in done.stderr and "nowhere" in done.stderr) == bool(status)


# ---------------------------------------------------------------------------------------------------- browser
