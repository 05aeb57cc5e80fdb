"""Does credit by parts help a real model, and how much time do cheaper updates save? The figures of docs/evidence.md.

    python -m bench.evidence start                        # the start model, from SmolLM2-135M-Instruct
    python -m bench.evidence gate --parts 4 8 12          # signal to noise at the start: is a training worth it?
    python -m bench.evidence tune --parts 12              # every arm at every rate, on seeds of their own
    python -m bench.evidence train --parts 12             # five paired seeds, and the controls
    python -m bench.evidence time --parts 12              # seconds of a step, plain TRL and ours in turns
    python -m bench.evidence gate --form json --parts 8   # the same questions, answered as JSON; each command has it
    python -m bench.evidence report --docs docs/evidence.md

Each command does what is missing and ends; started again it goes on. A training is one line of
`bench/runs/evidence.jsonl`. Prompts are never used twice, so the rewards of a step are of unseen problems too; beside
them a fixed held-out set is measured every few steps, which no time counts. Seconds are the processor's on one thread.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.color_facts import FACTS, TEMPERATURE, Task, asked, make_start
from bench.resampling import interval
from bench.runner import QUIET, Results, run_missing
from bench.study_report import estimate
from bench.tables import machine, markdown, versions, write_block
from recipes.common.models import cache_folder, make
from trl_grpo_ext import GRPOExtConfig, GRPOExtMixin, load_rewards
from trl_grpo_ext.history.compare import compare
from trl_grpo_ext.history.compare.gradients import PLAIN
from trl_grpo_ext.history.compare.statistics import Estimate
from trl_grpo_ext.types import WHOLE, Part, Parts

OUTPUT = Path("outputs/evidence")
RUNS = Path(__file__).parent / "runs" / "evidence.jsonl"
TEACHER, TEACHER_STEPS = OUTPUT / "teacher", 24  # more, on whole lists
START_STEPS = {"lines": (36, 12), "json": (72, 16)}  # on lists of as many facts as questions, on whole ones
TRAINED = range(15, 30)
PROMPTS, GROUP = 2, 8  # of a step, and completions of a prompt
WINDOW, HELD_OUT = 10, 64
TARGETS = {"lines": 0.55, "json": 0.5}  # right answers, 0.17 above the start model
STEPS = {"tuning": 14, "evaluation": 30, "time": 4}
LONGER = 60  # steps of a run that has not met the target before
RATES = (5e-5, 1e-4, 3e-4)
LOWER_RATES = (1.5e-5, 5e-5)  # of the arms with a better prompt, which lost what the model knew already at 5e-5
RATES_OF = {"weighed": LOWER_RATES, "taught": LOWER_RATES, "teacher": RATES[:2]}
TUNING_SEEDS, SEEDS = (101,), (1, 2, 3, 4, 5)
PARTS = (4, 8, 12)
FORMS = ("lines", "json")
TASKS = [Task(parts, form) for form in FORMS for parts in PARTS]
TUNED_TASK = Task(8)  # other tasks have its rates where they have none

CREDIT = {"advantage_hooks": [{"name": "part_credit", "normalise": True}]}
COMPACT = {"compact_updates": "exact"}
SHARED = {**COMPACT, "share_prompts": True}
HINT = "teacher_prompt"  # a column: the problem with the facts alone that are asked for
ARMS: dict[str, dict[str, Any]] = {
    "plain TRL": {},
    "compact": COMPACT,
    "shared": SHARED,
    "parts": {**SHARED, **CREDIT},
    "places shuffled": {**SHARED, **CREDIT},
    "no places": {**SHARED, **CREDIT},
    "parts before": {**SHARED, "advantage_hooks": [{"name": "part_credit", "normalise": True, "reach": "before"}]},
    "weighed": {**SHARED, "advantage_hooks": [{"name": "self_distilled", "prompt": HINT}]},
    "taught": {**SHARED, "advantage_hooks": [{"name": "teacher_log_ratio", "teacher": "policy", "prompt": HINT}]},
    "teacher": {**SHARED, "advantage_hooks": [{"name": "teacher_log_ratio", "teacher": str(TEACHER)}]},
}
"""What each arm sets. All are paid by `lines` or `json_fields`, which is a number to TRL and parts to `part_credit`."""
REWARDS = {"lines": {"name": "lines", "stop": 1.0}, "json": {"name": "json_fields", "extract": "whole"}}
TUNED = ("shared", "parts", "weighed", "taught", "teacher")
"""The arms whose rates are tuned; the others have the rate of the one that they are compared with."""
GO_ON = ("plain TRL", "shared", "parts", "parts before", "teacher")
"""The arms of which a run goes on until it meets the target, if it has not after 30 steps, to 60 at most."""
RATE_OF = {"plain TRL": "shared", "compact": "shared"}
RATE_OF |= {"places shuffled": "parts", "no places": "parts", "parts before": "parts"}


@dataclass(frozen=True)
class Run:
    """One training."""

    stage: str
    arm: str
    parts: int
    rate: float
    seed: int
    steps: int
    dtype: str = "float32"
    form: str = "lines"

    @property
    def task(self) -> Task:
        return Task(self.parts, self.form)

    @property
    def most_steps(self) -> int:
        return LONGER if self.stage == "evaluation" and self.arm in GO_ON else self.steps


# ---------------------------------------------------------------------------------------------------------- training


class Answers:
    """The task's reward; its parts' places are moved for the controls. Times itself."""

    __name__ = "answers"

    def __init__(self, form: str, places: str = "own") -> None:
        (self.reward,) = load_rewards([REWARDS[form]])
        self.form = form
        self.places = places
        self.seconds = 0.0
        self.right = 0.0

    def __call__(self, **columns: Any) -> list[Any]:
        started = time.process_time()
        scores = self.reward(**columns)
        moved = [self._moved(score) for score in scores]
        self.seconds += time.process_time() - started
        self.right = statistics.fmean(part.score for score in scores for part in self._split(score)[0])
        return moved

    def _moved(self, score: Any) -> Any:
        if self.places == "own":
            return score
        if self.places == "whole":
            return Parts([Part(one.name, one.score, one.weight, WHOLE) for one in score.parts])
        answers, end = self._split(score)
        places = [one.places for one in [*answers[1:], answers[0]]]
        moved = [Part(one.name, one.score, one.weight, at) for one, at in zip(answers, places, strict=True)]
        return Parts([*moved, *end])

    def _split(self, score: Any) -> tuple[list[Part], list[Part]]:
        """The parts that are answers, and the end's; JSON that has not ended is none."""
        parts = list(score.parts)
        return (parts[:-1], parts[-1:]) if self.form == "lines" else (parts, [])


