"""Nothing is left behind by a test of the sandbox."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trl_grpo_ext.rewards._sandbox import jobs as sandbox


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No directory and no process but the server outlives a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    server = sandbox._SERVER.process
    if server is not None and server.poll() is None:  # a keeper ends after it has answered
        assert psutil.wait_procs(psutil.Process(server.pid).children(recursive=True), timeout=30)[1] == []
    assert list(tmp_path.glob("python-tests-*")) == []
