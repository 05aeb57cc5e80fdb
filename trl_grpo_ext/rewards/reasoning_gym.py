"""Procedural tasks of the package `reasoning-gym`, scored by the task's own verifier where it can harm nobody."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, RewardError
from ..guard.messages import completion_text
from ..guard.outcomes import Consequence, Judgement, Outcome
from ..guard.parameters import choice, column, optional_module, seconds, whole
from ..guard.workers import WorkerPool
from ..types import RewardDeclaration
from ._judged import IN_A_WORKER, Judged, too_long
from ._sandbox.layers import isolate

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MEMORY_MB = 2048
_DATASETS = 64  # tasks with their settings that a worker keeps
# In an expression: no attribute, string, subscript or lambda, and of Python's functions only those that compute.
_NO_EXPRESSION = re.compile(r"\.\s*[^\W\d]|__|[\"'\[\]{}:;=\\@`]|\blambda\b")
_COMPUTE = {"abs", "divmod", "float", "int", "max", "min", "pow", "round", "sum"}
_CODE = frozenset(name for name in vars(builtins) if name not in _COMPUTE)


@dataclass(kw_only=True, eq=False)
class ReasoningGym(Judged):
    """Score a completion by the verifier of the `reasoning-gym` task that its prompt came from.

    A row names its problem by the columns `task`, `seed` and `index`, from which the worker makes it again with its
    verifier; `reasoning_gym_rows` makes such rows. The optional column `config` has the task's settings, as a mapping
    or as JSON. With the optional column `answer`, a problem that comes out with another answer is an unparseable
    reference: `polynomial_multiplication` depends on the order of a set, so set PYTHONHASHSEED=0.

    Several verifiers evaluate the answer as Python. Here they read only literals and plain expressions, and each worker
    has given up its rights to files, network and processes before the first answer. Scores are the verifier's own,
    partial credit included: many give 0.01 to any answer.

    Args:
        extract: "answer": inside the last `<answer>` tag, as the package does it; "whole": the whole completion.
        timeout: CPU seconds that one completion may take.
        max_characters: A longer answer is refused.
        outcomes: Values of the outcomes `no_answer`, `refused`, `timeout`, `died` (all 0.0), and, both None,
            `unparseable_reference` and `error` (the verifier raised on this answer).

    Source: Stojanovski et al., "Reasoning Gym" (2505.24760); the package's `score_answer`.
    """

    __name__ = "reasoning_gym"
    can = (Outcome.SCORED, Outcome.NONE, Outcome.NO_ANSWER, Outcome.UNPARSEABLE, *IN_A_WORKER)
    declares = RewardDeclaration(
        conformance={
            "completions": ["<answer>7</answer>", "<answer>1</answer>", "It is 7.", ""],
            "columns": {"task": ["basic_arithmetic"] * 4, "seed": [1] * 4, "index": [0, 1, 2, 3]},
        }
    )

    extract: str = choice("answer", "whole")
    timeout: float = seconds(5.0)
    max_characters: int = whole(20_000, lowest=1)

    def __post_init__(self) -> None:
        optional_module("reasoning_gym", "reasoning_gym")
        super().__post_init__()
        self._pool = WorkerPool(score, memory_mb=_MEMORY_MB, name="reasoning_gym")

    def usual(self) -> Mapping[Outcome, Consequence]:
        """An answer on which the verifier raises has no score."""
        return {Outcome.ERROR: None}

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions; "none" where `task`, `seed` or `index` is None, so data sets can be mixed.

        A `RewardError` says that a column is missing, or that a row names no problem.
        """
        count = len(completions)
        tasks, seeds, indices = (column("reasoning_gym", name, columns, count) for name in ("task", "seed", "index"))
        configs, references = (
            column("reasoning_gym", name, columns, count) if name in columns else [None] * count
            for name in ("config", "answer")
        )
        found: dict[int, Judgement] = {}
        jobs: dict[int, list[Any]] = {}
        for row, completion in enumerate(completions):
            answer = self._answer(completion_text(completion))
            if None in (tasks[row], seeds[row], indices[row]):  # of another data set in a mixture
                found[row] = Judgement(Outcome.NONE)
            elif answer is None:
                found[row] = Judgement(Outcome.NO_ANSWER)
            elif len(answer) > self.max_characters:
                found[row] = Judgement(Outcome.REFUSED, f"an answer of {too_long(len(answer), self.max_characters)}")
            else:
                problem = _problem(row, tasks[row], seeds[row], indices[row], configs[row])
                jobs[row] = [problem, references[row], answer]
        for row, done in zip(jobs, self._pool.run([*jobs.values()], allowance=self.timeout), strict=True):
            if isinstance(done.value, str):
                raise RewardError(f"reasoning_gym: row {row} names no problem: {done.value}")
            if done.status != "done":
                found[row] = Judgement(Outcome(done.status), done.detail)
            elif done.value is None:
                found[row] = Judgement(Outcome.UNPARSEABLE, "the problem that is made again has another answer")
            else:
                found[row] = Judgement(Outcome.SCORED, score=done.value)
        return [found[row] for row in range(count)]

    def _answer(self, text: str) -> str | None:
        if self.extract == "whole":
            return text.strip() or None
        matches = _TAG.findall(text)
        return matches[-1].strip() if matches else None


