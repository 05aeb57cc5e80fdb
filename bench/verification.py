r"""`math_accuracy` beside TRL's `accuracy_reward`: hostile completions, ordinary batches, and GSM8K's references.

    python -m bench.verification hostile [--limit 20]
    python -m bench.verification integrals
    python -m bench.verification throughput [--rounds 7]
    python -m bench.verification agreement --gsm8k FOLDER
    python -m bench.verification load [--gsm8k FOLDER] [--pairs FILE] [--busy 4] [--each 18]

`hostile` gives TRL each completion in a process of its own, which is killed after `--limit` seconds, and ours all of
them as one batch. `integrals` says what 64 different slow integrals cost two workers, in a first batch and in a later
one. `throughput` lets both take turns on the same batches, new ones in every round so that no cache
helps, and takes the best time of each. `agreement` compares the scores on every answer of GSM8K's files, in several
spellings. `load` lets both take turns on an idle machine and beside `--busy` spinning processes: on ordinary pairs, on
college-level expressions, on GSM8K's answers, and on those of a file with a `reference` and an `answer` in each line of
JSON; and it says what the first batch and 64 hostile completions cost.
"""

import argparse
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from trl.rewards import accuracy_reward

from bench import tables
from bench.college_expressions import college_pairs
from tests.busy import busy
from tests.rewards.hostile_texts import HOSTILE, ORDINARY
from trl_grpo_ext.rewards._math.plain_answers import _read_reference
from trl_grpo_ext.rewards.math_accuracy import MathAccuracy

Pair = tuple[str, str]
CONSOLE = Console(width=120)
GROUP = 8


def theirs(pairs: Sequence[Pair]) -> list[float | None]:
    scores: list[float | None] = accuracy_reward([[{"content": text}] for _, text in pairs], [ref for ref, _ in pairs])
    return scores


def ours(reward: MathAccuracy, pairs: Sequence[Pair]) -> list[float | None]:
    return reward(completions=[text for _, text in pairs], solution=[ref for ref, _ in pairs])


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------- hostile


def hostile(limit: float) -> None:
    """Print how long TRL's reward takes for each hostile completion alone, and ours for all of them."""
    context = multiprocessing.get_context("fork")
    times: list[float] = []
    never = 0
    for text in HOSTILE:
        child = context.Process(target=_quietly_theirs, args=(text,))
        start = time.perf_counter()
        child.start()
        child.join(limit)
        times.append(time.perf_counter() - start)
        if child.is_alive():
            never += 1
            child.kill()
            child.join()
    reward = MathAccuracy()
    ours(reward, [("$x$", "\\boxed{x}")])
    own = seconds(lambda: ours(reward, [("18", text) for text in HOSTILE]))
    reward.close()
    table = Table("", "seconds", f"not back within {limit:g} s", title=f"{len(HOSTILE)} hostile completions")
    table.add_row("TRL, one after the other, those not back cut off", f"{sum(times):.1f}", str(never))
    table.add_row("ours, one batch", f"{own:.1f}", "0")
    CONSOLE.print(table)