class TimedPlain(GRPOTrainer):
    """TRL's trainer, which also times generation and scoring."""

    rollout_seconds = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.process_time()
        output = super()._generate_and_score_completions(inputs)
        self.rollout_seconds += time.process_time() - started
        return output


class TimedOurs(GRPOExtMixin, TimedPlain):
    """Ours around the timed trainer: everything that ours adds counts as update, but for rewards."""


class Watch(TrainerCallback):
    """The line of a training: right answers and seconds of every step, and the held-out accuracy after `run.steps`."""

    def __init__(self, run: Run) -> None:
        self.run, self.trainer = run, cast(Any, None)
        self.found: dict[str, Any] = {"right": [], "tokens": 0, "sampling_s": [], "rewards_s": [], "update_s": []}
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.trainer.rollout_seconds = self.trainer.answers.seconds = 0.0
        self._started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        whole = time.process_time() - self._started
        rollout, rewards = self.trainer.rollout_seconds, self.trainer.answers.seconds
        for part, seconds in (("sampling", rollout - rewards), ("rewards", rewards), ("update", whole - rollout)):
            self.found[f"{part}_s"].append(round(seconds, 3))
        self.found["right"].append(round(self.trainer.answers.right, 4))
        if self.run.stage == "evaluation" and state.global_step >= self.run.steps:
            if state.global_step == self.run.steps:
                self._measure_held_out(keywords["model"], keywords["processing_class"])
            if steps_to(TARGETS[self.run.form], self.found["right"]) is not None:
                control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        if logs and "reward" in logs:
            self.found["tokens"] += round(logs["completions/mean_length"] * PROMPTS * GROUP)

    def _measure_held_out(self, model: Any, tokenizer: Any) -> None:
        task = self.run.task
        rows = task.problems("heldout", HELD_OUT, 0)
        with torch.random.fork_rng(devices=[]):  # a run that goes on samples as if nothing had been measured
            torch.manual_seed(9)
            model.eval()
            texts = task.sampled(model, tokenizer, rows)
            model.train()
        self.found["heldout"] = round(task.right(texts, rows), 4)
        self.found["in_form"] = round(task.in_form(texts, rows), 3)