def reasoning_gym_rows(task: str, seed: int, size: int, **config: Any) -> list[dict[str, Any]]:
    """Rows of a data set for this reward: `prompt` (the question), `task`, `seed`, `index`, `config` and `answer`.

    Raises:
        ConfigurationError: There is no such task, or it does not take this configuration.
    """
    settings = json.dumps({"size": max(size, 1), **config})  # no task takes 0
    dataset = _dataset(task, seed, settings)
    if isinstance(dataset, str):
        raise ConfigurationError(f"reasoning_gym: {dataset}")
    items = ((index, dataset[index]) for index in range(size))
    named = {"task": task, "seed": seed, "config": settings}
    return [{"prompt": m["question"], **named, "index": index, "answer": str(m["answer"])} for index, m in items]


def _problem(row: int, task: Any, seed: Any, index: Any, config: Any) -> list[Any]:
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (seed, index))
    try:
        settings = json.dumps(json.loads(config) if isinstance(config, str) else dict(config or {}))
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reasoning_gym: config at row {row} must be a mapping or JSON, got {config!r:.200}."
        ) from error
    if not isinstance(task, str) or not whole:
        raise RewardError(
            f"reasoning_gym: row {row} names no problem: task {task!r:.80}, seed {seed!r:.80}, index {index!r:.80}."
        )
    return [task, seed, index, settings]


def score(job: Sequence[Any]) -> float | str | None:
    """The verifier's score, None where the row's problem is another one, or why there is no such problem."""
    (task, seed, index, config), reference, answer = job
    _give_up_rights()  # at the first job of this worker
    dataset = _dataset(task, seed, config)
    if isinstance(dataset, str):
        return dataset
    if index >= len(dataset):
        return f"index {index} of a data set of the size {len(dataset)}; the column `config` may have another `size`"
    entry = dataset[index]
    if reference is not None and str(entry["answer"]) != str(reference):
        return None
    with _only_expressions(str(entry)):
        return float(dataset.score_answer(answer, entry))


@functools.cache
def _give_up_rights() -> None:
    importlib.import_module("reasoning_gym")  # its files are read while they can be
    libraries = [sysconfig.get_paths()["purelib"], *(path for path in sys.path if path)]
    isolate([], _MEMORY_MB, 10**6, os.getppid(), libraries)


@functools.lru_cache(maxsize=_DATASETS)
def _dataset(task: str, seed: int, config: str) -> Any:
    """The task's data set, or why there is none."""
    gym = importlib.import_module("reasoning_gym")
    try:
        return gym.create_dataset(task, seed=seed, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        return f"the task {task!r} with config {config} cannot be made: {error}"


@contextlib.contextmanager
def _only_expressions(problem: str) -> Iterator[None]:
    """Inside, the package evaluates nothing but literals, plain expressions, and what stands in its own problem."""
    sympy: Any = importlib.import_module("sympy")
    evaluate = builtins.eval
    parse = sympy.parse_expr
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("reasoning_gym")]

    def safe_eval(source: Any, *scopes: Any) -> Any:
        own = isinstance(source, str) and source in problem
        # Its scopes would be this function's; what the package evaluates of its own is arithmetic.
        return evaluate(source, *scopes) if own else ast.literal_eval(source)

    def safe_parse(source: Any, *given: Any, **named: Any) -> Any:
        text = str(source)
        plain = not _NO_EXPRESSION.search(text) and not _CODE.intersection(re.findall(r"[^\W\d]\w*", text))
        if not plain and text not in problem:
            raise ValueError("no plain expression")
        return parse(source, *given, **named)

    def put(new_eval: Callable[..., Any], old_parse: Any, new_parse: Any) -> None:
        for names in modules:
            names["eval"] = new_eval
            if names.get("parse_expr") is old_parse:
                names["parse_expr"] = new_parse
        sympy.parse_expr = new_parse

    put(safe_eval, parse, safe_parse)
    try:
        yield
    finally:
        put(evaluate, safe_parse, parse)
