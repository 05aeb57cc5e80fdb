"""The tables of docs/gpu.md: each section's rows, the runs that fill them, and how long a run may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """One process."""

    function: str
    rows: tuple[str, ...]
    seconds: float
    keywords: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "; ".join(self.rows)


@dataclass(frozen=True)
class Section:
    """A table of the page. `against` names a column and the row that each row's figure is divided by in `TIMES`."""

    name: str
    title: str
    text: str
    columns: tuple[str, ...]
    runs: tuple[Run, ...]
    against: tuple[str, Mapping[str, str]] | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(row for run in self.runs for row in run.rows)


PLAIN, OURS = "plain TRL", "ours"
TIMES = "speed / plain TRL's"
DIFFER, EQUAL = "lengths differ, 40 % without signal", "lengths equal, all with signal"
HALF = "qwen2.5_0.5b.yaml"
MEMORY = ("seconds", "allocated, GB", "reserved, GB", "doctor's estimate, GB", "estimate / measured")


def _pairs(*profiles: str) -> dict[str, str]:
    return {f"{OURS}, {profile}": f"{PLAIN}, {profile}" for profile in profiles}


SECTIONS = (
    Section(
        "1",
        "The tests marked gpu",
        "Parity with TRL in bf16, and every hook and aggregation against the CPU (`pytest -m gpu`).",
        ("outcome", "seconds"),
        (Run("gpu_tests", ("all of them",), 90),),
    ),
    Section(
        "2",
        "Compact updates against TRL's own cut",
        "A tiny model on scripted completions of different lengths: ‖exact − off‖ / ‖off‖ of the gradient of an "
        "optimizer step. Beside it the gap that the precision makes by itself: off in this precision against off in "
        "float32.",
        ("gradient gap", "gap of the precision itself"),
        (Run("compact_against_off", ("float32", "bf16 with checkpointing", "QLoRA in bf16"), 45),),
    ),
    Section(
        "3",
        "An update of Qwen2.5-0.5B in full, at the shipped batch",
        f"`{HALF}` as shipped: 16 x 8 completions of up to 512 tokens, scripted, so that nothing is generated. With "
        "log-normal lengths 2 % are at the limit, and 40 % of the rows have no signal; with equal lengths there is "
        "nothing to save. Seconds of an optimizer step without the generation; peaks of the allocator in it.",
        ("update, s", "allocated, GB", "reserved, GB", "doctor's estimate, GB", "estimate / measured", TIMES),
        tuple(
            Run("scripted_updates", (f"{arm}, {DIFFER}", f"{arm}, {EQUAL}"), 60, {"arm": arm}) for arm in (PLAIN, OURS)
        ),
        ("update, s", _pairs(DIFFER, EQUAL)),
    ),
    Section(
        "4",
        "The same with generation",
        "The recipe `gsm8k_grpo.py` on generated word problems, its second optimizer step. Random weights never end a "
        "completion, so all have 512 tokens, and compact updates have nothing to save.",
        ("step, s", "generation, s", "update, s", "tokens/s", "allocated, GB", "reserved, GB", TIMES),
        tuple(Run("with_generation", (arm,), 65, {"arm": arm}) for arm in (PLAIN, OURS)),
        ("step, s", {OURS: PLAIN}),
    ),
    Section(
        "5",
        "Qwen2.5-7B with QLoRA on 24 GB",
        "`qwen2.5_7b_qlora_24gb.yaml` as shipped, torch's allocator held to 24 GiB: 64 completions of 512 tokens are "
        "generated once, and two updates made of them; the second is measured. The estimate is the doctor's for the "
        "stage; measured is what torch reserved at most and what CUDA takes beside it.",
        MEMORY,
        (
            Run(
                "stages",
                ("load", "generation", "update"),
                170,
                {"config": "qwen2.5_7b_qlora_24gb.yaml", "shape": "7B", "gigabytes": 24},
            ),
        ),
    ),
    Section(
        "6",
        "Qwen2.5-1.5B with LoRA",
        f"`{HALF}` with the larger model and `--use_peft`, adapters of rank 16 on all linear layers. Otherwise as 5.",
        MEMORY,
        (
            Run(
                "stages",
                ("load", "generation", "update"),
                80,
                {"config": HALF, "shape": "1.5B", "lora": True},
            ),
        ),
    ),
    Section(
        "7",
        "What a step of ours costs beside TRL's",
        "64 completions of 4,096 tokens, scripted, on two layers of Qwen2.5-0.5B's shape, so that what is not the "
        "model weighs much. The best of three steps. Synchronisations are the times in a step in which Python waited "
        "for the device, as torch counts them.",
        ("step, s", "synchronisations", "allocated, GB", TIMES),
        (
            Run(
                "overhead",
                (PLAIN, "ours, nothing selected", "ours, `prompt_mean`", "ours, three hooks"),
                90,
            ),
        ),
        ("step, s", dict.fromkeys(("ours, nothing selected", "ours, `prompt_mean`", "ours, three hooks"), PLAIN)),
    ),
    Section(
        "8",
        "Batches of thirty shapes",
        "Thirty generation batches of 0.5B in full with compact updates, each of other lengths, up to 1,024 tokens.",
        ("seconds", "allocated, GB", "reserved, GB", "reserved / allocated"),
        (
            Run("shapes", ("as it is",), 60),
            Run(
                "shapes",
                ("`expandable_segments:True`",),
                60,
                environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
        ),
    ),
    Section(
        "9",
        "A teacher's log-probabilities",
        "A teacher of Qwen2.5-0.5B's shape in bf16, as a hook with `teachers` has it scored: through TRL's head in "
        "tiles, and through all logits, as before TRL 1.16. Memory above the model's own.",
        ("seconds", "allocated, GB", "all logits in float32 would be, GB"),
        (
            Run(
                "teacher",
                ("16 x 512, in tiles", "16 x 512, all logits", "8 x 4,096, in tiles", "8 x 4,096, all logits"),
                40,
            ),
        ),
    ),
    Section(
        "10",
        "Saved and resumed",
        "Four steps with sampled completions against two steps, a checkpoint, and two more: ‖difference‖ / ‖weights‖ "
        "at the end. Repeated is a second uninterrupted run: what the GPU itself does not repeat.",
        ("gap of the weights",),
        (Run("resume", ("repeated", "resumed"), 50),),
    ),
)

LEARN = (
    Section(
        "L",
        "Learning",
        "`make gpu LEARN=1`: the two trainings of the start, with the shipped launch file `one_process.yaml`, on the "
        "GPU and on the CPU of the same machine. Held-out accuracy before and after, and seconds of training.",
        ("before", "after", "training, s"),
        tuple(
            Run("learn", (f"{task}, {where}",), seconds, {"task": task, "where": where})
            for where, seconds in (("GPU", 90), ("CPU", 240))
            for task in ("word problems, a warmed-up model", "sorting, from random weights")
        ),
    ),
)


def all_sections() -> tuple[Section, ...]:
    """All of the page."""
    return (*SECTIONS, *LEARN)
