"""DDP, ZeRO-3 and FSDP2 on all GPUs of a host, ours beside plain TRL: `python -m bench.gpus`.

NEVER RUN: no host with several GPUs was there. The options are those of `bench.gpu`, and so is the page.

Each engine trains Qwen2.5-0.5B's shape in full with the shipped launch file, on scripted completions, all GPUs. A run
whose model is not wrapped by the engine that was asked for, or whose shards are not shards, fails.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from bench.gpu import DIFFER, OURS, PLAIN, ROOT, TIMES, Run, Section, main

ENGINES = {"DDP": "ddp.yaml", "ZeRO-3": "zero3.yaml", "FSDP2": "fsdp2.yaml"}


def gpus() -> int:
    """How many this host has; asked in another process, because this one must hold nothing on them."""
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
            f"`python -m bench.gpus` on a host that has them; written without one. Qwen2.5-0.5B's shape in "
            "full, for each GPU 2 x 8 completions of up to 512 tokens ({DIFFER}). The second "
            "and third of three updates, the slower rank's; peaks of the fullest rank.",
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
    import torch
    from accelerate import PartialState
    from transformers import TrainerCallback

    from bench import gpu_runs
    from bench.compact_rollouts import PROFILES, Cell, Script, Size
    from tests.recipes.engines.on_cpu import shapes

    state = PartialState()
    ranks, share = state.num_processes, [0.0]
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
        """What this rank stores of all weights."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
            found = [shapes(parameter) for parameter in model.parameters()]
            whole = sum(int(torch.tensor(shape["whole"]).prod()) for shape in found)
            share[0] = sum(shape["elements"] for shape in found) / whole

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
    if engine == "DDP":
        assert share[0] == 1.0, f"DDP keeps all weights on each rank; here is {share[0]:.2f} of them"
    else:
        assert share[0] < 1.2 / ranks, f"{engine} on {ranks} ranks: {share[0]:.2f} of the weights are on this one"
    memory = gpu_runs.WATCH.memory("update")
    steps = gpu_runs.WATCH.steps[1:]
    mine = [
        min(sum(s.values()) - s.get("generation", 0.0) for s in steps),
        share[0],
        *(v or 0.0 for v in memory.values()),
    ]
    gathered: list[Any] = [None] * ranks
    if torch.distributed.is_initialized():
        torch.distributed.all_gather_object(gathered, mine)
    else:  # the recipe has left the process group: what this rank saw
        gathered = [mine]
    worst = [max(values) for values in zip(*gathered, strict=True)]
    figures = {"update, s": worst[0], "share of the weights on a rank": worst[1]}
    job.say(job.rows[0], {**figures, "allocated, GB": worst[2], "reserved, GB": worst[3]})


if __name__ == "__main__":
    main(None, sections(gpus()))
