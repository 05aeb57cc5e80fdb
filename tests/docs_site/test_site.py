"""The site: built without the network or a warning, which a link that leads nowhere would give."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_every_page_is_there(site: Path) -> None:
    wanted = [f"{page}.html" for page in navigation.PAGES] + ["index.html", "search.html"]
    wanted += [f"catalogue/{FOLDERS[info.kind]}/{info.name}.html" for info in built_in()]
    assert [name for name in wanted if not (site / name).is_file()] == []
