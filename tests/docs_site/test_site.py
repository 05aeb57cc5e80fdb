"""The site: built without the network or a warning, which a link that leads nowhere would give."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.site import navigation
from docs.site.catalogue import FOLDERS, built_in
from tests.docs_site.blocks import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a process of its own that cannot make a connection."""
    out = tmp_path_factory.mktemp("site") / "site"
    without_network = (
        "import socket, sys\n"
        "def refuse(*words): raise OSError('the build asked for the network')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "from docs.site import build\n"
        "sys.exit(build.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", without_network, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a warning would be here
    return out


class Page(HTMLParser):
    """What a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.loads += [values[name] for name in ("src", "srcset", "poster", "data") if name in values and tag != "a"]
        if tag == "link" and values.get("rel") not in ("next", "prev", "index", "search"):
            self.loads.append(values["href"])


def test_every_page_is_there(site: Path) -> None:
    wanted = [f"{page}.html" for page in navigation.PAGES] + ["index.html", "search.html"]
    wanted += [f"catalogue/{FOLDERS[info.kind]}/{info.name}.html" for info in built_in()]
    assert [name for name in wanted if not (site / name).is_file()] == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for file in site.rglob("*.html"):
        for load in Page(file.read_text(encoding="utf-8")).loads:
            address = urlsplit(load)
            assert not address.scheme or address.scheme == "data", f"{file.relative_to(site)} loads {load}"
            assert not load.startswith("//")
            if not address.scheme:
                assert (file.parent / unquote(address.path)).resolve().is_file(), f"{file.relative_to(site)}: {load}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text.replace("'", "").replace('"', "")
        assert "@import" not in text
