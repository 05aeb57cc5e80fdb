"""One run of `launches_gpu`: started as a person would, stopped when its time is over, read, and checked.

A run counts only where it was what it should be: as many steps as asked for, each with a signal and a gradient, and the
weights, layers and optimizer of its cell. Two runs are compared only where the settings that they saved are the same.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig

from bench.launch_cells import PLAIN, ROOT, Cell, Settings, Size, command, environment

Marks = Sequence[Mapping[str, Any]]
MAY_DIFFER = ("output_dir", "reward_weights", "eval_on_start", "model_init_kwargs")
"""Settings that the two sides have different, of which none changes the work of a training step. Of the last one, what
matters is looked at by itself."""

ERROR = re.compile(r"(error|[\w.]*(Error|Exception|Interrupt))\b.*:")


@dataclass(frozen=True)
class Step:
    """One optimizer step, on the clock."""

    generation: float
    """Seconds from the end of the step before until its completions were there."""
    update: float
    """Seconds from then until the optimizer had stepped."""
    tokens: int
    """Of its completions."""


@dataclass
class Run:
    """What came of one run.

    Attributes:
        cell: Its name.
        arm: One of `ARMS`.
        problems: Why it does not count; none where it does.
        seconds: From the start of the process to its end.
        steps: From the second on: the first one also pays for what is done once.
        logged: TRL's own `step_time` of the same steps: without the optimizer, and not waiting for the device.
        peak: Bytes at most from the second step on (see `launch_cells_probe`).
        facts: What the optimizer was given, from inside the process.
        settings: As the run saved them, for `differences`.
    """

    cell: str
    arm: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    peak: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)

    @property
    def generation(self) -> float:
        """Seconds per step."""
        return sum(step.generation for step in self.steps) / len(self.steps)

    @property
    def update(self) -> float:
        """Seconds per step."""
        return sum(step.update for step in self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens generated and trained on."""
        return sum(step.tokens for step in self.steps) / len(self.steps) / (self.generation + self.update)

    @property
    def step_time(self) -> float:
        """TRL's, seconds per step."""
        return sum(self.logged) / len(self.logged)


def measure(
    cell: Cell, arm: str, settings: Settings, size: Size, folder: Path, problems: tuple[Path, Path], limit: float
) -> Run:
    """Start one run, wait for it at most `limit` seconds, and read what it left. Its output goes to `folder/said`."""
    run = Run(cell.name, arm)
    started = time.monotonic()
    status = finish(command(cell, arm, settings, folder, problems), folder, size.cpu, limit)
    run.seconds = time.monotonic() - started
    said = (folder / "said").read_text(encoding="utf-8", errors="replace")
    if status is None:
        run.problems.append(f"stopped after {run.seconds:.0f} s, its time being over")
    elif status != 0:
        run.problems.append(f"ended with status {status}: {last_line(said)!r}")
    else:
        try:
            read(run, folder, said, cell, settings, size)
        except (OSError, KeyError, ValueError) as error:
            run.problems.append(f"what it left cannot be read: {error!r}")
    return run


