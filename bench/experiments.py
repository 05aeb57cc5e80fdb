"""Experiments from the texts that this project draws on: each a command, a table and a figure.

    python -m bench.experiments naive                    # runs what is missing, then draws
    python -m bench.experiments all --jobs 2
    python -m bench.experiments all --draw               # redraws figures and tables from the existing runs

`EXPERIMENTS` has them all. Every finished run is one line of `bench/runs/EXPERIMENT.jsonl`, so a command that was
stopped goes on where it was; drawing writes `docs/images/experiment_NAME.svg` and the table between the markers of
`docs/evidence.md`. Tasks, models and trainings are those of `bench.study`.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench import study
from bench.runner import Results, run_missing
from bench.tables import machine, markdown, write_block

from sorting.choices import NAIVE, NEVER_CLIPS  # isort: skip (`study` puts the recipes on the path)
from sorting.response_log import ResponseLog  # isort: skip
from sorting.rewards import sort_inclusion  # isort: skip
from sorting.task import EQUALS, save_untrained_model  # isort: skip
from trl_grpo_ext.types import HookDeclaration

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "bench" / "runs"
SEEDS = (1, 2, 3)
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which everybody can distinguish."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    experiment: str
    name: str
    seed: int


# ------------------------------------------------------------------------------------------------ what is looked at


class Meter:
    """An advantage hook that changes nothing: the rewards and lengths of each rollout, the ratios of each update.

    `rollouts` has a dictionary for each generation batch of training, `spreads` the standard deviation of
    `log π/π_old` over the tokens of each loss forward, and the share of tokens outside of 1 ± 0.2.
    """

    __name__ = "meter"
    declares = HookDeclaration(role="transform", needs=("old_logps",))

    def __init__(self) -> None:
        self.rollouts: list[dict[str, float | None]] = []
        self.spreads: list[tuple[float, float]] = []

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Any) -> torch.Tensor:
        if rollout.training:
            right_B = rollout.rewards_B >= 1.0 - 1e-6
            lengths_B = rollout.lengths_B.float()
            self.rollouts.append(
                {
                    "updates": rollout.step,
                    "reward": float(rollout.rewards_B.mean()),
                    "right": float(right_B.float().mean()),
                    "length": float(lengths_B.mean()),
                    "length_right": study.mean_or_none(lengths_B[right_B].tolist()),
                    "length_wrong": study.mean_or_none(lengths_B[~right_B].tolist()),
                    "tokens": float(lengths_B.sum()),
                }
            )
        return advantages_B_T

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Any) -> torch.Tensor:
        if forward.training:
            log_ratio = (forward.logps_B_T - forward.old_logps_B_T)[forward.mask_B_T > 0]
            outside = ((log_ratio.exp() - 1).abs() > 0.2).float().mean()
            self.spreads.append((float(log_ratio.std()), float(outside)))
        return advantages_B_T


class At(TrainerCallback):
    """Calls a function with the model after given optimizer steps; ends the training after the last."""

    def __init__(self, steps: Iterable[int], call: Callable[[int, Any], None]) -> None:
        self.steps = sorted(set(steps))
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if state.global_step in self.steps:
            self.call(state.global_step, model)
            model.train()
        control.should_training_stop |= state.global_step >= self.steps[-1]


def round_rows(value: Any) -> Any:
    """Four decimals or five digits: what is written down."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: round_rows(item) for key, item in value.items()}
    return [round_rows(item) for item in value] if isinstance(value, list | tuple) else value


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of equal keys as one list for each key."""
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


# --------------------------------------------------------------------------------------- naive: the lecture's trials

LECTURE_PROMPTS = ([1, 0, 2], [3, 2, 4], [1, 2, 3])
RESPONSES = 10
STEPS = 10
EPOCHS = 100
EARLY = 16
VARIANTS = {"raw": "raw_reward", "centred": "centred", "normalised": "normalised", "best only": "max_only"}
LECTURE = {"raw": 2.667, "centred": 3.333, "normalised": 3.333}
"""Mean reward of the last epoch in the lecture's own logs (seed 5)."""


