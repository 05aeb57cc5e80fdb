"""Batch arithmetic: what a run's batch sizes come to, and every size that does not divide, all at once.

The rules are `GRPOConfig.__post_init__`'s (TRL 1.16) and those of our recipes; a test holds them against the real one.
Plain numbers: nothing is imported but the standard library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from .problem import Problem, Severity


@dataclass(frozen=True)
class BatchSetup:
    """What decides the sizes; names and defaults as in `GRPOConfig`, and what the launcher and the data set add.

    Attributes:
        processes: Of the whole job.
        evaluates: The run evaluates: `eval_strategy` is not "no", or the script evaluates by itself (ours do).
        prompts: Rows of the training set; None where unknown.
        eval_prompts: Rows of the evaluation set; None where unknown.
        save_steps: Optimizer steps between checkpoints, a share of all steps below 1; None where it does not count.
        eval_steps: The same of evaluations.
        prompt_length: Tokens of the longest prompt; None where unknown. TRL 1.16 does not cut prompts.
    """

    per_device_train_batch_size: int = 8
    processes: int = 1
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_generations: int = 8
    num_generations_eval: int | None = None
    num_iterations: int = 1
    per_device_eval_batch_size: int = 8
    evaluates: bool = False
    prompts: int | None = None
    eval_prompts: int | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    save_steps: float | None = None
    eval_steps: float | None = None
    max_completion_length: int = 512
    prompt_length: int | None = None
    auto_find_batch_size: bool = False


@dataclass(frozen=True)
class BatchPlan:
    """What a `BatchSetup` comes to. A completion is one row; None means that it depends on something unknown.

    Attributes:
        generation_batch_size: Completions generated at once, over all processes.
        steps_per_generation: Micro-batches that a generation batch is cut into.
        num_generations: Completions of one prompt.
        num_generations_eval: The same in evaluation.
        prompts_per_generation_batch: Different prompts in it.
        rows_per_process: Completions that one process generates at once.
        micro_batch: Completions in one forward and backward pass, over all processes.
        completions_per_optimizer_step: That the gradient of one optimizer step is made of.
        tokens_per_optimizer_step: Upper bound: the longest prompt and completion for each.
        micro_batches_per_generation: Forward and backward passes before new completions are generated.
        optimizer_steps_per_generation: Optimizer steps in that time; not whole where the two don't fit.
        optimizer_steps_per_epoch: Optimizer steps in one pass over the prompts.
        optimizer_steps: Of the whole run.
        epochs: Passes over the prompts.
        generation_batches: Of the whole run.
        completions_generated: Of the whole run.
        completions_trained_on: Rows of all forward and backward passes; a completion counts in each that it is in.
        prompts_left_out: In every epoch, those that fill no generation batch.
        eval_batch: Completions in one evaluation batch, over all processes.
        old_log_probabilities: TRL scores the completions once more before training on them.
        problems: All that is wrong, and what is worth knowing.
    """

    generation_batch_size: int
    steps_per_generation: int
    num_generations: int
    num_generations_eval: int
    prompts_per_generation_batch: int
    rows_per_process: int
    micro_batch: int
    completions_per_optimizer_step: int
    tokens_per_optimizer_step: int | None
    micro_batches_per_generation: int
    optimizer_steps_per_generation: Fraction
    optimizer_steps_per_epoch: int | None
    optimizer_steps: int | None
    epochs: float | None
    generation_batches: int | None
    completions_generated: int | None
    completions_trained_on: int | None
    prompts_left_out: int | None
    eval_batch: int
    old_log_probabilities: bool
    problems: tuple[Problem, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """No problem is an error."""
        return all(problem.severity != "error" for problem in self.problems)


def batch_arithmetic(setup: BatchSetup) -> BatchPlan:
    """Return all sizes and all problems of a setup. It never raises: sizes below 1 are problems and count as 1."""
    found = _Problems()
    own = {name: _at_least_one(found, setup, name) for name in _SIZES}
    micro_batch = own["per_device_train_batch_size"] * own["processes"]
    accumulation, group = own["gradient_accumulation_steps"], own["num_generations"]
    steps, generation_batch = _generation_batch(found, setup, micro_batch, accumulation)
    _check_groups(found, setup, generation_batch, group)
    group_eval = setup.num_generations_eval or group
    eval_batch = own["per_device_eval_batch_size"] * own["processes"]
    if setup.evaluates:
        _check_evaluation(found, setup, eval_batch, group_eval)
    if setup.auto_find_batch_size:
        found.add(
            "error",
            "auto_find_batch_size is on, which TRL refuses: smaller batches would split groups.",
            "Remove it, and lower per_device_train_batch_size where memory runs out.",
        )

    every = steps * own["num_iterations"]
    prompts_per_batch = generation_batch // group
    completions = micro_batch * accumulation
    per_epoch = _optimizer_steps_per_epoch(found, setup, prompts_per_batch, every, accumulation)
    total = setup.max_steps if setup.max_steps > 0 else None
    if total is None and per_epoch is not None:
        total = math.ceil(setup.num_train_epochs * per_epoch)
    generation_batches = None if total is None else -(-total * accumulation // every)
    _check_rhythm(found, setup, every, accumulation, total)
    longest = None if setup.prompt_length is None else setup.prompt_length + setup.max_completion_length
    return BatchPlan(
        generation_batch_size=generation_batch,
        steps_per_generation=steps,
        num_generations=group,
        num_generations_eval=group_eval,
        prompts_per_generation_batch=prompts_per_batch,
        rows_per_process=own["per_device_train_batch_size"] * steps,
        micro_batch=micro_batch,
        completions_per_optimizer_step=completions,
        tokens_per_optimizer_step=None if longest is None else completions * longest,
        micro_batches_per_generation=every,
        optimizer_steps_per_generation=Fraction(every, accumulation),
        optimizer_steps_per_epoch=per_epoch,
        optimizer_steps=total,
        epochs=None if not per_epoch or total is None else total / per_epoch,
        generation_batches=generation_batches,
        completions_generated=None if generation_batches is None else generation_batches * generation_batch,
        completions_trained_on=None if total is None else total * completions,
        prompts_left_out=None if setup.prompts is None else setup.prompts % max(1, prompts_per_batch),
        eval_batch=eval_batch,
        old_log_probabilities=accumulation % every != 0,
        problems=tuple(found.all),
    )


_SIZES = (
    "per_device_train_batch_size",
    "processes",
    "gradient_accumulation_steps",
    "num_generations",
    "num_iterations",
    "per_device_eval_batch_size",
)


class _Problems:
    def __init__(self) -> None:
        self.all: list[Problem] = []

    def add(self, severity: Severity, message: str, fix: str) -> None:
        self.all.append(Problem(severity, "batch", message, fix))


def _at_least_one(found: _Problems, setup: BatchSetup, name: str) -> int:
    value = int(getattr(setup, name))
    if value < 1:
        found.add("error", f"{name} is {value}; it must be at least 1.", f"Set {name} to 1 or more.")
    return max(1, value)


def _generation_batch(found: _Problems, setup: BatchSetup, micro_batch: int, accumulation: int) -> tuple[int, int]:
    """Return steps_per_generation and generation_batch_size."""
    steps, batch = setup.steps_per_generation, setup.generation_batch_size
    if steps is not None and steps < 1:
        found.add("error", f"steps_per_generation is {steps}; it must be at least 1.", "Set it to 1 or more.")
        steps = 1
    if batch is not None and batch < 1:
        found.add("error", f"generation_batch_size is {batch}; it must be at least 1.", "Set it to 1 or more.")
        batch = None
    if steps is not None and batch is not None:
        found.add(
            "error",
            f"generation_batch_size ({batch}) and steps_per_generation ({steps}) are both set: TRL takes one of them.",
            f"Remove one; steps_per_generation {steps} alone makes a generation batch of {micro_batch * steps}.",
        )
    elif batch is not None:
        if batch % micro_batch:
            near = " or ".join(map(str, _near_multiples(batch, math.lcm(micro_batch, max(1, setup.num_generations)))))
            found.add(
                "error",
                f"generation_batch_size ({batch}) is not a multiple of {micro_batch}, which is "
                f"per_device_train_batch_size ({setup.per_device_train_batch_size}) times {setup.processes} "
                "process(es).",
                f"Set generation_batch_size to {near}.",
            )
        return max(1, batch // micro_batch), batch
    steps = accumulation if steps is None else steps
    return steps, micro_batch * steps


def _check_groups(found: _Problems, setup: BatchSetup, generation_batch: int, group: int) -> None:
    if setup.num_generations == 1:
        found.add(
            "error",
            "num_generations is 1: GRPO compares at least 2 completions of a prompt.",
            "Set num_generations to 2 or more.",
        )
    if not generation_batch % group:
        return
    fixes = []
    if groups := _near_divisors(generation_batch, group):
        fixes.append(f"num_generations to {groups}")
    if setup.generation_batch_size is None:
        others = generation_batch // max(1, setup.per_device_train_batch_size)
        near = _near_multiples(setup.per_device_train_batch_size, group // math.gcd(group, others))
        fixes.append(f"per_device_train_batch_size to {' or '.join(map(str, near))}")
        setting = "gradient_accumulation_steps" if setup.steps_per_generation is None else "steps_per_generation"
        steps = setup.gradient_accumulation_steps if setup.steps_per_generation is None else setup.steps_per_generation
        rest = generation_batch // max(1, steps)
        near = _near_multiples(steps, group // math.gcd(group, rest))
        fixes.append(f"{setting} to {' or '.join(map(str, near))}")
    else:
        micro_batch = max(1, setup.per_device_train_batch_size) * max(1, setup.processes)
        near = _near_multiples(generation_batch, math.lcm(group, micro_batch))
        fixes.append(f"generation_batch_size to {' or '.join(map(str, near))}")
    found.add(
        "error",
        f"The generation batch of {generation_batch} completions cannot be divided into groups of {group} "
        "(num_generations).",
        f"Set {', or '.join(fixes)}.",
    )


def _check_evaluation(found: _Problems, setup: BatchSetup, eval_batch: int, group: int) -> None:
    if group >= 1 and eval_batch % group:
        step = group // math.gcd(group, max(1, setup.processes))
        near = " or ".join(map(str, _near_multiples(setup.per_device_eval_batch_size, step)))
        name = (
            "num_generations_eval" if setup.num_generations_eval else "num_generations (num_generations_eval is unset)"
        )
        found.add(
            "error",
            f"The evaluation batch of {eval_batch} completions (per_device_eval_batch_size "
            f"{setup.per_device_eval_batch_size} times {setup.processes} process(es)) cannot be divided into groups of "
            f"{group} ({name}).",
            f"Set per_device_eval_batch_size to {near}, or num_generations_eval to "
            f"{_near_divisors(eval_batch, group, 1)}.",
        )
    elif setup.eval_prompts is not None and (left := setup.eval_prompts * group % eval_batch):
        found.add(
            "note",
            f"{setup.eval_prompts} evaluation prompts with {group} completion(s) each do not fill batches of "
            f"{eval_batch}: TRL averages over batches, so the last one, with {left}, counts as much as a whole one.",
            f"Evaluate on {_whole(setup.eval_prompts, eval_batch, group)} prompts, or change the batch.",
        )


def _optimizer_steps_per_epoch(
    found: _Problems, setup: BatchSetup, prompts_per_batch: int, every: int, accumulation: int
) -> int | None:
    if setup.prompts is None or prompts_per_batch < 1:
        return None
    batches = setup.prompts // prompts_per_batch
    if batches == 0:
        found.add(
            "error",
            f"{setup.prompts} training prompt(s) fill no generation batch, which takes {prompts_per_batch} different "
            "ones: nothing would be trained on.",
            "Give more prompts, or lower per_device_train_batch_size or the steps per generation.",
        )
        return 0
    micro_batches = batches * every
    if left := micro_batches % accumulation:
        found.add(
            "note",
            f"An epoch has {micro_batches} micro-batches, and {accumulation} make an optimizer step: the last step of "
            f"each epoch is made of {left}.",
            "Nothing, or change the number of prompts.",
        )
    # As transformers' Trainer counts: a last, incomplete step is a step.
    return -(-micro_batches // accumulation)


def _check_rhythm(found: _Problems, setup: BatchSetup, every: int, accumulation: int, total: int | None) -> None:
    if every % accumulation and accumulation % every:
        found.add(
            "warning",
            f"New completions come every {every} micro-batches (steps_per_generation times num_iterations), optimizer "
            f"steps every {accumulation}: some steps mix completions of two policies.",
            f"Make one a multiple of the other: gradient_accumulation_steps {_near_divisors(every, accumulation, 1)}, "
            "or other steps per generation.",
        )
    for name, happens in (("save_steps", "Checkpoints"), ("eval_steps", "Evaluations")):
        value = getattr(setup, name)
        if value is None or value <= 0:
            continue
        if value < 1:
            if total is None:
                continue
            value = math.ceil(total * value)  # as transformers' Trainer reads a share
        value = int(value)
        if value * accumulation % every == 0 or every <= accumulation:
            continue
        per_generation = Fraction(every, accumulation)
        fix = f"Set {name} to a multiple of {per_generation.numerator}: " + " or ".join(
            map(str, _near_multiples(value, per_generation.numerator))
        )
        if name == "save_steps":
            found.add(
                "warning",
                f"Checkpoints every {value} optimizer steps fall in the middle of a generation batch, which lasts "
                f"{per_generation} optimizer steps: its completions are not saved, so a resumed run generates anew and "
                "is not the run that went on.",
                fix + ".",
            )
        else:
            found.add(
                "note",
                f"{happens} every {value} optimizer steps fall in the middle of a generation batch, which lasts "
                f"{per_generation} optimizer steps: the same completions are trained on before and after.",
                fix + ", where that matters.",
            )


def _near_multiples(value: int, step: int) -> list[int]:
    """The nearest positive multiples of `step` below and above `value`, nearest first; `value` itself if it is one."""
    below, above = value // step * step, -(-value // step) * step
    return sorted({n for n in (below, above) if n > 0} or {step}, key=lambda n: (abs(n - value), n))


def _near_divisors(number: int, value: int, least: int = 2) -> str:
    """Up to two divisors of `number` nearest to `value`, as text; empty where there is none from `least` on."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    near = sorted((n for n in divisors if n >= least), key=lambda n: (abs(n - value), n))[:2]
    return " or ".join(map(str, near))


def _whole(prompts: int, eval_batch: int, group: int) -> int:
    per_batch = eval_batch // group
    return prompts // per_batch * per_batch or per_batch
