"""How the tests start a recipe: as a person would, or forked off a process that has made the imports of the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forking

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRIPT = RECIPES / "gsm8k_grpo.py"
MODEL = RECIPES / "embedded" / "model"
GSM8K = os.environ.get("TRL_GRPO_EXT_GSM8K")
HAS_GSM8K = GSM8K is not None and Path(GSM8K, "train.jsonl").is_file()
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "num_generations_eval": 4,
    "per_device_eval_batch_size": 16,
    "train_problems": 64,
    "eval_problems": 16,
    "logging_steps": 1,
    "save_total_limit": 2,
    "lr_scheduler_type": "constant",
}


@dataclass
class Launch:
    """One start of the script. `{folder}` in an argument stands for the folder of this launch."""

    arguments: list[str] = field(default_factory=list)
    launcher: str | None = "one_process.yaml"
    """The file for `accelerate launch`; None: `python gsm8k_grpo.py`."""
    forked: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path, Callable[[str], Finished]], None] = lambda folder, finished: None
    says: tuple[str, ...] = ()


@dataclass
class Finished:
    status: int
    out: str
    err: str
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "metrics.json").read_text()))

    @property
    def training(self) -> list[dict[str, Any]]:
        """The log lines of the training steps."""
        return [line for line in self.metrics["history"] if "reward" in line]

    @property
    def args(self) -> Any:
        return torch.load(self.output / "training_args.bin", weights_only=False)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error")]

    def completions(self) -> list[dict[str, Any]]:
        """What `--log_completions` wrote: one row for each completion."""
        parquet = pytest.importorskip("pyarrow.parquet")
        files = sorted((self.output / "completions").glob("*.parquet"))
        return [row for file in files for row in parquet.read_table(file).to_pylist()]


def prepared(launch: Launch, folder: Path, finished: Callable[[str], Finished]) -> list[str]:
    """Write the files of a launch and return the words of its command line, from the script on."""
    for name, text in launch.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    launch.prepare(folder, finished)
    in_config = "".join(text for name, text in launch.files.items() if name.endswith(".yaml"))
    words = [str(SCRIPT), "--output_dir", "{folder}/output"]
    for name, value in {**SMALL, **launch.sizes}.items():
        if f"--{name}" not in launch.arguments and f"{name}:" not in in_config:
            words += [f"--{name}", str(value)]
    return [word.replace("{folder}", str(folder)) for word in [*words, *launch.arguments]]


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TRL_GRPO_EXT_", "FORCE_"))}
    return {
        **clean,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "empty"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
        # As in an activated environment: DeepSpeed compiles a small extension with its own ninja.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **{name: value.replace("{folder}", str(folder)) for name, value in more.items()},
    }


def start(launch: Launch, folder: Path, finished: Callable[[str], Finished]) -> Finished:
    command = [sys.executable]
    if launch.launcher is not None:
        config = RECIPES / "accelerate" / launch.launcher.replace("{folder}", str(folder))
        command += ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [*command, *prepared(launch, folder, finished)],
        cwd=folder,
        env=environment(folder, **launch.environment),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def start_forked(
    launches: dict[str, Launch], folders: dict[str, Path], finished: Callable[[str], Finished]
) -> dict[str, Finished]:
    lines = [(prepared(launch, folders[name], finished), folders[name]) for name, launch in launches.items()]
    return dict(zip(launches, forked(SCRIPT, lines), strict=True))


def forked(script: Path, lines: Sequence[tuple[list[str], Path]]) -> list[Finished]:
    """Run command lines of one script, each in its folder, one after the other and without the imports."""
    done = []
    for (_, *words), folder in lines:
        ended = forking.run(script, words, cwd=folder, env=environment(folder), timeout=1800)
        done.append(Finished(ended.returncode, ended.stdout, ended.stderr, folder))
    return done