def lecture_points(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The lecture's reward, 5 for the right answer."""
    return sort_inclusion(completions, form="lecture", **columns)


LECTURE_TASK = study.Task(
    reward=lecture_points,
    accuracy=lecture_points,
    methods=(),
    token_budget=0,
    learning_rates=(1e-3,),
    tuning_seeds=(),
    batch_size=len(LECTURE_PROMPTS) * RESPONSES,
    num_generations=RESPONSES,
    max_completion_length=3,
    held_out=0,
    warmup_steps=0,
)
LECTURE_ROWS = [{"prompt": f"{' '.join(map(str, row))} {EQUALS}", "numbers": row} for row in LECTURE_PROMPTS]
LECTURE_SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "num_iterations": STEPS,
    "logging_steps": STEPS,
    "loss_type": "dr_grpo",  # the sum over a constant: all responses of the lecture have three tokens
    "dataloader_drop_last": False,
}


def lecture_model(folder: Path, seed: int, **shape: int) -> Path:
    """A Llama of random weights that knows five numbers."""
    save_untrained_model(folder, largest=max(map(max, LECTURE_PROMPTS)), seed=seed, **shape)
    return folder


def naive_settings(name: str) -> dict[str, Any]:
    """Of one trial, by its name: "naive, raw"."""
    objective, variant = name.split(", ")
    hooks = [VARIANTS[variant], *([NAIVE] if objective == "naive" else [])]
    return {"advantage_hooks": hooks, "epsilon": NEVER_CLIPS if objective == "naive" else 0.2}


