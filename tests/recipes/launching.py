"""How the tests start a recipe: as a person would, or forked off a process that has made the imports of the script."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from tests import forking

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MODEL = RECIPES / "embedded" / "model"
SMALL: dict[str, Any] = {"max_steps": 2, "num_generations": 4, "num_generations_eval": 4, "logging_steps": 1}
SMALL |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "save_total_limit": 2}
SMALL |= {"train_problems": 64, "eval_problems": 16, "lr_scheduler_type": "constant"}


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

    def completions(self) -> list[dict[str, Any]]:
        """What `--log_completions` wrote: one row for each completion."""
        files = sorted((self.output / "completions").glob("*.parquet"))
        return [row for file in files for row in parquet.read_table(file).to_pylist()]

    def assert_refused(self, *says: str) -> None:
        """It ended with one sentence, and trained nothing."""
        assert self.status == 2, self.err[-2000:]
        (line,) = [line for line in self.err.splitlines() if line.startswith("error")]
        assert "Traceback" not in self.err
        assert [words for words in says if words not in line] == [], line
        assert not list(self.output.rglob("*.safetensors"))


def options(**values: Any) -> list[str]:
    """The words of a command line."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


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
        **more,
    }


def forked(script: Path, folder: Path, *words: str) -> Finished:
    """Run a recipe, forked off a process with its imports; `{folder}` in a word stands for the folder."""
    line = ["--output_dir", f"{folder}/output", *(word.replace("{folder}", str(folder)) for word in words)]
    done = forking.run(script, line, cwd=folder, env=environment(folder), timeout=1800)
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def trained(script: Path, folder: Path, *words: str) -> Finished:
    """The same for a run that succeeds."""
    done = forked(script, folder, *words)
    assert done.status == 0, done.err[-3000:]
    return done


def launched(launch_file: Path, script: Path, folder: Path, *words: str) -> Finished:
    """Run a recipe as a person does, by `accelerate launch`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch_file), str(script)]
    command += ["--output_dir", f"{folder}/output", *words]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600)
    return Finished(done.returncode, done.stdout, done.stderr, folder)