def _quietly_theirs(text: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable()
    theirs([("18", text)])


INTEGRALS = [
    f"\\boxed{{\\int_{{{low}}}^{{{high}}} {form.format(a, b)}\\,dx}}"
    for low, high in (("0", "1"), ("0", "\\frac{3}{4}"), ("\\frac{1}{4}", "1"), ("\\frac{1}{3}", "\\frac{2}{3}"))
    for a, b in ((100, 50), (37, 21), (9, 4), (13, 11))
    for form in (
        "\\sin(x^{{{}}})e^{{x^{{{}}}}}",
        "\\frac{{\\ln(1+x^{{{}}})}}{{1+x^{{{}}}}}",
        "e^{{-x^{{{}}}}}\\ln(1+x^{{{}}})",
        "\\cos(x^{{{}}})\\tan(x^{{{}}})",
    )
]
"""Sixty-four definite integrals of which sympy finds no antiderivative in time."""


def integrals() -> None:
    """Print what they cost in a first batch, whose workers have just started, and in the next one."""
    reward = MathAccuracy(workers=2, cache=0)
    table = Table("", "CPU s", "s", "outcomes", title=f"{len(INTEGRALS)} slow integrals, 2 workers")
    for name in ("the first batch", "the next"):
        before = cpu_seconds()
        begun = time.perf_counter()
        judged = reward.judge(INTEGRALS, ["18"] * len(INTEGRALS))
        wall = time.perf_counter() - begun
        cpu = cpu_seconds() - before
        ends = dict(Counter(one.outcome.value for one in judged))
        table.add_row(name, f"{cpu:.1f}", f"{wall:.1f}", str(ends))
    reward.close()
    CONSOLE.print(table)


# ---------------------------------------------------------------------------------------------------- throughput


def integers(group: random.Random, rng: random.Random) -> Pair:
    number = group.randrange(10_000)
    price = rng.randrange(1000)
    answer = rng.choice([number, number, number + rng.randrange(99)])
    return f"{number}", f"She makes {price} * 2 = ${2 * price} in two days. The answer is \\boxed{{{answer}}}."


def decimals(group: random.Random, rng: random.Random) -> Pair:
    number = group.randrange(1_000_000) / 100
    answer = rng.choice([f"{number:.2f}", f"{number:g}", f"{number + rng.randrange(99):.2f}"])
    return f"{number:.2f}", f"That is {rng.randrange(1000)} in all, so the answer is $\\boxed{{\\${answer}}}$."


def fractions(group: random.Random, rng: random.Random) -> Pair:
    a = group.randrange(1, 500)
    b = group.randrange(2, 500)
    times = rng.randrange(1, 9)
    answer = rng.choice([f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{times * a}}}{{{times * b}}}", f"{a + times}/{b}"])
    return f"$\\frac{{{a}}}{{{b}}}$", f"Of {rng.randrange(1000)} cases, the probability is \\boxed{{{answer}}}."


def mixed(group: random.Random, rng: random.Random) -> Pair:
    a = group.randrange(2, 1000)
    b = group.randrange(2, 1000)
    kind = group.randrange(7)
    c = rng.choice([a, a, rng.randrange(2, 1000)])
    return [
        (f"${a}$", f"The answer is \\boxed{{{c}}}."),
        (f"$\\sqrt{{{a}}}$", f"So the side is $\\boxed{{\\sqrt{{{c}}}}}$."),
        (f"${a}x+{b}$", f"So $f(x) = \\boxed{{{b}+{c}x}}$."),
        (f"$({a},{b})$", f"The point is \\boxed{{({c},{b})}}."),
        (f"$x={a}$", f"We get \\[ x = \\boxed{{{c}}} \\] as claimed."),
        (f"${a}\\pi$", f"The area is \\boxed{{{c}\\pi}}."),
        (f"$\\{{{a},{b}\\}}$", f"The solutions are \\boxed{{{b}}} and \\boxed{{{c}}}."),
    ][kind]


KINDS: tuple[Callable[[random.Random, random.Random], Pair], ...] = (integers, decimals, fractions, mixed)


def batch_of(kind: Callable[[random.Random, random.Random], Pair], size: int, seed: str, group: int) -> list[Pair]:
    """A batch as a training has it: `group` completions for each reference."""
    rng = random.Random(seed)
    return [kind(random.Random(f"{seed} {row // group}"), rng) for row in range(size)]


def throughput(rounds: int) -> None:
    """Print the best time of each on ordinary batches, and the ratio."""
    rewards = {workers: MathAccuracy(workers=workers) for workers in (1, None)}
    warm_up = batch_of(mixed, 256, "warm-up", GROUP)
    theirs(warm_up)
    for reward in rewards.values():
        ours(reward, warm_up)
    several = rewards[None]._pool.workers
    title = "milliseconds per batch, best of the rounds"
    table = Table(
        "completions", "per reference", "batch", "TRL", "1 worker", f"{several} workers", "ratios", title=title
    )
    for kind in KINDS:
        for size, group in ((64, GROUP), (256, GROUP), (256, 1)):
            best: dict[Any, float] = {}
            for turn in range(rounds):
                pairs = batch_of(kind, size, f"{kind.__name__} {size} {group} {turn}", group)
                arms: list[tuple[Any, Callable[..., Any]]] = [("TRL", theirs)]
                arms += [(workers, functools.partial(ours, reward)) for workers, reward in rewards.items()]
                for name, run in arms[turn % 3 :] + arms[: turn % 3]:
                    _read_reference.cache_clear()
                    best[name] = min(best.get(name, float("inf")), 1000 * seconds(functools.partial(run, pairs)))
            ratios = f"{best['TRL'] / best[1]:.1f}x, {best['TRL'] / best[None]:.1f}x"
            times = (f"{best[name]:.1f}" for name in ("TRL", 1, None))
            table.add_row(kind.__name__, str(group), str(size), *times, ratios)
    for reward in rewards.values():
        reward.close()
    CONSOLE.print(table)


# ----------------------------------------------------------------------------------------------------- agreement


def spellings(solution: str) -> dict[str, Pair]:
    """A GSM8K solution as pairs whose scores are compared."""
    final = solution.rpartition("####")[2].strip()
    number = final.replace(",", "")
    body = solution.rpartition("####")[0].strip()
    other = f"{int(number) + 1}" if number.lstrip("-").isdigit() else "0"
    return {
        "the number, boxed": (final, f"The answer is \\boxed{{{final}}}."),
        "without separators, in dollars": (final, f"The answer is $\\boxed{{\\${number}}}$."),
        "with .00": (final, f"The answer is \\boxed{{{number}.00}}."),
        "the next number": (final, f"The answer is \\boxed{{{other}}}."),
        "the solution, boxed number": (final, f"{body}\nThe answer is \\boxed{{{final}}}."),
        "the solution, no box": (final, solution),
        "the solution as reference": (solution, f"{body}\nThe answer is \\boxed{{{final}}}."),
        "the solution as reference, next number": (solution, f"The answer is \\boxed{{{other}}}."),
    }


def _compare(solutions: list[str]) -> tuple[dict[str, list[int]], list[Any]]:
    """By spelling, the number of pairs, of those that are right, and of differences; and the first differences."""
    warnings.simplefilter("ignore")
    reward = MathAccuracy(timeout=10.0, workers=1)
    counts: dict[str, list[int]] = {}
    examples: list[Any] = []
    for start in range(0, len(solutions), 64):
        rows = [row for solution in solutions[start : start + 64] for row in spellings(solution).items()]
        pairs = [pair for _, pair in rows]
        for (name, pair), own, trls in zip(rows, ours(reward, pairs), theirs(pairs), strict=True):
            count = counts.setdefault(name, [0, 0, 0])
            count[0] += 1
            count[1] += own == 1.0
            count[2] += own != trls
            if own != trls:
                examples.append((*pair, own, trls))
    reward.close()
    return counts, examples[:5]


def agreement(folder: Path, processes: int) -> None:
    """Print on how many pairs of GSM8K's files the scores differ."""
    files = sorted(folder.glob("*.jsonl"))
    solutions = [json.loads(line)["answer"] for file in files for line in file.read_text("utf-8").splitlines()]
    start = time.perf_counter()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as executor:
        results = list(executor.map(_compare, [solutions[part::processes] for part in range(processes)]))
    table = Table("completion", "pairs", "right", "differ from TRL", title=f"{len(solutions)} solutions of GSM8K")
    for name in results[0][0]:
        table.add_row(name, *(str(sum(counts[name][column] for counts, _ in results)) for column in range(3)))
    CONSOLE.print(table)
    CONSOLE.print(f"{time.perf_counter() - start:.0f} s with {processes} processes")
    for example in (example for _, examples in results for example in examples):
        CONSOLE.print(example)


# ---------------------------------------------------------------------------------------------------------- load


def load(gsm8k: Path | None, file: Path | None, busy_processes: int, each: int) -> None:
    """Print pairs per second and CPU time, idle and busy, how many verdicts differ, and what hostile ones cost."""
    warnings.simplefilter("ignore")
    logging.disable()
    sets = {
        "ordinary": [pair for turn in range(8) for pair in batch_of(mixed, 64, f"load {turn}", GROUP)],
        "college": college_pairs(each=each),
    }
    if gsm8k is not None:
        solutions = [json.loads(line)["answer"] for line in (gsm8k / "test.jsonl").read_text("utf-8").splitlines()]
        sets["GSM8K"] = [pair for solution in solutions[:200] for pair in spellings(solution).values()]
    if file is not None:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        sets[file.name] = [(line["reference"], line["answer"]) for line in lines]
    theirs(sets["ordinary"][:64])
    columns = ("pairs", "number", "machine", "TRL, pairs/s", "1 worker", "2 workers", "CPU: TRL, 2 workers", "differ")
    table = Table(*columns, title="in turns, batches of 64")
    for name, pairs in sets.items():
        for machine, spinning in (("idle", 0), ("busy", busy_processes)):
            with busy(spinning):
                wall, cpu, differ = _in_turns(pairs)
            speeds = [f"{len(pairs) / wall[arm]:.0f} ({wall[0] / wall[arm]:.2f}x)" for arm in (0, 1, 2)]
            cost = f"{cpu[0]:.1f} s, {cpu[2]:.1f} s ({cpu[0] / cpu[2]:.2f}x)"
            table.add_row(name, str(len(pairs)), machine, *speeds, cost, str(differ))
    CONSOLE.print(table)
    for machine, spinning in (("idle", 0), ("busy", busy_processes)):
        with busy(spinning):
            CONSOLE.print(f"{machine}: {_hostile_among_ordinary()}")


def _in_turns(pairs: Sequence[Pair]) -> tuple[list[float], list[float], int]:
    """Seconds and CPU seconds of TRL's reward and of ours with one and two workers, and how many scores differ."""
    rewards = [MathAccuracy(workers=workers, cache=0) for workers in (1, 2)]
    arms: list[Callable[..., Any]] = [theirs, *(functools.partial(ours, reward) for reward in rewards)]
    for reward in rewards:
        reward.start_workers()
    time.sleep(10)  # as the model is loaded meanwhile
    for arm in arms:
        arm([("$x$", "\\boxed{y}")] * 2)
    wall = [0.0] * 3
    cpu = [0.0] * 3
    differ = 0
    for start in range(0, len(pairs), 64):
        scores: dict[int, Any] = {}
        for arm in (0, 1, 2) if start % 128 else (2, 1, 0):
            before = cpu_seconds()
            begun = time.perf_counter()
            scores[arm] = arms[arm](pairs[start : start + 64])
            wall[arm] += time.perf_counter() - begun
            cpu[arm] += cpu_seconds() - before
        differ += sum(len({*row}) > 1 for row in zip(*scores.values(), strict=True))
    for reward in rewards:
        reward.close()
    return wall, cpu, differ


def cpu_seconds() -> float:
    """Of this process and all below it, those that have ended included."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _hostile_among_ordinary() -> str:
    """What the hostile ones cost alone, which bound ends them, and how many others are right among them."""
    reward = MathAccuracy(cache=0)
    reward.start_workers()
    time.sleep(10)  # as the model is loaded meanwhile
    first = seconds(lambda: ours(reward, batch_of(mixed, 64, "first", GROUP)))
    before = cpu_seconds()
    wall = seconds(lambda: ours(reward, [("18", text) for text in HOSTILE]))
    cpu = cpu_seconds() - before
    ends = Counter(judged.outcome.value for judged in reward.judge(HOSTILE, ["18"] * len(HOSTILE)))
    pairs = [pair for row, text in zip(ORDINARY, HOSTILE, strict=True) for pair in (row[:2], ("18", text))]
    right = sum(score == row[2] for score, row in zip(ours(reward, pairs)[::2], ORDINARY, strict=True))
    reward.close()
    return (
        f"the first 64 completions take {first:.2f} s; 64 hostile ones {wall:.1f} s and {cpu:.1f} s of CPU time, "
        f"{dict(ends)}; {right} of {len(ORDINARY)} ordinary ones judged with them are right"
    )


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("hostile").add_argument(
        "--limit", type=float, default=20.0, help="seconds, default %(default)s"
    )
    commands.add_parser("integrals")
    commands.add_parser("throughput").add_argument("--rounds", type=int, default=7, help="default %(default)s")
    compare = commands.add_parser("agreement")
    compare.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    compare.add_argument("--processes", type=int, default=2, help="default %(default)s")
    under_load = commands.add_parser("load")
    under_load.add_argument("--gsm8k", type=Path, help="folder with GSM8K's test.jsonl")
    under_load.add_argument("--pairs", type=Path, help="a JSON Lines file with `reference` and `answer`")
    under_load.add_argument("--busy", type=int, default=4, help="spinning processes, default %(default)s")
    under_load.add_argument("--each", type=int, default=18, help="expressions of a college form, default %(default)s")
    given = parser.parse_args()
    CONSOLE.print(f"{tables.machine()}, {tables.versions('trl', 'math-verify', 'sympy')}")
    if given.command == "hostile":
        hostile(given.limit)
    elif given.command == "integrals":
        integrals()
    elif given.command == "load":
        load(given.gsm8k, given.pairs, given.busy, given.each)
    elif given.command == "throughput":
        throughput(given.rounds)
    else:
        agreement(given.gsm8k, given.processes)


if __name__ == "__main__":
    main()
