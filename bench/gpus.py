"""DDP, ZeRO-3 and FSDP2 on all GPUs of a host, ours beside plain TRL: `python -m bench.gpus`.

NEVER RUN: no host with several GPUs was there. The options are those of `bench.gpu`, and so is the page.

Each engine trains Qwen2.5-0.5B's shape in full with the shipped launch file, on scripted completions, all GPUs. A run
whose model is not wrapped by the engine that was asked for, or whose shards are not shards, fails.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

from bench.gpu import DIFFER, OURS, PLAIN, ROOT, TIMES, Run, Section, main

ENGINES = {"DDP": "ddp.yaml", "ZeRO-3": "zero3.yaml", "FSDP2": "fsdp2.yaml"}


def gpus() -> int:
    """How many this host has; asked in another process, because this one must hold nothing on them. On a CPU: two.

    There only DDP can be shown, `--only` does not choose among engines, and the other two fail.
    """
    if "cpu" in sys.argv:
        return 2
    asked = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout)


def launcher(file: str, processes: int) -> tuple[str, ...]:
    own = ROOT / "recipes" / "accelerate" / file
    start = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(own))
    return (*start, "--num_processes", str(processes))


def sections(processes: int) -> tuple[Section, ...]:
    rows = [(engine, arm) for engine in ENGINES for arm in (PLAIN, OURS)]
    return (
        Section(
            "S",
            "On several GPUs",
            "`python -m bench.gpus` on a host that has them; it was written without one. Qwen2.5-0.5B's shape in full, "
            f"for each GPU 2 x 8 completions of up to 512 tokens ({DIFFER}). The quicker of two updates after the "
            "first, on the slowest rank; peaks of the fullest rank.",
            ("update, s", "allocated, GB", "reserved, GB", "share of the weights on a rank", TIMES),
            tuple(
                Run(
                    "several",
                    (f"{engine}, {arm}",),
                    90,
                    {"engine": engine, "arm": arm},
                    {},
                    launcher(ENGINES[engine], processes),
                )
                for engine, arm in rows
            ),
            ("update, s", {f"{engine}, {OURS}": f"{engine}, {PLAIN}" for engine in ENGINES}),
        ),
    )


SECTIONS = sections(1)
"""For the page; how many GPUs there are is asked where it runs."""


def measure(job: Any, engine: str, arm: str) -> None:
    """One rank."""
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from transformers import TrainerCallback

    from bench import gpu_runs
    from bench.compact_rollouts import PROFILES, Cell, Script, Size
    from tests.recipes.engines.on_cpu import shapes

    state = PartialState(cpu=not job.cuda)
    ranks, measured, everyone = state.num_processes, {"share": 0.0}, []
    assert ranks > 1, "one process is no engine of several"
    if state.is_main_process:
        job.model("0.5B")
    state.wait_for_everyone()

    class Slice(Script):
        """This rank's part of the script."""

        def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            whole = super().rollout(["-"] * self.size.rows, trainer)
            first = state.process_index * len(prompts)
            return {name: rows[first : first + len(prompts)] for name, rows in whole.items()}

        def reward(self, completions: list[Any], **columns: Any) -> list[float]:
            whole = super().reward([None] * self.size.rows)
            first = state.process_index * len(completions)
            return whole[first : first + len(completions)]

    class Shards(TrainerCallback):
        """What this rank stores of all weights; at the end what every rank measured, before they part."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
            found = [shapes(parameter) for parameter in model.parameters()]
            whole = sum(math.prod(shape["whole"]) for shape in found)
            measured["share"] = sum(shape["elements"] for shape in found) / whole

        def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            steps = [sum(step.values()) - step.get("generation", 0.0) for step in gpu_runs.WATCH.steps[1:]]
            memory = gpu_runs.WATCH.memory("update")
            everyone.extend(gather_object([{"update, s": min(steps), **measured, **memory}]))

    gpu_runs.SCRIPT = Slice(Size(2 * ranks, 8, job.size(512, 16)))
    gpu_runs.SCRIPT.cell = Cell(PROFILES[2], 40)
    words = gpu_runs.recipe_words(
        job,
        "qwen2.5_0.5b.yaml",
        "0.5B",
        {
            "rewards": "bench.gpu_runs:scripted_reward",
            "max_steps": 3,
            "max_completion_length": job.size(512, 16),
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 8,
            "engine": {"DDP": "ddp", "ZeRO-3": "zero3", "FSDP2": "fsdp2"}[engine],
            "processes": ranks,
        },
    )
    kept = gpu_runs.TimedOurs if arm == OURS else gpu_runs.TimedPlain
    original = kept.__init__

    def with_shards(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self.add_callback(Shards())

    kept.__init__ = with_shards  # type: ignore[method-assign]
    gpu_runs.run_recipe(words, arm)
    shares = [rank["share"] for rank in everyone]
    if engine == "DDP":
        assert shares == [1.0] * ranks, f"DDP keeps all weights on each rank; here are {shares} of them"
    else:
        assert max(shares) < 1.2 / ranks, f"{engine} on {ranks} ranks: {shares} of the weights are on each"
    figures = {"update, s": max(rank["update, s"] for rank in everyone), "share of the weights on a rank": max(shares)}
    for column in ("allocated, GB", "reserved, GB"):
        figures[column] = max(rank[column] for rank in everyone) if job.cuda else None
    job.say(job.rows[0], figures)


if __name__ == "__main__":
    main(None, sections(gpus()))