def run_naive(cell: Cell, epochs: int = EPOCHS) -> dict[str, Any]:
    """One of the lecture's trials; with the environment variable RESPONSE_LOG every response goes into a file there."""
    chosen = {**LECTURE_SETTINGS, **naive_settings(cell.name), "max_steps": epochs * STEPS}
    watching: list[Any] = []
    if folder := os.environ.get("RESPONSE_LOG"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{cell.name.replace(', ', '_').replace(' ', '_')}_seed_{cell.seed}.txt"
        watching = [ResponseLog(file=str(Path(folder) / name))]
    with tempfile.TemporaryDirectory() as folder:
        model = lecture_model(Path(folder), cell.seed)
        trainer = study.train_once(LECTURE_TASK, LECTURE_ROWS, model, cell.seed, chosen, watching=watching)
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {"rewards": rewards, "last": statistics.fmean(rewards[-10:])}


def figure_naive(lines: Sequence[Line], figure: Any) -> str:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, objective in zip(panels, ("naive", "clipped"), strict=True):
        for colour, variant in zip(COLOURS, VARIANTS, strict=False):
            curves = [line["rewards"] for line in lines if line["name"] == f"{objective}, {variant}"]
            band(axes, [STEPS * (i + 1) for i in range(EPOCHS)], curves, colour, variant)
        axes.set(title=f"{objective} loss", xlabel="optimizer step", ylim=(0, 5.1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward of a rollout (5: sorted)")
    panels[0].legend(loc="lower right")
    rows = []
    for variant in VARIANTS:
        cells = [over_seeds(lines, f"{objective}, {variant}", "last", 2) for objective in ("naive", "clipped")]
        early = [line["rewards"][EARLY - 1] for line in lines if line["name"] == f"naive, {variant}"]
        lecture = f"{LECTURE[variant]:.3f}" if variant in LECTURE else "not run"
        rows.append([variant, spread(early, 2), *cells, lecture])
    titles = ["deltas", f"naive, after {EARLY * STEPS} steps", "naive, last ten rollouts", "clipped, last ten rollouts"]
    return markdown([*titles, "the lecture: naive, last rollout"], rows)


# ------------------------------------------------------------------------------- baselines: the exact b* of a policy

CHECKPOINTS = (0, 50, 100, 200, 400)
BASELINES = ("none", "mean reward", "by length", "b*")


def exact_baselines(model: Any, prompt: Sequence[int], tokenizer: Any) -> dict[str, float]:
    """E‖∇log π‖²(r - b)² less ‖E[∇log π r]‖² for four b, the expectation over every response there is.

    A response is up to three tokens out of the whole vocabulary, or fewer and an end; its probability, its gradient
    and its reward are computed one by one (in blocks, by `torch.func`).
    """
    end = tokenizer.eos_token_id
    size = len(tokenizer)
    responses = [
        row for row in product(range(size), repeat=3) if end not in row[:2] or set(row[row.index(end) :]) == {end}
    ]
    lengths = [row.index(end) + 1 if end in row else 3 for row in responses]
    texts = tokenizer.batch_decode(
        [list(row[:n]) for row, n in zip(responses, lengths, strict=True)], skip_special_tokens=True
    )
    rewards = torch.tensor(lecture_points(texts, numbers=[list(prompt)] * len(texts)), dtype=torch.float64)
    first = tokenizer(f"{' '.join(map(str, prompt))} {EQUALS}", return_tensors="pt").input_ids[0]
    ids = torch.cat([first.expand(len(responses), -1), torch.tensor(responses)], dim=1)
    mask = torch.arange(3) < torch.tensor(lengths).unsqueeze(1)

    weights = {name: value.detach() for name, value in model.named_parameters()}

    def log_probability(weights: Any, ids_L: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, (ids_L.unsqueeze(0),), {"use_cache": False}).logits
        logps = torch.log_softmax(logits[0, len(first) - 1 : -1].float(), dim=-1)
        return (logps.gather(1, ids_L[len(first) :].unsqueeze(1)).squeeze(1) * mask_T).sum()

    per_row = torch.func.vmap(torch.func.grad_and_value(log_probability), in_dims=(None, 0, 0))
    norms = []
    probabilities = []
    mean = 0.0
    for block in range(0, len(ids), 128):
        part = slice(block, block + 128)
        gradients, logps = per_row(weights, ids[part], mask[part])
        flat = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double()
        probabilities.append(logps.double().exp())
        norms.append(flat.square().sum(dim=1))
        mean = mean + ((probabilities[-1] * rewards[part]) @ flat)
    p = torch.cat(probabilities)
    square = torch.cat(norms)
    length = torch.tensor(lengths, dtype=torch.float64)
    b = {
        "none": 0.0,
        "mean reward": float(p @ rewards),
        "by length": float((p * length) @ rewards / (p @ length)),
        "b*": float((p * square) @ rewards / (p @ square)),
    }
    signal = float(mean.square().sum())
    variances = {name: float((p * square) @ (rewards - value).square()) - signal for name, value in b.items()}
    return {
        "probability": float(p.sum()),
        "signal": signal,
        **{f"b {name}": value for name, value in b.items()},
        **{f"variance {name}": value for name, value in variances.items()},
    }


def run_baselines(cell: Cell, checkpoints: Sequence[int] = CHECKPOINTS) -> dict[str, Any]:
    """Train with centred rewards and the naive loss; at some steps measure the variance under each baseline."""
    found: list[dict[str, Any]] = []

    def measure(step: int, model: Any) -> None:
        model.eval()
        for prompt in LECTURE_PROMPTS:
            found.append({"step": step, **exact_baselines(model, prompt, tokenizer)})

    with tempfile.TemporaryDirectory() as folder:
        model = lecture_model(Path(folder), cell.seed, hidden_size=32, num_hidden_layers=1)
        tokenizer = AutoTokenizer.from_pretrained(model)
        eager = {"attn_implementation": "eager"}
        measure(0, AutoModelForCausalLM.from_pretrained(model, **eager))
        chosen = {**LECTURE_SETTINGS, **naive_settings("naive, centred"), "model_init_kwargs": eager}
        plain = partial(_with_plain_forward, call=measure)
        study.train_once(LECTURE_TASK, LECTURE_ROWS, model, cell.seed, chosen, callbacks=[At(checkpoints[1:], plain)])
    last = [row for row in found if row["step"] == checkpoints[-1]]
    share = statistics.fmean(row["variance b*"] / max(row["variance mean reward"], 1e-300) for row in last)
    return {"found": found, "b*/mean": share}


def _with_plain_forward(step: int, model: Any, call: Callable[[int, Any], None]) -> None:
    """A copy without TRL's head, which has no logits."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    call(step, copy)


def figure_baselines(lines: Sequence[Line], figure: Any) -> str:
    left, right = figure.subplots(1, 2)
    steps = sorted({row["step"] for line in lines for row in line["found"]})

    def mean(line: Line, step: int, key: str) -> float:
        return statistics.fmean(row[key] for row in line["found"] if row["step"] == step)

    for colour, name in zip(COLOURS, BASELINES, strict=False):
        shares = [
            [mean(line, step, f"variance {name}") / mean(line, step, "variance none") for step in steps]
            for line in lines
        ]
        band(left, steps, shares, colour, {"none": "no baseline"}.get(name, name))
        if name != "none":
            band(right, steps, [[mean(line, step, f"b {name}") for step in steps] for line in lines], colour, name)
    left.set(xlabel="optimizer step", ylabel="variance of the gradient, share", ylim=(0, None))
    right.set(xlabel="optimizer step", ylabel="the baseline, in points")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    rows = []
    for step in steps:
        shares = {
            name: [mean(line, step, f"variance {name}") / mean(line, step, "variance none") for line in lines]
            for name in BASELINES[1:]
        }
        values = [spread([mean(line, step, f"b {name}") for line in lines], 2) for name in ("mean reward", "b*")]
        rows.append([str(step), *values, *(spread(found, 4) for found in shares.values())])
    titles = ["step", "E[r]", "b*", *(f"variance left: {name}" for name in BASELINES[1:])]
    return markdown(titles, rows)


# ------------------------------------------------------------------------------------- reuse: steps for each rollout

EQUAL_ROLLOUTS = 48
EQUAL_UPDATES = 96
REUSE = ["clipped, 1", *(f"{kind}, {steps}" for steps in (2, 4, 8) for kind in ("clipped", "unclipped"))]
"""With one step for each rollout nothing is ever clipped."""


def run_reuse(cell: Cell, rollouts: int = EQUAL_ROLLOUTS, updates: int = EQUAL_UPDATES) -> dict[str, Any]:
    """Train with so many steps for each rollout; measure at equal rollouts and at equal updates."""
    kind, steps = cell.name.split(", ")
    task = study.TASKS["sorting"]
    meter = Meter()
    measured: dict[int, dict[str, Any]] = {}

    def measure(step: int, model: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            measured[step] = study.measure("sorting", "test", model, tokenizer)

    model = study.model_of("sorting", ROOT / "outputs" / "experiments")
    tokenizer = AutoTokenizer.from_pretrained(model)
    at = {"tokens": rollouts * int(steps), "updates": updates}
    trainer = study.train_once(
        task,
        study.problems("sorting", "train", task.train_problems, cell.seed),
        model,
        cell.seed,
        {
            "learning_rate": 2e-4,
            "num_iterations": int(steps),
            "epsilon": 0.2 if kind == "clipped" else NEVER_CLIPS,
            "logging_steps": int(steps),
        },
        callbacks=[At(at.values(), measure)],
        watching=[meter],
    )
    assert trainer.state.global_step == max(at.values())
    return {
        **{f"{what}_{when}": measured[step][what] for when, step in at.items() for what in ("accuracy", "reward")},
        "spread": [std for std, _ in meter.spreads],
        "outside": [share for _, share in meter.spreads],
        "rollouts": columns(meter.rollouts),
    }


def figure_reuse(lines: Sequence[Line], figure: Any) -> str:
    from matplotlib.ticker import MaxNLocator

    tokens, updates, spreads = figure.subplots(1, 3)
    styles = {"clipped": ("o-", COLOURS[1]), "unclipped": ("s--", COLOURS[2])}
    for axes, when, title in ((tokens, "tokens", "equal generated tokens"), (updates, "updates", "equal updates")):
        for kind, (style, colour) in styles.items():
            points = []
            for steps in (1, 2, 4, 8):
                name = "clipped, 1" if steps == 1 else f"{kind}, {steps}"
                values = [line[f"accuracy_{when}"] for line in lines if line["name"] == name]
                if values:
                    points.append((steps, statistics.fmean(values), min(values), max(values)))
            if points:
                x, mean, low, high = zip(*points, strict=True)
                bars = [
                    [m - a for m, a in zip(mean, low, strict=True)],
                    [b - m for m, b in zip(mean, high, strict=True)],
                ]
                axes.errorbar(x, mean, yerr=bars, fmt=style, color=colour, capsize=3, label=kind)
        axes.set(title=title, xlabel="steps for each rollout", ylabel="test accuracy", xscale="log", ylim=(0, None))
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
        axes.legend(loc="lower left")
    for kind, (style, colour) in styles.items():
        found = [line["spread"] for line in lines if line["name"] == f"{kind}, 8"]
        cycles = [[statistics.fmean(curve[i::8]) for i in range(8)] for curve in found]
        band(spreads, list(range(1, 9)), cycles, colour, f"{kind}, 8 steps", style)
    spreads.set(title="how far the policy has gone", xlabel="step on the rollout", ylabel="std of log ratio")
    spreads.xaxis.set_major_locator(MaxNLocator(integer=True))
    spreads.legend()
    for axes in (tokens, updates, spreads):
        axes.grid(alpha=0.3)
    rows = []
    for name in REUSE:
        found = [line for line in lines if line["name"] == name]
        if not found:
            continue
        last = int(name.split(", ")[1])
        std = spread([statistics.fmean(line["spread"][last - 1 :: last]) for line in found], 3)
        rows.append([name, *(over_seeds(lines, name, f"accuracy_{when}") for when in ("tokens", "updates")), std])
    titles = ["loss, steps for each rollout", f"test accuracy after {EQUAL_ROLLOUTS} rollouts"]
    titles += [f"after {EQUAL_UPDATES} updates", "std of log ratio, last step"]
    return markdown(titles, rows)


# ------------------------------------------------------------------------- length: what the aggregation does to lengths

LENGTH_ROLLOUTS = 40
LONGEST = 80
LENGTHS = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "constant_length": {},
    "length_power": {"alpha": 0.5},
    "seq_mean_token_sum": {},
}


def run_length(cell: Cell, rollouts: int = LENGTH_ROLLOUTS) -> dict[str, Any]:
    """The word problems with one aggregation; lengths of right and wrong completions, rollout by rollout."""
    task = replace(study.TASKS["word problems"], max_completion_length=LONGEST)
    meter = Meter()
    trainer = study.train_once(
        task,
        study.problems("word problems", "train", task.train_problems, cell.seed),
        study.EMBEDDED_MODEL,
        cell.seed,
        {
            "learning_rate": 1e-4,
            "max_steps": rollouts,
            "advantage_hooks": ["centred"],
            "loss_aggregation": {"name": cell.name, **LENGTHS[cell.name]},
        },
        watching=[meter],
    )
    measured = study.measure("word problems", "test", trainer.model, trainer.processing_class, longest=LONGEST)
    return {**measured, "rollouts": columns(meter.rollouts)}


def figure_length(lines: Sequence[Line], figure: Any) -> str:
    panels = figure.subplots(1, 3)
    drawn = (("length_right", "right completions"), ("length_wrong", "wrong completions"), ("right", "share right"))
    for axes, (key, title) in zip(panels, drawn, strict=True):
        for colour, name in zip(COLOURS, LENGTHS, strict=False):
            curves = [smooth(line["rollouts"][key]) for line in lines if line["name"] == name]
            band(axes, list(range(1, LENGTH_ROLLOUTS + 1)), curves, colour, name)
        axes.set(title=title, xlabel="rollout", ylabel="tokens" if key != "right" else "in training")
        axes.grid(alpha=0.3)
    panels[2].legend(fontsize=8)
    rows = [
        [f"`{name}`", *(over_seeds(lines, name, key, digits) for key, digits in MEASURED)]
        for name in LENGTHS
        if any(line["name"] == name for line in lines)
    ]
    return markdown(["aggregation", "test accuracy", "tokens of right completions", "of wrong completions"], rows)


MEASURED = (("accuracy", 3), ("length_right", 1), ("length_wrong", 1))


# ---------------------------------------------------------------------------- detox: the workflow beside the default

EMBEDDED = ROOT / "recipes" / "embedded" / "detox"
WORKFLOW = [
    *("--config", str(ROOT / "recipes" / "configs" / "detox_workflow.yaml"), "--entropy_coef", "0.005"),
    "--advantage_hooks",
    "{name: kl_in_reward, form: completion, coefficient: 0.04, target: 1.2, horizon: 400}",
    *("{name: normalised, std_floor: 0.1}", "whiten"),
]
LOGIT = f"{{name: classifier, model: {EMBEDDED / 'classifier'}, label: rude, sign: -1.0, score: logit}}"
DETOX = {"default": [], "workflow": WORKFLOW, "workflow, logit": [*WORKFLOW, "--rewards", LOGIT]}
KEPT = {"reward": "reward", "rude": "rewards/rude/mean", "neither": "rewards/neither/mean", "kl": "kl_per_completion"}


def run_detox(cell: Cell, *more: str) -> dict[str, Any]:
    """The recipe, embedded, in a process of its own; 5,120 completions and 160 updates in any case."""
    recipe = str(ROOT / "recipes" / "detox_grpo.py")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, recipe, *DETOX[cell.name], "--embedded", "--seed", str(cell.seed), *more]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*words, "--output_dir", folder], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
    logs = [log for log in metrics["history"] if log.get("kl_per_completion") is not None and "reward" in log]
    curves = {name: [log.get(key) for log in logs] for name, key in KEPT.items()}
    steps = [log["step"] for log in logs]
    coefficient = [log.get("kl_coefficient") for log in logs]
    return {
        "before": metrics["before"],
        "after": metrics["after"],
        **curves,
        "steps": steps,
        "coefficient": coefficient,
        "rude_after": metrics["after"]["rude"],
    }


def figure_detox(lines: Sequence[Line], figure: Any) -> str:
    panels = figure.subplots(1, 3)
    drawn = (("rude", "share that is rude"), ("neither", "share that is no reply"), ("kl", "nats for each completion"))
    for axes, (key, label) in zip(panels, drawn, strict=True):
        for colour, name in zip(COLOURS[1:], DETOX, strict=False):
            found = [line for line in lines if line["name"] == name]
            if found:
                band(axes, found[0]["steps"], [line[key] for line in found], colour, name)
        axes.set(xlabel="optimizer step", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].legend()
    rows = []
    for name in DETOX:
        found = [line for line in lines if line["name"] == name]
        cells = [spread([line["after"][key] for line in found], 3) for key in ("rude", "polite", "neither")]
        kl = spread([line["after"]["KL to the reference (nats)"] for line in found], 2)
        rows.append([name, *cells, kl, spread([line["coefficient"][-1] for line in found], 3)])
    starts = [line["before"] for line in lines if line["name"] == "default"]  # the same for all
    before = [[start[key] for start in starts] for key in ("rude", "polite", "neither")]
    rows.insert(0, ["before", *(spread(values, 3) for values in before), "0", ""])
    return markdown(["", "rude", "polite", "neither", "KL, nats", "coefficient, end"], rows)


# ------------------------------------------------------------------------------------------------- tables and figures


def spread(values: Sequence[float], digits: int) -> str:
    """Mean (lowest–highest)."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def over_seeds(lines: Iterable[Line], name: str, key: str, digits: int = 3) -> str:
    """One number of all runs of a name; empty if there is none."""
    values = [line[key] for line in lines if line["name"] == name and line[key] is not None]
    return spread(values, digits) if values else ""


def band(
    axes: Any, x: Sequence[float], curves: Sequence[Sequence[Any]], colour: str, label: str, style: str = "-"
) -> None:
    """The mean of the seeds as a line, between their lowest and highest."""
    nan = float("nan")
    columns_ = [[nan if value is None else value for value in at] for at in zip(*curves, strict=True)]
    if not columns_:
        return
    known = [[value for value in at if value == value] or [nan] for at in columns_]
    axes.plot(x, [statistics.fmean(at) for at in known], style, color=colour, label=label, linewidth=1.5, markersize=4)
    axes.fill_between(x, [min(at) for at in known], [max(at) for at in known], color=colour, alpha=0.12, linewidth=0)


def smooth(values: Sequence[float | None], width: int = 5) -> list[float | None]:
    """The mean of the last few that there are."""
    return [
        study.mean_or_none([value for value in values[max(i - width + 1, 0) : i + 1] if value is not None])
        for i in range(len(values))
    ]


@dataclass(frozen=True)
class Experiment:
    """What runs, what is drawn from it, what the figure shows, and which number of a run is printed when it is done."""

    names: Sequence[str]
    run: Callable[[Cell], dict[str, Any]]
    draw: Callable[[Sequence[Line], Any], str]
    about: str
    shown: str
    seeds: tuple[int, ...] = SEEDS
    size: tuple[float, float] = (9.0, 3.4)


EXPERIMENTS: dict[str, Experiment] = {
    "naive": Experiment(
        [f"{objective}, {variant}" for objective in ("naive", "clipped") for variant in VARIANTS],
        run_naive,
        figure_naive,
        "reward over the optimizer steps, naive and clipped",
        "last",
        seeds=(1,),
    ),
    "baselines": Experiment(
        ["centred"], run_baselines, figure_baselines, "variance of the gradient and the baselines", "b*/mean"
    ),
    "reuse": Experiment(
        REUSE,
        run_reuse,
        figure_reuse,
        "accuracy by steps for each rollout, and how far the ratio spreads",
        "accuracy_tokens",
        size=(11.0, 3.4),
    ),
    "length": Experiment(
        list(LENGTHS),
        run_length,
        figure_length,
        "lengths of right and wrong completions over training",
        "accuracy",
        size=(11.0, 3.4),
    ),
    "detox": Experiment(
        list(DETOX),
        run_detox,
        figure_detox,
        "rude completions, no replies, and the KL over training",
        "rude_after",
        seeds=(1,),
        size=(11.0, 3.4),
    ),
}


def work(cell: Cell) -> dict[str, Any]:
    """One run in a worker process: its line."""
    started = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        found = EXPERIMENTS[cell.experiment].run(cell)
    seconds = round(time.perf_counter() - started, 1)
    return {**asdict(cell), **round_rows(found), "seconds": seconds, "versions": study.versions(), "on": machine()}


def draw(name: str, lines: Sequence[Line], docs: Path) -> None:
    """The figure as SVG, the same bytes for the same runs, and the table between the page's markers."""
    import matplotlib
    from matplotlib.figure import Figure

    experiment = EXPERIMENTS[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=experiment.size, layout="constrained")
        found = experiment.draw(lines, figure)
        figure.savefig(docs / "images" / f"experiment_{name}.svg", metadata={"Date": None})
    minutes = sum(line["seconds"] for line in lines) / 60
    seeds = sorted({line["seed"] for line in lines})
    mean = f"Mean over the seeds {', '.join(map(str, seeds))} (lowest–highest)"
    said = f"{mean if len(seeds) > 1 else f'Seed {seeds[0]}'}. {len(lines)} runs, {minutes:.1f} minutes of one thread."
    figure_line = f"![{experiment.about}](images/experiment_{name}.svg)"
    write_block(docs / "evidence.md", name, f"{figure_line}\n\n{found}\n\n{said}")
    print(docs / "images" / f"experiment_{name}.svg")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=(*EXPERIMENTS, "all"))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the page")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the lines")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page and its figures are")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in EXPERIMENTS if options.experiment == "all" else (options.experiment,):
        results = Results(options.runs / f"{name}.jsonl")
        if not options.draw:
            seeds = options.seeds or EXPERIMENTS[name].seeds
            cells = [Cell(name, one, seed) for seed in seeds for one in EXPERIMENTS[name].names]
            if name == "reuse":
                study.model_of("sorting", ROOT / "outputs" / "experiments")  # made once, before the workers
            run_missing(cells, results, options.jobs, work, EXPERIMENTS[name].shown)
        if results.lines:
            draw(name, results.lines, options.docs)


if __name__ == "__main__":
    main()
