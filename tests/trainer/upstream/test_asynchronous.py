"""What `upstream.asynchronous` lists of TRL's asynchronous trainer is there, and is all that is used."""

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_rollout_worker

import trl_grpo_ext
from tests.asynchronous.support import made, without_cuda
from trl_grpo_ext.errors import UpstreamError
from trl_grpo_ext.trainer.upstream import asynchronous as upstream

PACKAGE = Path(trl_grpo_ext.__file__).parent
FILES = [*(PACKAGE / "asynchronous").glob("*.py"), PACKAGE / "trainer" / "upstream" / "asynchronous.py"]
LISTED = {*upstream.ATTRIBUTES, *upstream.WORKER_ATTRIBUTES, *itertools.chain(*upstream.METHODS.values())}


def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ("1.15.2", "1.17.0", "2.0"):
        monkeypatch.setattr(upstream, "version", lambda name, installed=installed: installed)
        with pytest.raises(UpstreamError, match=installed):
            upstream.check()


def test_what_is_gone_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    trainer = made(tiny_model, tmp_path)
    for gone in upstream.ATTRIBUTES:
        there = {name: getattr(trainer, name) for name in upstream.ATTRIBUTES if name != gone}
        with pytest.raises(UpstreamError, match=gone):
            upstream.install_loop(SimpleNamespace(**there), object, {}, needed=False)
    upstream.check()
    monkeypatch.delattr(async_rollout_worker._AsyncRolloutLoop, "_push_metrics")
    with pytest.raises(UpstreamError, match="_push_metrics"):
        upstream.check()


def test_every_private_name_of_trl_in_use_is_listed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cuda(monkeypatch)
    trainer = made(tiny_model, tmp_path)
    trainer.rollout_worker.start()
    worker, loop = trainer.rollout_worker, async_rollout_worker._AsyncRolloutLoop
    names = {*dir(AsyncGRPOTrainer), *vars(trainer), *dir(loop), *dir(async_rollout_worker.AsyncRolloutWorker)}
    own = {"_plugins", "_weights", "_functions", "_updates", "_dropped"}
    names |= {*vars(worker), *vars(worker.loop)} - own
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    ours = {"_trl_grpo_ext", "_agreement", "_trainer"}
    assert (used & private) - LISTED - ours == set()
    assert {name for name in LISTED if name.startswith("_")} <= used | {"__init__"}
