"""Procedural tasks of the package `reasoning-gym`, scored by the task's own verifier where it can harm nobody."""

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome
from ..guard.parameters import choice, column, optional_module, seconds, whole
from ..guard.workers import WorkerPool
from ..types import RewardDeclaration
from ._judged import IN_A_WORKER, Judged, too_long
from ._sandbox.layers import isolate

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MEMORY_MB = 2048
# In an expression: no attribute, string, subscript or lambda, and of Python's functions only those that compute.
_NO_EXPRESSION = re.compile(r"\.\s*[^\W\d]|__|[\"'\[\]{}:;=\\@`]|\blambda\b")
_COMPUTE = {"abs", "divmod", "float", "int", "max", "min", "pow", "round", "sum"}
_CODE = frozenset(name for name in vars(builtins) if name not in _COMPUTE)


class ReasoningGym(Judged):
    """Score a completion by the verifier of the `reasoning-gym` task that its prompt came from.

    The columns are `task`, its name, `entry`, the problem as JSON, and optionally `config`, the task's settings as
    JSON; `reasoning_gym_rows` makes them. A problem that cannot be read, such as those of `arc_agi` and `rearc`, or
    whose own answer does not get 1.0, is an unparseable reference.

    Several verifiers evaluate the answer as Python. Here they read only literals and plain expressions, and each worker
    has given up its rights to files, network and processes. Scores are the verifier's own: many give any answer 0.01.

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
    usual: ClassVar = {Outcome.ERROR: None}  # the verifier raised on this answer
    reads = "the problem"
    declares = RewardDeclaration(
        conformance={
            "completions": ["<answer>7</answer>", "<answer>1</answer>", "It is 7.", ""],
            "columns": {"task": ["basic_arithmetic"], "entry": ['{"question": "3+4", "answer": "7", "metadata": {}}']},
        }
    )

    extract: str = choice("answer", "whole")
    timeout: float = seconds(5.0)
    max_characters: int = whole(20_000, lowest=1)

    def __post_init__(self) -> None:
        optional_module("reasoning_gym", "reasoning_gym")
        super().__post_init__()
        self._pool = WorkerPool(score, memory_mb=_MEMORY_MB, name="reasoning_gym")

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions; "none" where `task` is None, so that data sets can be mixed."""
        count = len(completions)
        tasks = column("reasoning_gym", "task", columns, count)
        entries = column("reasoning_gym", "entry", columns, count)
        configs = column("reasoning_gym", "config", columns, count) if "config" in columns else [None] * count
        found: dict[int, Judgement] = {}
        jobs: dict[int, list[Any]] = {}
        for row, completion in enumerate(completions):
            text = completion_text(completion)
            answer = text if self.extract == "whole" else next(reversed(_TAG.findall(text)), "")
            if tasks[row] is None:
                found[row] = Judgement(Outcome.NONE)
            elif not answer.strip():
                found[row] = Judgement(Outcome.NO_ANSWER)
            elif len(answer) > self.max_characters:
                found[row] = Judgement(Outcome.REFUSED, f"an answer of {too_long(len(answer), self.max_characters)}")
            else:
                jobs[row] = [str(tasks[row]), configs[row] or "{}", entries[row], answer.strip()]
        for row, done in zip(jobs, self._pool.run([*jobs.values()], allowance=self.timeout), strict=True):
            if done.status != "done":
                found[row] = Judgement(Outcome(done.status), done.detail)
            elif isinstance(done.value, str):
                found[row] = Judgement(Outcome.UNPARSEABLE, done.value)
            else:
                found[row] = Judgement(Outcome.SCORED, score=done.value)
        return [found[row] for row in range(count)]


def reasoning_gym_rows(task: str, seed: int, size: int, **config: Any) -> list[dict[str, Any]]:
    """Rows of a data set for this reward: `prompt` (the question), `task`, `config`, `entry` and `answer`.

    Raises:
        ConfigurationError: There is no such task, or it does not take this configuration.
    """
    settings = json.dumps(config)
    dataset = _dataset(task, settings, seed=seed, size=max(size, 1))  # no task takes 0
    if isinstance(dataset, str):
        raise ConfigurationError(f"reasoning_gym: {dataset}")
    rows = []
    for item in (dataset[index] for index in range(size)):
        named = {"task": task, "config": settings, "entry": json.dumps(item)}
        rows.append({"prompt": item["question"], **named, "answer": str(item["answer"])})
    return rows


def score(job: Sequence[Any]) -> float | str:
    """The verifier's score, or why the problem cannot be read. Runs in a worker."""
    task, config, text, answer = job
    _give_up_rights()
    dataset = _dataset(task, config)
    return dataset if isinstance(dataset, str) else _problem(task, config, text) or _verified(dataset, text, answer)


def _verified(dataset: Any, text: str, answer: str) -> float:
    entry = json.loads(text)
    with _only_expressions(str(entry)):
        return float(dataset.score_answer(answer, entry))


@functools.lru_cache(maxsize=1024)
def _problem(task: str, config: str, text: str) -> str:
    try:
        own = json.loads(text)["answer"]
        right = own is None or _verified(_dataset(task, config), text, str(own)) == 1
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        return f"the problem {text!r:.80} cannot be read: {error!r:.200}"
    return "" if right else f"the answer that comes with the problem {text!r:.80} does not get 1.0"


@functools.cache  # at the first job of this worker
def _give_up_rights() -> None:
    importlib.import_module("reasoning_gym")  # its files are read while they can be
    libraries = [sysconfig.get_paths()["purelib"], *(path for path in sys.path if path)]
    isolate([], _MEMORY_MB, 10**6, os.getppid(), libraries)


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: str, **drawn: int) -> Any:
    gym = importlib.import_module("reasoning_gym")
    try:
        return gym.create_dataset(task, **json.loads(config), **drawn)
    except (TypeError, ValueError, AssertionError) as error:
        return f"the task {task!r} with config {config} cannot be made: {error}"


@contextlib.contextmanager
def _only_expressions(problem: str) -> Iterator[None]:
    """Inside, the package evaluates nothing but literals, plain expressions, and what stands in its own problem."""
    sympy: Any = importlib.import_module("sympy")
    evaluate = builtins.eval
    parse = sympy.parse_expr

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

    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("reasoning_gym")]
    parsing = [vars(sympy), *(names for names in modules if names.get("parse_expr") is parse)]

    def put(new_eval: Callable[..., Any], new_parse: Callable[..., Any]) -> None:
        for names in modules:
            names["eval"] = new_eval
        for names in parsing:
            names["parse_expr"] = new_parse

    put(safe_eval, safe_parse)
    try:
        yield
    finally:
        put(evaluate, parse)
