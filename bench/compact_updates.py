"""How much faster an update is with `compact_updates: exact`, and `share_prompts` too, than plain TRL's on the CPU.

    python -m bench.compact_updates [--updates 3] [--threads 1] [--markdown FILE]
    python -m bench.compact_updates --quick

Three profiles of lengths and three shares of rows without signal; see `compact_rollouts` for these. All of it takes
about twenty minutes. `--profiles` and `--shares` choose some cells, and `--quick` runs all nine on a tiny model,
to see that the benchmark works: its ratios mean nothing. On a GPU: `gpu`, section 3.

An arm is a real training with plain `GRPOTrainer` or with `GRPOExtTrainer`. All get the same scripted rollouts, and at
learning rate 0 they get them for ever. The arms take turns update by update, in a new order each time, so that a
machine that slows down slows all of them.

An update is all that happens from an optimizer step's first micro-step to its last callback, less what TRL needs to
generate and score the completions. So the planning counts as update. Everything else between those two is TRL's.
"""

import argparse
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bench.compact_rollouts import PROFILES, SHARES, Cell, Script, Size
from bench.tables import machine, show, versions
from bench.turns import Meter, Peak, TakingTurns, Turns, save_llama
from tests.support import arguments, save_tiny_model
from trl_grpo_ext import GRPOExtConfig
from trl_grpo_ext.trainer.mixin import GRPOExtMixin

QUICK = Size(groups=5, members=4, limit=64)
PLAIN = "plain TRL"
EXACT = "exact"
SHARED = "exact, shared"
OWN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    EXACT: {"compact_updates": "exact"},
    SHARED: {"compact_updates": "exact", "share_prompts": True},
}
"""Settings of each arm."""


# ---------------------------------------------------------------------------------------------------------- the arms


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
    seconds: dict[str, list[float]]
    padding: float
    """Tokens that plain TRL computes for each one that is not padding."""
    peak: dict[str, int] = field(default_factory=dict)
    norm_gap: float = 0.0
    """Relative difference of the gradient norms, the largest of all updates."""


class Match(TakingTurns):
    """All arms on one model, ready for the first update."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        size: Size,
        *,
        arms: Sequence[str] = (PLAIN, EXACT, SHARED),
        script: Callable[[Size], Any] = Script,
        rows_per_pass: int | None = None,
    ) -> None:
        """Build the trainers; a micro-batch is a group, or has `rows_per_pass`."""
        self.script = script(size)
        settings: dict[str, Any] = {
            "per_device_train_batch_size": rows_per_pass or size.members,
            "gradient_accumulation_steps": size.rows // (rows_per_pass or size.members),
            "num_generations": size.members,
            "max_completion_length": size.limit,
            "max_steps": 1_000_000,
            "learning_rate": 0.0,
            "optim": "adamw_torch",
            "max_grad_norm": 1.0,
        }

        def build(arm: str, turns: Turns) -> Any:
            config = GRPOConfig if arm == PLAIN else GRPOExtConfig
            trainer = (TimedRollouts if arm == PLAIN else TimedExact)(
                str(model),
                self.script.reward,
                arguments(folder / arm.replace(" ", "_"), config, **settings, **OWN[arm]),
                train_dataset=Dataset.from_dict({"prompt": [f"{number} " for number in range(size.groups)]}),
                callbacks=[turns],
                rollout_func=self.script.rollout,
            )
            trainer.meter = turns.meter
            return trainer

        super().__init__(arms, build)
        for arm in self.turns:
            self.turn(arm)  # makes the optimizer's state

    def measure(self, cell: Cell, updates: int, memory: bool = True) -> Result:
        """Run `updates` timed updates of each arm, before them one that measures memory and warms up."""
        self.script.cell = cell
        result = Result(cell, {arm: [] for arm in self.turns}, self.script.padding())
        for number in range(0 if memory else 1, updates + 1):
            norms = []
            for arm in random.Random(number).sample([*self.turns], len(self.turns)):
                peak = Peak() if number == 0 else None
                turn = self.turn(arm, peak)
                norms.append(turn.logs["grad_norm"])
                if peak is not None:
                    result.peak[arm] = peak.bytes
                else:
                    result.seconds[arm].append(turn.seconds)
            assert all(0 < norm < math.inf for norm in norms), norms
            result.norm_gap = max(result.norm_gap, (max(norms) - min(norms)) / max(norms))
        return result


# --------------------------------------------------------------------------------------------------------- table

TITLES = (
    "completions",
    "rows without signal",
    "update, s: plain TRL",
    "compact",
    "shared",
    "times faster",
    "peak memory, MB: plain TRL",
    "shared",
)


def cells_of(result: Result) -> list[str]:
    best = {arm: min(seconds) for arm, seconds in result.seconds.items()}
    return [
        result.cell.profile,
        f"{result.cell.share} %",
        *(f"{seconds:.3g}" for seconds in best.values()),
        f"{best[PLAIN] / best[SHARED]:.2f}",
        *(f"{result.peak[arm] / 1e6:.0f}" for arm in (PLAIN, SHARED)),
    ]


def sentence(size: Size, updates: int, meter: Meter, where: str) -> str:
    """What was measured, on what."""
    return (
        f"{size.rows} completions of up to {size.limit} tokens in groups and micro-batches of {size.members}; best of "
        f"{updates} updates, {meter.time_is} time. {where}; {versions('torch', 'transformers', 'trl')}."
    )


def worst_norm(results: Sequence[Result]) -> str:
    gap = max(result.norm_gap for result in results)
    return f"The gradient norms differ by {gap:.0e} at most, relatively." if gap else "The gradient norms are equal."


# ------------------------------------------------------------------------------------------------------------ cells


def save_model(folder: Path) -> Path:
    """About five million parameters, and a larger vocabulary than the tokenizer needs."""
    shape = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "max_position_embeddings": 1024}
    return save_llama(folder, **shape)


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
        default=[0, 1],
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
