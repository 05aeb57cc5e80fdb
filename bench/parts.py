"""What paying each part by itself is worth, by the number of independent parts: the figure of docs/evidence.md.

    python -m bench.parts gradients [--parts 1 2 4 8 16] [--prompts 160] [--docs docs/evidence.md]
    python -m bench.parts training [--parts 1 8] [--groups 2 16] [--jobs 1]    # goes on where it was stopped
    python -m bench.parts dense               # a teacher's log-ratio for each token against the outcome reward
    python -m bench.parts speed

A prompt is K pairs of digits, and the answer the larger digit of each, one character per pair. The start is a tiny
model that can do it but has for each pair of digits a habit, a wrong answer that it gives six times in ten. So the K
answers are right or wrong independently, and all have something to learn.

`gradients` samples at the start, 4 completions of each prompt, and measures how many times more completions the share
of right answers needs for a gradient of the same signal-to-noise ratio as `part_credit` (an answer is a part); and the
same with each part at another's place. `training` trains with both, each with the best of four learning rates on other
seeds, and counts the completions up to a share of right answers on held-out prompts; its raw runs are
`bench/runs/parts.jsonl`. `speed` times parts of 512 completions on their way to tokens.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from bench.runner import QUIET, Results, run_missing
from bench.study_report import estimate
from bench.tables import machine, show, versions
from recipes.embedded.make_model import IGNORE, collate, make_tokenizer, make_untrained_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, Parts
from trl_grpo_ext.credit.parts import with_parts
from trl_grpo_ext.history.compare import compare, load_policy
from trl_grpo_ext.testing import make_rollout

DIGITS = "0123456789"
COUNTS = (1, 2, 4, 8, 16)
GROUP = 4  # completions of a prompt
PROMPTS = 4  # of a step
COMPLETIONS = GROUP * PROMPTS  # of a step, also with other groups
TARGET = 0.8
STEPS = 120
ARMS = ("share", "part_credit")
DENSE = ("share", "teacher")
NAMES = {"teacher": "teacher_log_ratio"}
TAUGHT = 8  # parts of the comparison with a teacher
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
TUNING_SEEDS = (101,)
RUNS = Path(__file__).parent / "runs" / "parts.jsonl"
_DRAW = random.Random(5)
HABITS = {
    pair: _DRAW.choice([digit for digit in DIGITS if digit != max(pair)])
    for pair in [a + b for a in DIGITS for b in DIGITS]
}
Row = dict[str, str]


# ------------------------------------------------------------------------------------------------- task and start


def problem(rng: random.Random, count: int) -> Row:
    pairs = [rng.choice(DIGITS) + rng.choice(DIGITS) for _ in range(count)]
    return {"prompt": ",".join(pairs) + ",>", "answer": "".join(map(max, pairs))}


def problems(split: str, size: int, count: int, seed: int) -> list[Row]:
    rng = random.Random(f"{split}/{count}/{seed}")
    return [problem(rng, count) for _ in range(size)]


def share(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """The share of right answers."""
    return [float(score) for score in answers(completions, answer)]


def answers(completions: Sequence[str], answer: Sequence[str], shift: int = 0, **columns: Any) -> list[Parts]:
    """The same number, each answer a part at its character, or at that of another answer."""

    def place(text: str, at: int) -> tuple[int, int] | None:
        return (at, at + 1) if at < len(text) else None

    return [
        Parts(
            {
                f"answer {n + 1}": (float(text[n : n + 1] == digit), place(text, (n + shift) % len(right)))
                for n, digit in enumerate(right)
            }
        )
        for text, right in zip(completions, answer, strict=True)
    ]


def make_start(folder: Path) -> Path:
    """The start model: first right answers, then slips, then habits."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_untrained_model(
        tokenizer, hidden_size=96, intermediate_size=256, num_hidden_layers=2, max_position_embeddings=128
    )

    def slip(pair: str) -> str:
        return rng.choice(DIGITS) if rng.random() < 0.5 else max(pair)

    def habit(pair: str) -> str:
        return HABITS[pair] if rng.random() < 0.6 else max(pair)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for steps, rate, write in ((600, 1e-3, max), (300, 1e-3, slip), (150, 1e-3, habit), (70, 2e-4, habit)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for step in range(steps):
            examples = [written(tokenizer, problem(rng, rng.choice(COUNTS)), write) for _ in range(48)]
            loss = model(**collate(tokenizer, examples)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == steps - 1:
                print(f"start: loss {float(loss):.3f} after {steps} steps", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def written(tokenizer: Any, row: Row, write: Callable[[str], str]) -> tuple[list[int], list[int]]:
    """A prompt with an answer to learn."""
    prompt = tokenizer(row["prompt"]).input_ids
    said = "".join(write(pair) for pair in row["prompt"].removesuffix(",>").split(","))
    ids = [*tokenizer(said).input_ids, tokenizer.eos_token_id]
    return prompt + ids, [IGNORE] * len(prompt) + ids


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, rows: Sequence[Row], count: int, each: int = 1) -> list[str]:
    """`each` completions of every prompt."""
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": each}
    ids = model.generate(**batch, **options, max_new_tokens=count + 2)
    return list(tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


# ------------------------------------------------------------------------------------------------------ gradients


def measure(start: Path, folder: Path, count: int, size: int) -> list[str]:
    """A row of the table: the worth of each selection at this number of parts."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start)
    torch.manual_seed(77)
    rows = problems("gradients", size, count, 77)
    said = sampled(model, tokenizer, rows, count, GROUP)
    file = folder / f"completions_{count}.jsonl"
    lines = [
        {
            **rows[n // GROUP],
            "completion": text,
            "group": n // GROUP,
            "step": n // (GROUP * PROMPTS),
            "truncated": False,
        }
        for n, text in enumerate(said)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def parted(**more: Any) -> dict[str, Any]:
        reward = partial(answers, **more) if more else answers
        return {"rewards": [reward], "advantage_hooks": [{"name": "part_credit", "normalise": True}]}

    selections = {"share": {"rewards": [share]}, "part_credit": parted()}
    if count > 1:
        selections["places shuffled"] = parted(shift=1)
    policy = load_policy(str(start), dtype="float32")
    found = compare(file, selections, model=policy, tokenizer=str(start), dimensions=2048).gradients
    assert found is not None
    by_name = {one.name: one for one in found.selections}
    right = statistics.mean(share(said, [row["answer"] for row in rows for _ in range(GROUP)]))
    plain = by_name["share"]
    parts = by_name["part_credit"]
    shuffled = by_name.get("places shuffled")
    return [
        str(count),
        f"{right:.2f}",
        plain.ratio.text(3),
        parts.ratio.text(3),
        parts.worth.text(2),
        parts.to_plain.text(2),
        "" if shuffled is None else shuffled.ratio.text(3),
    ]


def gradients(options: argparse.Namespace, start: Path) -> None:
    rows = []
    for count in options.parts:
        rows.append(measure(start, options.output, count, options.prompts))
        print(rows[-1], flush=True)
    show(
        "part credit by the number of parts",
        ["parts", "right", "signal to noise, share", "`part_credit`", "worth", "cosine to share", "places shuffled"],
        rows,
        f"{options.prompts} prompts of {GROUP} completions, before training; worth is how many times more completions "
        f"the share of right answers needs for the same ratio. In brackets 95 % intervals. "
        f"{versions('trl', 'torch')}; {machine()}.",
        options.docs,
    )


# ------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Run:
    """One training with 16 completions a step, which ends at the target."""

    stage: str
    arm: str
    parts: int
    group: int
    rate: float
    seed: int


class Held(TrainerCallback):
    """The share of right answers on held-out prompts, every few steps; a training that meets the target ends."""

    def __init__(self, count: int, every: int) -> None:
        self.count = count
        self.every = every
        self.target = TARGET
        self.rows = problems("heldout", max(64, 1024 // count), count, 0)
        self.curve: list[tuple[int, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._measure(0, keywords)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step % self.every == 0:
            control.should_training_stop = self._measure(state.global_step, keywords) >= self.target

    def _measure(self, step: int, keywords: Any) -> float:
        model = keywords["model"]
        tokenizer = keywords["processing_class"]
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            said = sampled(model, tokenizer, self.rows, self.count)
        model.train()
        found = statistics.mean(share(said, [row["answer"] for row in self.rows]))
        self.curve.append((step, round(found, 4)))
        return found


def completions_to(target: float, curve: Sequence[Sequence[float]], each: int) -> float | None:
    """Completions up to the target, between two measurements by the straight line; None if it is not met."""
    for (before, low), (step, found) in itertools.pairwise(curve):
        if found >= target:
            return each * (before + (step - before) * max(0.0, target - low) / (found - low))
    return None


def work(run: Run, start: Path, save_to: Path | None = None) -> dict[str, Any]:
    """One training: its line of the file. What is saved is trained to the last step."""
    begun = time.process_time()
    held = Held(run.parts, 2)
    settings: dict[str, Any] = {
        "seed": run.seed,
        "learning_rate": run.rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "max_steps": STEPS,
        "per_device_train_batch_size": COMPLETIONS,
        "gradient_accumulation_steps": 1,
        "num_generations": run.group,
        "max_completion_length": run.parts + 2,
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        **QUIET,
        "advantage_hooks": hooks_of(run.arm, start),
    }
    rows = problems("train", STEPS * COMPLETIONS // run.group + 8, run.parts, run.seed)
    reward: Any = share if run.arm in DENSE else answers
    if run.arm == "places shuffled":
        reward = partial(answers, shift=1)
        reward.__name__ = "answers"  # TRL logs a reward under its name
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        args = GRPOExtConfig(output_dir=folder, **settings)
        trainer = GRPOExtTrainer(str(start), reward, args, train_dataset=Dataset.from_list(rows), callbacks=[held])
        trainer.remove_callback(PrinterCallback)
        held.target = 2.0 if save_to else TARGET
        trainer.train()
        if save_to is not None:
            trainer.save_model(str(save_to))
    return {
        **asdict(run),
        "heldout": held.curve,
        "last": held.curve[-1][1],
        "seconds": round(time.process_time() - begun, 1),
    }


def hooks_of(arm: str, start: Path) -> list[dict[str, Any]] | None:
    """The advantage hooks of an arm."""
    if arm == "share":
        return None
    if arm == "teacher":
        return [{"name": "teacher_log_ratio", "teacher": str(start.parent / "teacher")}]
    return [{"name": "part_credit", "normalise": True}]


def make_teacher(start: Path) -> None:
    """The start model after a training with parts."""
    folder = start.parent / "teacher"
    if (folder / "config.json").is_file():
        return
    run = Run("teacher", "part_credit", TAUGHT, GROUP, 5e-4, 77)
    line = work(run, start, save_to=folder)
    print(f"teacher: {line['last']:.3f} right answers", flush=True)


def dense(options: argparse.Namespace, start: Path) -> None:
    """A teacher's log-ratio per token against the outcome reward."""
    make_teacher(start)
    options.parts = [TAUGHT]
    options.groups = [GROUP]
    run_paired(options, start, DENSE)


def tuned_rates(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    """By arm, parts and group the rate with the fewest completions to the target, in the mean of the tuning seeds."""
    spent: dict[tuple[str, int, int], dict[float, list[float]]] = {}
    for line in lines:
        if line["stage"] == "tuning":
            # A training that does not get there counts as one that needs half as much again, or more the farther it is.
            needed = completions_to(TARGET, line["heldout"], COMPLETIONS) or STEPS * COMPLETIONS * (
                1.5 + TARGET - line["last"]
            )
            rates = spent.setdefault((line["arm"], line["parts"], line["group"]), {})
            rates.setdefault(line["rate"], []).append(needed)
    return {cell: min(rates, key=lambda rate: statistics.mean(rates[rate])) for cell, rates in spent.items()}


def training(options: argparse.Namespace, start: Path) -> None:
    """The outcome reward against parts, and the control."""
    run_paired(options, start, ARMS)


def run_paired(options: argparse.Namespace, start: Path, arms: Sequence[str]) -> None:
    """Tune each arm, train it on the paired seeds, and show how many completions it took."""
    results = Results(RUNS)
    one = partial(work, start=start)
    cells = [(count, group) for count in options.parts for group in options.groups]
    tuning = [
        Run("tuning", arm, count, group, rate, seed)
        for count, group in cells
        for arm in arms
        for rate in options.rates
        for seed in TUNING_SEEDS
    ]
    run_missing(tuning, results, options.jobs, one, "last")
    rates = tuned_rates(results.lines)
    runs = [
        Run("evaluation", arm, count, group, rates[arm, count, group], seed)
        for seed in options.seeds
        for count, group in cells
        for arm in arms
    ]
    if arms == ARMS and (8, GROUP) in cells:
        rate = rates["part_credit", 8, GROUP]
        runs += [Run("evaluation", "places shuffled", 8, GROUP, rate, seed) for seed in options.seeds]
    run_missing(runs, results, options.jobs, one, "last")
    factors(options, results.lines, arms)


def factors(options: argparse.Namespace, lines: Sequence[dict[str, Any]], arms: Sequence[str]) -> None:
    """The table of docs: completions to the target by parts and group, and their ratio, paired by seed."""
    base, other = arms
    found: dict[tuple[str, int, int], dict[int, float | None]] = {}
    rates: dict[tuple[str, int, int], float] = {}
    for line in lines:
        if line["stage"] == "evaluation":
            cell = (line["arm"], line["parts"], line["group"])
            found.setdefault(cell, {})[line["seed"]] = completions_to(TARGET, line["heldout"], COMPLETIONS)
            rates[cell] = line["rate"]
    rows = []
    for _, count, group in [cell for cell in sorted(found) if cell[0] == base]:
        plain = found[base, count, group]
        parts = found.get((other, count, group), {})
        seeds = sorted({*plain} & {*parts})
        row = [str(count), str(group), str(len(seeds))]
        if not seeds:
            continue
        for arm, of_arm in ((base, plain), (other, parts)):
            met = [of_arm[seed] for seed in seeds if of_arm[seed] is not None]
            mean = f"{statistics.mean(met):,.0f}" if met else "-"  # type: ignore[type-var]
            row.append(f"{mean} ({len(met)} of {len(seeds)}, {rates[arm, count, group]:g})")
        row.append(ratio_text([(plain[seed], parts[seed]) for seed in seeds]))
        rows.append(row)
    show(
        "completions to the target by the number of parts"
        if arms == ARMS
        else "completions to the target with a teacher",
        ["parts", "group", "seeds", f"{base}: completions (met, rate)", f"`{NAMES.get(other, other)}`", "times fewer"],
        rows,
        f"{COMPLETIONS} completions a step, at most {STEPS} steps, up to {TARGET:.0%} right answers (held out). "
        f"Each arm has the best of the rates {', '.join(f'{rate:g}' for rate in RATES)} on another seed. Times fewer: "
        f"the geometric mean over the paired seeds, in brackets its 95 % interval by Student's t; a seed that does not "
        f"get there in time counts with all its completions, marked by >. {versions('trl', 'torch')}; {machine()}.",
        options.docs,
    )


def ratio_text(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    """The geometric mean of the ratios with its interval."""
    most = float(STEPS * COMPLETIONS)
    if not pairs or any(parts is None for _, parts in pairs):
        return "-"
    logs = [math.log((plain or most) / parts) for plain, parts in pairs if parts]
    bound = "> " if any(plain is None for plain, _ in pairs) else ""
    if len(logs) < 2:
        return f"{bound}{math.exp(logs[0]):.2f}"
    of_logs = estimate(logs)
    low = math.exp(of_logs.mean - of_logs.half_width)
    high = math.exp(of_logs.mean + of_logs.half_width)
    return f"{bound}{math.exp(of_logs.mean):.2f} [{low:.2f}, {high:.2f}]"


# ---------------------------------------------------------------------------------------------------------- speed


def speed(options: argparse.Namespace) -> None:
    """Scores of 512 completions of 16 parts, as tensors and as tokens; what each token wrote is known already."""
    rows = 512
    count = 16
    words = 64
    texts = [" ".join(f"{row + n:05d}" for n in range(words)) for row in range(rows)]
    offsets = [[(6 * n - (n > 0), 6 * n + 5) for n in range(words)] for _ in range(rows)]
    rollout = make_rollout([words] * rows, texts=texts, completions=texts, offsets=lambda row: offsets[row])
    took = []
    for _ in range(9):
        begun = time.process_time()
        scores = [
            Parts({f"part {n}": (float((row + n) % 3), (24 * n, 24 * n + 5)) for n in range(count)})
            for row in range(rows)
        ]
        scored = time.process_time()
        table = with_parts(rollout, {"r": scores}).parts["r"]
        tokens = sum(int(table.tokens(part).sum()) for part in range(count))
        took.append((scored - begun, time.process_time() - scored))
        assert tokens == rows * count
    scoring, mapping = (1e3 * min(one) for one in zip(*took, strict=True))
    said = f"{rows} completions of {count} parts and {words} tokens: {scoring:.1f} ms of CPU time to make the scores, "
    print(f"{said}{mapping:.1f} ms to the tokens of each part. {machine()}.")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("gradients", "training", "dense", "speed"))
    parser.add_argument("--output", type=Path, default=Path("outputs/parts"))
    parser.add_argument("--parts", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--groups", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(1, 11)])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--docs", type=Path, help="a page whose table is replaced")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.what == "speed":
        speed(options)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    start = make_start(options.output / "start")
    {"gradients": gradients, "training": training, "dense": dense}[options.what](options, start)


if __name__ == "__main__":
    main()