def finish(words: Sequence[str], folder: Path, cpu: bool, limit: float) -> int | None:
    """Run a command in a session of its own; None where it had to be stopped, with all that it had started."""
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(folder, cpu), stdout=said, stderr=said, start_new_session=True
        )
        try:
            return process.wait(max(limit, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(said: str) -> str:
    """The last error that a run told of, or else the last thing that it said, at most 200 characters of it."""
    lines = [line for line in map(str.strip, said.splitlines()) if line]
    errors = [line for line in lines if ERROR.match(line) and not line.startswith("subprocess.")]  # the launcher's
    return (errors or lines or ["nothing"])[-1][:200]


# ------------------------------------------------------------------------------------------------------------ reading


def read(run: Run, folder: Path, said: str, cell: Cell, settings: Settings, size: Size) -> None:
    """Fill in a run from its files, and its problems where it was not what it should be."""
    marks = read_marks((folder / "marks.jsonl").read_text(encoding="utf-8"))
    logs = printed_logs(said) if run.arm == PLAIN else saved_logs(folder / "output" / "metrics.json")
    stepped = [mark for mark in marks if mark["what"] == "stepped"]
    if not stepped:
        run.problems.append("its optimizer never stepped")
        return
    run.steps = steps_of(marks, size.completions)
    run.logged = [log["step_time"] for log in logs[1:]]
    run.peak = max((mark["peak"] for mark in stepped[1:]), default=0)
    run.facts = {name: value for name, value in stepped[0].items() if name not in ("what", "at", "peak")}
    saved = torch.load(folder / "output" / "training_args.bin", weights_only=False)  # written by this run
    run.settings = {one.name: getattr(saved, one.name, None) for one in dataclasses.fields(GRPOConfig)}
    loaded = saved.model_init_kwargs or {}
    run.settings |= {name: str(loaded.get(name)) for name in ("dtype", "attn_implementation", "revision")}
    dtype, bits = settings.get("dtype", cell.dtype), cell.bits
    run.problems += wrong_steps(run, logs, len(stepped), size)
    run.problems += wrong_weights(run, dtype, bits, size.cpu)
    if run.arm != PLAIN:
        facts = json.loads((folder / "output" / "metrics.json").read_text(encoding="utf-8"))["run"]
        run.problems += wrong_facts(facts, {"engine": "one_process", "processes": 1, "bits": bits, "dtype": dtype})


def read_marks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def steps_of(marks: Marks, completions: int) -> list[Step]:
    """The steps from the second on. Batches of another size are the recipe's evaluations.

    A step is what lies between the optimizer's last step and its own; the last batch before it is what it trains on.
    """
    steps: list[Step] = []
    before: float | None = None
    batch: Mapping[str, Any] | None = None
    for mark in marks:
        if mark["what"] == "generated" and mark["rows"] == completions:
            batch = mark
        elif mark["what"] == "stepped":
            if before is not None and batch is not None:
                steps.append(Step(batch["at"] - before, mark["at"] - batch["at"], batch["tokens"]))
            before, batch = mark["at"], None
    return steps


def printed_logs(said: str) -> list[dict[str, float]]:
    """TRL's log lines of training steps, as transformers prints them: a dictionary with its numbers as text."""
    logs = []
    for line in said.splitlines():
        if not (line.startswith("{") and "'step_time'" in line):
            continue
        try:
            logs.append({name: float(value) for name, value in ast.literal_eval(line).items() if value is not None})
        except (ValueError, SyntaxError, TypeError):
            continue  # another library's line; a log that is missing is noticed by its number
    return logs


def saved_logs(metrics: Path) -> list[dict[str, float]]:
    """The same of the recipe, from its `metrics.json`."""
    history = json.loads(metrics.read_text(encoding="utf-8"))["history"]
    return [{name: value for name, value in log.items() if value is not None} for log in history if "step_time" in log]


# ----------------------------------------------------------------------------------------------------------- checking


def wrong_steps(run: Run, logs: Sequence[Mapping[str, float]], stepped: int, size: Size) -> list[str]:
    """What is wrong with the steps of a run: their number, a batch without signal, a gradient of nothing."""
    found = []
    if not stepped == len(logs) == len(run.steps) + 1 == size.steps:
        found.append(
            f"{size.steps} steps were asked for: the optimizer made {stepped}, {len(logs)} were logged, and "
            f"{len(run.steps)} from the second on had a batch of {size.completions} completions"
        )
    flat = [number for number, log in enumerate(logs, 1) if log.get("frac_reward_zero_std", 1.0) > 0]
    if flat:
        found.append(f"steps {flat} had groups without signal, so the sides may not have had the same work")
    gradient = [log.get("grad_norm", 0.0) for log in logs]
    if not all(0 < norm < math.inf for norm in gradient):
        found.append(f"the gradient norms are {gradient}, expected all above 0")
    if any(not 0 < step.tokens <= size.completions * size.tokens for step in run.steps):
        found.append(f"a batch has {[step.tokens for step in run.steps]} tokens, not up to {size.tokens} each")
    return found


def wrong_weights(run: Run, dtype: str, bits: int, cpu: bool) -> list[str]:
    """What is wrong with what was trained, as the optimizer of the run had it."""
    facts = run.facts
    # TRL casts the adapters of a 4-bit model to bfloat16, whatever the other weights are.
    wanted = {"trained_dtypes": ["bfloat16" if bits else dtype], "device": "cpu" if cpu else "cuda"}
    found = wrong_facts(facts, wanted)
    if (facts["layers_in_4_bits"] > 0) != (bits == 4):
        found.append(f"{facts['layers_in_4_bits']} layers are in 4 bits where {bits} bits were asked for (0: none)")
    return found


def wrong_facts(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {facts.get(name)!r}, not {value!r}" for name, value in wanted.items() if facts.get(name) != value
    ]


def differences(run: Run, plain: Run) -> list[str]:
    """What two runs of a cell did not have alike: settings that matter, and what the optimizer was given."""
    found = [
        f"{name} is {run.settings.get(name)!r} here and {value!r} in {plain.arm}"
        for name, value in plain.settings.items()
        if name not in MAY_DIFFER and run.settings.get(name) != value
    ]
    return found + [f"{fact}, unlike in {plain.arm}" for fact in wrong_facts(run.facts, plain.facts)]