def windows(right: Sequence[float]) -> list[tuple[float, float]]:
    """Completed steps at the middle of each window, and the share of right answers in it."""
    return [
        (last - WINDOW / 2, statistics.fmean(right[last - WINDOW : last])) for last in range(WINDOW, len(right) + 1)
    ]


def steps_to(target: float, right: Sequence[float]) -> float | None:
    """Steps up to the target, which the mean of `WINDOW` steps has to meet; None if it is not met."""
    return next((step for step, found in windows(right) if found >= target), None)


@dataclass(frozen=True)
class Needed:
    """Steps or seconds to the target; of a run that has not met it, all of them."""

    amount: float
    met: bool


def needed_by(line: Mapping[str, Any]) -> Needed:
    found = steps_to(TARGETS[line["form"]], line["right"])
    return Needed(len(line["right"]) if found is None else found, found is not None)


def policy_of(start: Path, dtype: str) -> Any:
    """The start model, whose upper half is trained."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
    model.requires_grad_(False)
    for number in TRAINED:
        model.model.layers[number].requires_grad_(True)
    return model


def training_rows(run: Run) -> list[dict[str, Any]]:
    """The problems in their order: first those of `run.steps`, in the order in which TRL would shuffle them alone."""
    first = run.steps * PROMPTS + 8
    rows = run.task.problems("train", max(first, run.most_steps * PROMPTS), run.seed)
    order = torch.randperm(first, generator=torch.Generator().manual_seed(run.seed)).tolist()
    return [*(rows[number] for number in order), *rows[first:]]


def trainer_of(run: Run, start: Path, folder: str, **more: Any) -> Any:
    """The run's trainer."""
    plain = run.arm == "plain TRL"
    settings = {
        "output_dir": folder,
        "seed": run.seed,
        "shuffle_dataset": False,
        "learning_rate": run.rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "max_steps": run.most_steps,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": run.task.longest,
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": TEMPERATURE,
        "cache_implementation": "static",
        **QUIET,
        "bf16": run.dtype == "bfloat16",
        "logging_steps": 1,
    }
    answers = Answers(run.form, {"places shuffled": "shuffled", "no places": "whole"}.get(run.arm, "own"))
    trainer = (TimedPlain if plain else TimedOurs)(
        policy_of(start, run.dtype),
        answers,
        (GRPOConfig if plain else GRPOExtConfig)(**{**settings, **ARMS[run.arm], **more}),
        train_dataset=Dataset.from_list(training_rows(run)),
        processing_class=AutoTokenizer.from_pretrained(start, padding_side="left"),
    )
    trainer.answers = answers
    trainer.remove_callback(PrinterCallback)
    return trainer


def work(run: Run, start: Path) -> dict[str, Any]:
    """One training: its line of the file."""
    started, watch = time.process_time(), Watch(run)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        trainer = trainer_of(run, start, folder)
        watch.trainer = trainer
        trainer.add_callback(watch)
        trainer.train()
    found = {name: round(value, 2) if isinstance(value, float) else value for name, value in watch.found.items()}
    last = statistics.fmean(watch.found["right"][-WINDOW:])
    return {**asdict(run), **found, "last": last, "seconds": round(time.process_time() - started, 1)}


