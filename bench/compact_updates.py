"""How much faster an update is with `compact_updates: exact` than plain TRL's on the same rollouts, on the CPU.

    python -m bench.compact_updates [--updates 3] [--threads 1] [--markdown FILE]
    python -m bench.compact_updates --quick

Three profiles of lengths and three shares of rows without signal; see `compact_rollouts` for these. All of it takes
about a quarter of an hour. `--profiles` and `--shares` choose some cells, and `--quick` runs all nine on a tiny model,
to see that the benchmark works: its ratios mean nothing. On a GPU: `gpu`, section 3.

An arm is a real training, plain `GRPOTrainer` or `GRPOExtTrainer` with `compact_updates: exact`. Both get the same
scripted rollouts, and at learning rate 0 they get them for ever. The arms take turns update by update, in a new order
each time, so that a machine that slows down slows both.

An update is all that happens from an optimizer step's first micro-step to its last callback, less what TRL needs to
generate and score the completions. So the planning counts as update. Everything else between those two is TRL's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.compact_rollouts import PROFILES, SHARES, Cell, Script, Size
from bench.tables import machine, show, versions
from tests.support import arguments, save_tiny_model
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.trainer.mixin import GRPOExtMixin

QUICK = Size(groups=5, members=4, limit=64)
PLAIN, EXACT, SHARED = "plain TRL", "exact", "exact, shared"
OWN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    EXACT: {"compact_updates": "exact"},
    SHARED: {"compact_updates": "exact", "share_prompts": True},
}
"""Settings of each arm."""


# --------------------------------------------------------------------------------------------- clocks and memory


class Meter:
    """Time and memory. Time is CPU time with one thread, else wall-clock time."""

    def now(self) -> float:
        return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()

    @property
    def time_is(self) -> str:
        return "the processor's" if torch.get_num_threads() == 1 else "the clock's"

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Peak bytes of torch's allocator inside, above those at the start."""
        found: list[int] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield found
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        held = [
            (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
        ]
        _, total, size = min(held, key=lambda event: event[0])
        found.append(max(total for _, total, _ in held) - (total - size))


# --------------------------------------------------------------------------------------------------------- turns


class Enough(Exception):  # noqa: N818 (not an error)
    """Ends a training that waits for its turn."""


class Turns(TrainerCallback):
    """Lets several trainings, each in its own thread, take turns to update, and measures each update."""

    def __init__(self, meter: Meter, conductor: threading.Semaphore) -> None:
        self.meter, self.conductor, self.own = meter, conductor, threading.Semaphore(0)
        self.trainer: Any = None
        self.enough = self.with_memory = False
        self.seconds = 0.0
        self.bytes = 0
        self.logs: dict[str, float] = {}
        self._start = 0.0
        self._peak: Any = None
        self._found: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.own.acquire()
        if self.enough:
            raise Enough
        self.trainer.rollout_seconds = 0.0
        if self.with_memory:
            self._peak = self.meter.peak()
            self._found = self._peak.__enter__()
        self._start = self.meter.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seconds = self.meter.now() - self._start - self.trainer.rollout_seconds
        if self.with_memory:
            self._peak.__exit__(None, None, None)
            self.bytes = self._found[0]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        self.logs = dict(logs)
        self.conductor.release()


class TimedRollouts(GRPOTrainer):
    """TRL's trainer, which also times generation and scoring."""

    meter: Meter
    rollout_seconds = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = self.meter.now()
        output = super()._generate_and_score_completions(inputs)
        self.rollout_seconds += self.meter.now() - started
        return output


class TimedExact(GRPOExtMixin, TimedRollouts):
    """Ours around the timed trainer: everything that ours adds counts as update."""


@dataclass
class Result:
    """What was measured in one cell."""

    cell: Cell
    seconds: dict[str, list[float]] = field(default_factory=lambda: {PLAIN: [], EXACT: []})
    peak: dict[str, int] = field(default_factory=dict)
    padding: dict[str, float] = field(default_factory=dict)
    """Computed tokens for each live one."""
    norm_gap: float = 0.0
    """Relative difference of the gradient norms, the largest of all updates."""

    @property
    def speedup(self) -> float:
        return min(self.seconds[PLAIN]) / min(self.seconds[EXACT])

    @property
    def median_speedup(self) -> float:
        return statistics.median(self.seconds[PLAIN]) / statistics.median(self.seconds[EXACT])


class Match:
    """All arms on one model, ready for the first update."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        size: Size,
        *,
        arms: Sequence[str] = (PLAIN, EXACT),
        script: type[Script] = Script,
    ) -> None:
        """Build the trainers."""
        self.script, self.meter, self.conductor = script(size), Meter(), threading.Semaphore(0)
        self.turns = {arm: Turns(self.meter, self.conductor) for arm in arms}
        self.failed: list[BaseException] = []
        settings: dict[str, Any] = {
            "per_device_train_batch_size": size.members,
            "gradient_accumulation_steps": size.groups,
            "num_generations": size.members,
            "max_completion_length": size.limit,
            "max_steps": 1_000_000,
            "learning_rate": 0.0,
            "optim": "adamw_torch",
            "max_grad_norm": 1.0,
        }
        for arm, turns in self.turns.items():
            config = GRPOConfig if arm == PLAIN else GRPOExtConfig
            turns.trainer = (TimedRollouts if arm == PLAIN else TimedExact)(
                str(model),
                self.script.reward,
                arguments(folder / arm.replace(" ", "_"), config, **settings, **OWN[arm]),
                train_dataset=Dataset.from_dict({"prompt": [f"{number} " for number in range(size.groups)]}),
                callbacks=[turns],
                rollout_func=self.script.rollout,
            )
            turns.trainer.meter = self.meter
            turns.trainer.remove_callback(PrinterCallback)
        self.threads = [
            threading.Thread(target=self._train, args=(turns,), daemon=True) for turns in self.turns.values()
        ]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass  # it has to begin on this thread
        for thread in self.threads:
            thread.start()
        for arm in self.turns:
            self._turn(arm)  # makes the optimizer's state

    def _train(self, turns: Turns) -> None:
        try:
            turns.trainer.train()
        except Enough:
            pass
        except BaseException as error:
            self.failed.append(error)
            self.conductor.release()

    def _turn(self, arm: str, with_memory: bool = False) -> Turns:
        turns = self.turns[arm]
        turns.with_memory = with_memory
        turns.own.release()
        self.conductor.acquire()
        if self.failed:
            raise RuntimeError(f"The training of {arm!r} failed; its error is above.") from self.failed[0]
        return turns

    def measure(self, cell: Cell, updates: int) -> Result:
        """Run one warm-up update of each arm, which measures memory, and `updates` timed ones."""
        self.script.cell = cell
        result = Result(cell, {arm: [] for arm in self.turns}, padding={PLAIN: self.script.padding()})
        for number in range(updates + 1):
            norms = []
            for arm in random.Random(number).sample([*self.turns], len(self.turns)):
                turn = self._turn(arm, with_memory=number == 0)
                norms.append(turn.logs["grad_norm"])
                if number == 0:
                    result.peak[arm] = turn.bytes
                else:
                    result.seconds[arm].append(turn.seconds)
            assert all(0 < norm < math.inf for norm in norms), norms
            result.norm_gap = max(result.norm_gap, (max(norms) - min(norms)) / max(norms))
        result.padding[EXACT] = self.turns[EXACT].logs["compact/computed_to_live"]
        return result

    def close(self) -> None:
        """End the trainings."""
        for turns in self.turns.values():
            turns.enough = True
            turns.own.release()
        for thread in self.threads:
            thread.join()


# --------------------------------------------------------------------------------------------------------- table

TITLES = (
    "completions",
    "rows without signal",
    "update, s: plain TRL",
    "exact",
    "times faster: best",
    "median",
    "computed / live: plain TRL",
    "exact",
    "peak memory, MB: plain TRL",
    "exact",
)


def cells_of(result: Result) -> list[str]:
    seconds, peak, padding = result.seconds, result.peak, result.padding
    return [
        result.cell.profile,
        f"{result.cell.share} %",
        *(f"{min(seconds[arm]):.3g}" for arm in (PLAIN, EXACT)),
        f"{result.speedup:.2f}",
        f"{result.median_speedup:.2f}",
        *(f"{padding[arm]:.2f}" for arm in (PLAIN, EXACT)),
        *(f"{peak[arm] / 1e6:.0f}" for arm in (PLAIN, EXACT)),
    ]


def sentence(size: Size, updates: int, meter: Meter, where: str) -> str:
    """What was measured, on what."""
    return (
        f"{size.rows} completions of up to {size.limit} tokens in groups of {size.members}, micro-batches of "
        f"{size.members}, `loss_type` dapo without a KL penalty, AdamW. Best of {updates} updates of each arm in "
        f"turns; time is {meter.time_is}, and planning counts as update. Memory is the most that torch's allocator "
        f"held in an update, above what it held before. {where}; {versions('torch', 'transformers', 'trl')}."
    )


def worst_norm(results: Sequence[Result]) -> str:
    gap = max(result.norm_gap for result in results)
    return (
        f"The gradient norms that the two arms log differ by {gap:.0e} at most, relatively."
        if gap
        else ("The gradient norms that the two arms log are equal.")
    )


# ------------------------------------------------------------------------------------------------------------ cells


def save_model(folder: Path) -> Path:
    """About five million parameters, with the tests' character tokenizer and a larger vocabulary than it needs."""
    save_tiny_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(cells: Sequence[Cell], size: Size, updates: int, folder: Path, *, tiny: bool = False) -> list[Result]:
    """Measure the cells one after the other."""
    model = (save_tiny_model if tiny else save_model)(folder / "model")
    match = Match(model, folder, size)
    results = [match.measure(cell, updates) for cell in cells]
    match.close()
    return results


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3, help="of each arm in each cell, timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        choices=[0, 1, 2],
        help=", ".join(PROFILES).replace("%", "%%"),
    )
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, choices=SHARES, help="percent without signal")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one update of each")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")

    size, updates = (QUICK, 1) if options.quick else (Size(), options.updates)
    cells = [Cell(PROFILES[profile], share) for profile in options.profiles for share in options.shares]
    with tempfile.TemporaryDirectory() as folder:
        results = run(cells, size, updates, Path(folder), tiny=options.quick)
        parameters = LlamaForCausalLM.from_pretrained(Path(folder) / "model").num_parameters()
    where = f"Llama, {parameters / 1e6:.2g}M parameters, {options.threads} thread(s), {machine()}"
    said = f"{sentence(size, updates, Meter(), where)} {worst_norm(results)}"
    show("compact updates on the CPU", TITLES, [cells_of(result) for result in results], said, options.markdown)


if __name__ == "__main__":
    main()
