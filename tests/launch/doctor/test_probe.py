"""What is done to modules right after they are imported."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trl_grpo_ext.launch.doctor.probe import AfterImport


def test_after_import_acts_once_and_not_when_somebody_only_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    acted: list[ModuleType] = []
    monkeypatch.setattr(sys, "meta_path", [AfterImport({"asked_for": acted.append}), *sys.meta_path])
    for _ in range(2):  # as `datasets` asks for torch
        assert importlib.util.find_spec("asked_for") is not None
    assert acted == []
    module = importlib.import_module("asked_for")
    assert acted == [module]
    importlib.reload(module)
    assert acted == [module]
    monkeypatch.delitem(sys.modules, "asked_for")