def teachers_line(stage: str, task: Task, model: Path) -> dict[str, Any]:
    """How often a teacher is right after the problem and after its hint: a line of the file."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = task.problems("hint", HELD_OUT, 0)
    torch.manual_seed(7)
    shorter = [{**row, "prompt": row[HINT]} for row in rows]
    found = {
        name: task.right(task.sampled(policy, tokenizer, some), some)
        for name, some in (("right", rows), ("hinted", shorter))
    }
    return {"stage": stage, **asdict(task), **found}


def start_of(form: str, with_teacher: bool) -> Path:
    """The folder of the start model for tasks of a form, made where it is not there; and the trained teacher's."""
    source = cache_folder()
    short, start = (OUTPUT / (name if form == "lines" else f"{name}_{form}") for name in ("short", "start"))
    tasks = [Task(parts, form) for parts in PARTS]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    make(source)
    make_start(str(source), short, tasks, START_STEPS[form][0], None)
    make_start(str(short), start, tasks, START_STEPS[form][1], FACTS)
    if with_teacher:
        make_start(str(start), TEACHER, tasks, TEACHER_STEPS, FACTS)
    return start


# -------------------------------------------------------------------------------------------------------------- gate


def gate(task: Task, groups: int, start: Path) -> dict[str, Any]:
    """Signal to noise of each way to pay, at the start: a line of the file."""
    begun = time.process_time()
    file = OUTPUT / f"gate_{task.parts}_{task.form}.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    rows = task.problems("gate", groups, 0)
    if file.is_file() and len(saved := file.read_text().splitlines()) == groups * GROUP:
        texts = [json.loads(line)["completion"] for line in saved]
    else:
        torch.manual_seed(5)
        texts = task.sampled(policy, tokenizer, rows, GROUP)
    lines = [
        {
            "prompt": prompt,
            "completion": texts[group * GROUP + member],
            "lines": rows[group]["lines"],
            "fields": rows[group]["fields"],
            "group": group,
            "step": group // PROMPTS,
            "truncated": False,
        }
        for group, prompt in enumerate(asked(tokenizer, rows))
        for member in range(GROUP)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    credit = CREDIT["advantage_hooks"]
    selections = {
        name: {"rewards": [Answers(task.form, places)], "advantage_hooks": credit}
        for name, places in (("parts", "own"), ("places shuffled", "shuffled"))
    }
    found = compare(
        file,
        selections,
        model=policy_of(start, "float32"),
        tokenizer=tokenizer,
        temperature=TEMPERATURE,
        dimensions=4096,
        rows=GROUP,
    ).gradients
    assert found is not None
    by_name = {
        one.name: {"ratio": asdict(one.ratio), "worth": asdict(one.worth), "cosine": asdict(one.to_plain)}
        for one in found.selections
    }
    repeated = [row for row in rows for _ in range(GROUP)]
    facts = {"right": task.right(texts, repeated), "in_form": task.in_form(texts, repeated)}
    worth, shuffled = by_name["parts"]["worth"], by_name["places shuffled"]["ratio"]
    is_open = (worth["low"] or 0.0) > 1.0 and (worth["value"] or 0.0) > 1.5
    return {
        "stage": "gate",
        **asdict(task),
        "groups": groups,
        **facts,
        "open": is_open and (shuffled["low"] or 0.0) <= 0.0,
        "selections": by_name,
        "seconds": round(time.process_time() - begun, 1),
    }


# ---------------------------------------------------------------------------------------------------------- the plan


def tuning_runs(task: Task, arms: Sequence[str]) -> list[Run]:
    """The tuned arms at every rate."""
    return [
        Run("tuning", arm, task.parts, rate, seed, STEPS["tuning"], form=task.form)
        for seed in TUNING_SEEDS
        for arm in arms
        for rate in RATES_OF.get(arm, RATES)
        if arm in TUNED
    ]


def tuned_rates(lines: Sequence[Mapping[str, Any]], task: Task) -> dict[str, float]:
    """By tuned arm the rate with the most right answers at the end of the tuning runs; of equals the smaller."""
    found: dict[str, dict[float, list[float]]] = {}
    for line in lines:
        if line["stage"] == "tuning" and Task.of(line) == task:
            found.setdefault(line["arm"], {}).setdefault(line["rate"], []).append(line["last"])
    return {arm: max(sorted(rates), key=lambda rate: statistics.fmean(rates[rate])) for arm, rates in found.items()}


def evaluation_runs(task: Task, rates: Mapping[str, float], arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """The arms on the same seeds, seed by seed."""
    return [
        Run("evaluation", arm, task.parts, rates[RATE_OF.get(arm, arm)], seed, STEPS["evaluation"], form=task.form)
        for seed in seeds
        for arm in arms
    ]


def time_runs(task: Task, rates: Mapping[str, float]) -> list[Run]:
    """A few steps of each arm, in both precisions."""
    return [
        Run("time", arm, task.parts, rates[RATE_OF.get(arm, arm)], seed, STEPS["time"], dtype, task.form)
        for dtype in ("float32", "bfloat16")
        for seed in SEEDS[:1]
        for arm in ("plain TRL", "compact", "shared", "parts")
    ]


# ------------------------------------------------------------------------------------------------------------ tables


def report(lines: Sequence[Mapping[str, Any]], page: Path | None) -> None:
    """Print the tables; with a page, write them between its markers, and the picture beside it."""
    said = f"SmolLM2-135M-Instruct, {versions('trl', 'transformers', 'torch')}; {machine()}, one thread."
    blocks = {"gate": gate_table(lines), "completions": completions_table(lines), "time": time_table(lines)}
    for name, table in blocks.items():
        print(f"{table}\n")
        if page is not None:
            write_block(page, f"evidence: {name}", f"{table}\n\n{said}" if name == "gate" else table)
    if page is not None:
        pictures = page.parent / "images"
        plot(lines, [task for task in TASKS if "parts" in trainings(lines, task)], pictures / "evidence.png")
        plot(lines, [TUNED_TASK], pictures / "evidence_8.png")


def order_of(line: Mapping[str, Any]) -> int:
    return TASKS.index(Task.of(line))


def gate_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Signal to noise at the start, by the number of parts."""
    heads = ["parts", "right", "in form", "prompts", "signal to noise, share", "`part_credit`", "worth"]
    heads += ["places shuffled", "gate"]
    rows = []
    newest = {order_of(line): line for line in lines if line["stage"] == "gate"}
    for _, line in sorted(newest.items()):
        of = {name: {key: Estimate(**one) for key, one in found.items()} for name, found in line["selections"].items()}
        cells = [str(Task.of(line)), f"{line['right']:.2f}", f"{line['in_form']:.2f}", str(line["groups"])]
        cells += [of[PLAIN]["ratio"].text(), of["parts"]["ratio"].text(), of["parts"]["worth"].text(2)]
        cells += [of["places shuffled"]["ratio"].text()]
        rows.append([*cells, "open" if line["open"] else "closed"])
    return markdown(heads, rows)


def trainings(lines: Sequence[Mapping[str, Any]], task: Task) -> dict[str, dict[int, Mapping[str, Any]]]:
    """By arm and seed; of a run that was begun again to go on, its whole course and the shorter one's held out."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for line in sorted((line for line in lines if line["stage"] == "evaluation"), key=lambda line: len(line["right"])):
        if Task.of(line) != task:
            continue
        shorter = found.setdefault(line["arm"], {}).get(line["seed"])
        if shorter is not None and line["right"][: len(shorter["right"])] != shorter["right"]:
            raise ValueError(f"{line['arm']}, seed {line['seed']}: the longer run does not begin as the shorter one.")
        found[line["arm"]][line["seed"]] = line if shorter is None else {**line, "heldout": shorter["heldout"]}
    return found


def completions_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Completions to the target, and the held-out accuracy at the end, each beside `shared` at the same seeds."""
    heads = ["parts", "arm", "rate", "seeds", "met", "completions to the target", "times fewer"]
    heads += ["held out after 30 steps", "difference"]
    rows = []
    for task in TASKS:
        by_arm = trainings(lines, task)
        for arm, of_arm in sorted(by_arm.items(), key=lambda one: [*ARMS].index(one[0])):
            needed = {seed: needed_by(line) for seed, line in of_arm.items()}
            met = [one.amount * PROMPTS * GROUP for one in needed.values() if one.met]
            last = {seed: line["heldout"] for seed, line in of_arm.items()}
            rate = next(iter(of_arm.values()))["rate"]
            cells = [str(task), arm, f"{rate:g}", str(len(of_arm)), str(len(met))]
            cells += [f"{statistics.fmean(met):,.0f}" if met else "-"]
            base, pairs, differences = by_arm.get("shared", {}), [], []
            for seed in sorted({*of_arm} & {*base}):
                pairs.append((needed_by(base[seed]), needed[seed]))
                differences.append(last[seed] - base[seed]["heldout"])
            is_base = arm == "shared"
            cells += ["" if is_base else ratio_text(pairs), f"{statistics.fmean(last.values()):.3f}"]
            rows.append([*cells, "" if is_base else interval(differences)])
    return markdown(heads, rows)


def ratio_text(pairs: Sequence[tuple[Needed, Needed]]) -> str:
    """The geometric mean of the ratios with its interval; > if a base did not get there."""
    if not pairs or any(not own.met for _, own in pairs):
        return "-"
    logs = [math.log(base.amount / own.amount) for base, own in pairs]
    bound = "> " if any(not base.met for base, _ in pairs) else ""
    if len(logs) < 2:
        return f"{bound}{math.exp(logs[0]):.2f}"
    of_logs = estimate(logs)
    low, high = (math.exp(of_logs.mean + sign * of_logs.half_width) for sign in (-1, 1))
    return f"{bound}{math.exp(of_logs.mean):.2f} [{low:.2f}, {high:.2f}]"


@dataclass(frozen=True)
class Clock:
    """Seconds of an arm's steps."""

    parts: Sequence[float]  # sampling, rewards and update: medians over the timed runs, without their first steps
    step: float
    once: float  # what the first step takes more: the trial of packed rows

    def to_target(self, needed: Needed) -> Needed:
        return Needed(self.once + needed.amount * self.step, needed.met)


def clock_of(lines: Sequence[Mapping[str, Any]], task: Task, arm: str, dtype: str) -> Clock | None:
    """The seconds of an arm's timed runs, if there are any."""
    timed = [line for line in lines if line["stage"] == "time" and Task.of(line) == task]
    found = [line for line in timed if line["arm"] == arm and line["dtype"] == dtype]
    if not found:
        return None
    names = [f"{part}_s" for part in ("sampling", "rewards", "update")]
    wholes = [[sum(one) for one in zip(*(line[name] for name in names), strict=True)] for line in found]
    step = statistics.median(second for whole in wholes for second in whole[1:])
    parts = [statistics.median(second for line in found for second in line[name][1:]) for name in names]
    return Clock(parts, step, statistics.median(whole[0] for whole in wholes) - step)


def time_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of a step, and to the target."""
    heads = ["parts", "precision", "arm", "sampling, s", "rewards", "update", "a step", "times faster"]
    heads += ["more in the first step", "seconds to the target", "times less time"]
    rows = []
    for task in TASKS:
        by_arm = trainings(lines, task)
        for dtype in ("float32", "bfloat16"):
            plain = clock_of(lines, task, "plain TRL", dtype)
            for arm in ("plain TRL", "compact", "shared", "parts"):
                clock = clock_of(lines, task, arm, dtype)
                if clock is None or plain is None:
                    continue
                cells = [str(task), dtype, arm, *(f"{one:.2f}" for one in [*clock.parts, clock.step])]
                cells += [f"{plain.step / clock.step:.2f}", f"{clock.once:.1f}"]
                pairs = []
                for seed, base in by_arm.get("shared", {}).items() if dtype == "float32" else ():  # as the trainings
                    own = by_arm.get("parts", {}).get(seed) if arm == "parts" else base
                    if own is not None:
                        pairs.append((plain.to_target(needed_by(base)), clock.to_target(needed_by(own))))
                met = [own.amount for _, own in pairs if own.met]
                cells += [f"{statistics.fmean(met):,.0f} ({len(met)} of {len(pairs)})" if met else ""]
                rows.append([*cells, ratio_text(pairs) if pairs and arm != "plain TRL" else ""])
    return markdown(heads, rows)


DRAWN = {
    "plain TRL": ("shared", "0.45", "plain TRL"),
    "shared": ("shared", "C1", "cheap updates"),
    "parts": ("parts", "C0", "and part_credit"),
}
"""By arm: whose trainings are drawn over its seconds, in which color, under which name."""


def plot(lines: Sequence[Mapping[str, Any]], tasks: Sequence[Task], path: Path) -> None:
    """Right answers over completions and over seconds: faint, a line for each seed; bold, the mean of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def draw(axis: Any, of_arm: Sequence[Mapping[str, Any]], color: str, label: str, first: float, step: float) -> None:
        courses = [[right for _, right in windows(line["right"])] for line in of_arm]
        places = [first + middle * step for middle, _ in windows(range(LONGER))]
        for course in courses:
            axis.plot(places[: len(course)], course, color, lw=0.8, alpha=0.3)
        mean = [statistics.fmean(one) for one in zip(*courses, strict=False)]  # as far as every seed goes
        axis.plot(places[: len(mean)], mean, color, lw=2.2, label=label)

    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(8.8, 3.2 * len(tasks)), squeeze=False)
    for (completions, seconds), task in zip(axes, tasks, strict=True):
        by_arm = {arm: list(of_seed.values()) for arm, of_seed in trainings(lines, task).items()}
        for arm, label in (("shared", "outcome reward"), ("parts", "part_credit")):
            draw(completions, by_arm[arm], DRAWN[arm][1], label, 0.0, PROMPTS * GROUP)
        for arm, (source, color, label) in DRAWN.items():
            if (clock := clock_of(lines, task, arm, "float32")) is not None:
                draw(seconds, by_arm[source], color, label, clock.once, clock.step)
        completions.set_xlabel("completions")
        seconds.set_xlabel("seconds of one core")
        for axis in (completions, seconds):
            axis.axhline(TARGETS[task.form], color="0.7", lw=0.8, ls="--")
            axis.set_title(f"{task} parts", fontsize=10)
            axis.legend(fontsize=8, loc="lower right")
        completions.set_ylabel("right answers")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("start", "gate", "tune", "train", "time", "report"))
    parser.add_argument("--parts", nargs="+", type=int, default=PARTS)
    parser.add_argument("--form", choices=FORMS, default="lines", help="of the answers")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=("shared", "parts"))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--groups", type=int, default=200, help="prompts of the gate")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, one thread each")
    parser.add_argument("--docs", type=Path, help="a page whose tables are replaced")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    results = Results(RUNS)
    results.lines = [{"form": "lines", **line} for line in results.lines]  # the first runs do not say it
    if options.command == "report":
        report(results.lines, options.docs)
        return
    start = start_of(options.form, "teacher" in options.arms)
    for parts in options.parts:
        task = Task(parts, options.form)
        known = {line["stage"] for line in results.lines if Task.of(line) == task}
        gates = {line["groups"] for line in results.lines if line["stage"] == "gate" and Task.of(line) == task}
        if options.command == "gate" and options.groups not in gates:
            results.add(gate(task, options.groups, start))
        teachers = {"hint": ({"weighed", "taught"}, start), "teacher": ({"teacher"}, TEACHER)}
        for stage, (arms, model) in teachers.items():
            if options.command == "tune" and arms & {*options.arms} and stage not in known:
                results.add(teachers_line(stage, task, model))
        rates = tuned_rates(results.lines, task) or tuned_rates(results.lines, TUNED_TASK)
        runs = {
            "tune": lambda: tuning_runs(task, options.arms),  # noqa: B023 (called here)
            "train": lambda: evaluation_runs(task, rates, options.arms, options.seeds),  # noqa: B023
            "time": lambda: time_runs(task, rates),  # noqa: B023
        }
        if options.command in runs:
            run_missing(runs[options.command](), results, options.jobs, partial(work, start=start), "last")


if __name__ == "__main__":
    main()
