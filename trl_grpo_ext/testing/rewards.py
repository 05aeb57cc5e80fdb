"""The rules of rewards, each as a check on small calls in TRL's form, with completions of many kinds."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from ..guard.calls import PASSED_BY_TRL, call, check_scores, parameters_of, reward_name
from ..guard.outcomes import shown
from ..types import Parts, RewardDeclaration
from .rules import Broken, Checks, Finding, NotChecked, Rule, describe_exception, only_if, over, plugin_code

RELATIVE = 1e-4  # how far equal scores may be apart: a model's last digits change with the padding
ABSOLUTE = 1e-5
_SLOW = 0.02  # seconds per completion from which on fewer are tried
_FEW = 4  # so many
_ROUNDS = 10
_QUICK = 0.05  # seconds; what takes longer is not called by two threads over and over

Scores = list[float | None]
T = TypeVar("T")
_ROWS_SHOWN = 3
_MOST_ITEMS = 16
Form = Literal["text", "messages"]

COMPLETIONS = (
    r"The answer is \boxed{18}.",
    "<think>20 - 2 = 18</think>\n<answer>\\boxed{18}</answer>",
    "nothing at all is to be seen here",
    "She sells 16 - 3 - 4 = 9 eggs a day, and so she has 9 * 2 = $18. #### 18",
    "```python\ndef add(a, b):\n    return a + b\n```",
    '```json\n{"answer": 18, "unit": "eggs"}\n```',
    "1 3 18",
    "<think>x</think><answer>3</answer>",
)
"""Completions of several kinds, so that most rewards give different scores."""

PROMPTS = ("Janet has 20 eggs and breaks 2. How many are left?", "Add two numbers.", "Sort: 3 18 1")

COLUMNS: Mapping[str, Sequence[Any]] = {
    "answer": ["#### 18", "#### 18", "#### 9", "#### 3"],
    "solution": ["18", "18", "9", "3"],
    "numbers": [[3, 18, 1], [18, 3, 1], [2, 1]],
    "tests": [["assert add(1, 2) == 3"], ["assert add(1, 2) == 4"]],
    "task": ["math"],
}
"""Columns that many data sets have: a list of values, repeated as often as there are completions."""

HOSTILE = (
    "\x00\x01\x1b[31m\x7f",
    "\ud800 a lone surrogate",
    "\u202eright to left\u2066\u200b\ufeff",
    "١٨ ５ ² ½ Ⅷ 十八",
    "e\u0301\u0301\u0301" * 20,
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "9" * 5000,
    "1e999 -1e999 nan inf 1/0 0x1F 1_000",
    "(" * 2000 + "[" * 2000 + "{" * 2000,
    "<think>" * 500,
    "</answer></think><answer><think>",
    r"\boxed{" * 300,
    r"\boxed{\frac{1}{0}}",
    '```json\n{"a": NaN, "a": [[[[{}]]]]}\n```',
    "```python\nraise SystemExit(1)\n```",
    "%s %d {0} {x} ${y} \\1 \\",
    "a" * 20_000,
    "\n" * 3000,
    " ",
    "\r\n\t\v\f\x85\u2028",
    "'; DROP TABLE rewards; --",
    "None",
)
"""What a policy writes sooner or later."""

_TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}
EMPTY: Mapping[str, Sequence[Any]] = {
    "the empty string": [""],
    "a message with empty text": [[{"role": "assistant", "content": ""}]],
    "a message that only calls a tool": [[{"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}]],
}


@dataclass(frozen=True)
class Item:
    """One completion with its row of the data set."""

    prompt: Any
    completion: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward. `form` is the form in which string completions are passed."""

    items: tuple[Item, ...]
    form: Form = "text"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments, fresh lists throughout, as TRL passes them."""
        # What a reward can sensibly read of transformers' `TrainerState`, early in a run.
        state = SimpleNamespace(global_step=3, max_steps=100, epoch=0.1, num_train_epochs=1, log_history=[])
        state.is_world_process_zero = state.is_local_process_zero = True
        return {
            "prompts": [self._in_form(item.prompt, "user") for item in self.items],
            "completions": [self._in_form(item.completion, "assistant") for item in self.items],
            "completion_ids": [_ids(item.completion) for item in self.items],
            **{name: [copy.deepcopy(item.columns.get(name)) for item in self.items] for name in self.columns},
            "trainer_state": state,
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: None,
        }

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for item in self.items for name in item.columns))

    def __str__(self) -> str:
        first = self.items[:_ROWS_SHOWN]
        more = max(len(self.items) - _ROWS_SHOWN, 0)
        rest = f", and {more} more" if more else ""
        completions = ", ".join(shown(item.completion) for item in first) + rest
        parts = [f"completions=[{completions}]" + (" as messages" if self.form == "messages" else "")]
        for name in self.columns:
            parts.append(f"{name}=[{', '.join(shown(item.columns.get(name)) for item in first)}{rest}]")
        return ", ".join(parts)

    def with_items(self, items: Iterable[Item]) -> RewardCall:
        return replace(self, items=tuple(items))

    def with_value(self, row: int, column: str, value: Any) -> RewardCall:
        items = list(self.items)
        items[row] = replace(items[row], columns={**items[row].columns, column: value})
        return self.with_items(items)

    def _in_form(self, text: Any, role: str) -> Any:
        if isinstance(text, str) and self.form == "messages":
            return [{"role": role, "content": text}]
        return copy.deepcopy(text)


def ordinary_call(
    reward: Any, completions: Sequence[Any] | None, prompts: Sequence[Any] | None, columns: Mapping[str, Sequence[Any]]
) -> RewardCall:
    """The given completions, or `COMPLETIONS` and texts that say what stands in the reward's column of references."""
    asked = prompts or PROMPTS
    every = {**COLUMNS, **columns}
    items = [
        Item(asked[row % len(asked)], text, {name: values[row % len(values)] for name, values in every.items()})
        for row, text in enumerate(completions or COMPLETIONS)
    ]
    if completions is None:
        first = items[0]
        column = RewardDeclaration.of(reward).reference_column
        if column is not None and column in columns:
            value = str(first.columns[column])
            said = (value, rf"\boxed{{{value}}}", f"<answer>{value}</answer>", f"#### {value}")
            items += [replace(first, completion=text) for text in said]
    return RewardCall(tuple(items[:_MOST_ITEMS]))


def _ids(completion: Any) -> list[int]:
    text = completion if isinstance(completion, str) else "".join(str(message.get("content")) for message in completion)
    return [1 + ord(character) % 500 for character in text[::4]]


class RewardChecks(Checks):
    """The checks of one reward. Each public method checks the rule of its name."""

    def __init__(self, reward: Any, ordinary: RewardCall, options: Mapping[str, Any]) -> None:
        self.plugin = reward
        self.ordinary = ordinary
        self.declared = RewardDeclaration.of(reward)
        self.unreadable = options.get("unreadable", ())
        self.seconds = 0.0  # the least that a completion took
        self.slow = False
        self._forms: tuple[Form, ...] = ("text", "messages")
        self._given_columns = frozenset(options.get("columns") or ())
        self._tried = False
        self._first: Any = None  # what the first call returned
        self._changed_first: list[str] = []
        self._refused = ""  # what it says to strings
        self._of_texts_alone = ""  # what it says to messages
        self._untried = ""  # why nothing can be tried: it reads columns that nobody gave
        self._given: set[float | None] = set()

    def check(self, rule: Rule) -> Finding:
        """Check one rule, after a first call, whose scores are kept for comparison."""
        if not self._tried:
            self._tried = True
            try:
                self._call_first()
            except Broken as took_too_long:
                return took_too_long.with_traceback(None)
        return NotChecked(self._untried) if self._untried else super().check(rule)

    def _call_first(self) -> None:
        """Call it with strings or, if it refuses these, with messages."""
        read: list[str] = []
        for form in self._forms:
            ordinary = replace(self.ordinary, form=form)
            before = process_state()
            began = time.perf_counter()
            first, refused, missing = self._attempt(ordinary)
            if refused:
                self._refused = self._refused or refused
                read = read or missing
                continue
            self._first = first
            self.seconds = (time.perf_counter() - began) / len(ordinary.items)
            self.slow = self.seconds > _SLOW
            self._changed_first = _differences(before, process_state())
            self.ordinary = ordinary.with_items(ordinary.items[:_FEW]) if self.slow else ordinary
            if form == "text":
                _, self._of_texts_alone, _ = self._attempt(replace(self.ordinary, form="messages"))
            if self._refused or self._of_texts_alone:
                self._forms = (form,)
            return
        if read:
            example = f"""--columns '{{"{read[0]}": ["value of row 1", "value of row 2"]}}'"""
            why = f"it reads {', '.join(map(repr, read))}, of which no values were given"
            self._untried = f"{why}: {example} ({self._refused})"

    def _attempt(self, batch: RewardCall) -> tuple[Any, str, list[str]]:
        """What it returns; or what it raised, in words, and the columns whose lack may be the reason."""
        self.example = str(batch)
        try:
            return self._raw(batch), "", []
        except (Broken, KeyboardInterrupt):
            raise
        except BaseException as error:  # the reward's own, whatever it is; the rule `run` reports it
            return None, describe_exception(error), self._columns_read(error)

    def _columns_read(self, error: BaseException) -> list[str]:
        """The columns that it reads and nobody gave; they may be why it failed, and then nothing can be said."""
        parameters = (parameters_of(self.plugin) or {}).values()
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return []
        named = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        named += [str(error.args[0])] if isinstance(error, KeyError) and error.args else []
        passed = {*PASSED_BY_TRL, *self._given_columns}
        return [name for name in dict.fromkeys(named) if name not in passed]

    def _raw(self, batch: RewardCall) -> Any:
        """What the reward returns; a generator is read once."""
        returned = call(self.plugin, batch.arguments())
        return returned if hasattr(returned, "__len__") or not hasattr(returned, "__iter__") else list(returned)

    def _scores(self, batch: RewardCall) -> Scores:
        return self._read(self._raw(batch), batch)

    def _read(self, returned: Any, batch: RewardCall) -> Scores:
        scores: Scores = []
        for row, value in enumerate(check_scores(returned, len(batch.items), reward_name(self.plugin))):
            if value is not None and math.isnan(value):
                raise Broken(f"the value at row {row} is NaN; return None where the reward does not apply", batch)
            scores.append(value)
        self._given.update(scores)
        return scores

    def _agree(self, ours: Scores, theirs: Scores, what: str, batch: RewardCall) -> None:
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _same(one, other):
                raise Broken(f"{what}: {_said(one)} and {_said(other)} at row {row}", batch)

    @property
    def calls(self) -> list[RewardCall]:
        return [self.ordinary]

    def _comparable_only(self) -> None:
        only_if(self.deterministic, "it declares deterministic=False")

    def no_effect(self) -> str:
        if self._untried:
            return "none of its rules could be tried"
        if len(self._given) != 1:
            return ""
        (score,) = self._given
        return f"it gave every text of the kit {_said(score)}; give it completions and columns whose scores differ"

    def run(self) -> None:
        self._over([self.ordinary.with_items(self.ordinary.items[:1]), self.ordinary], self._scores)

    @over("calls", compares=True)
    def determinism(self, batch: RewardCall) -> None:
        """To the bit: as in the first call, and again and again."""
        rounds = _ROUNDS if self.seconds < _SLOW / _ROUNDS else 2
        runs = [self._scores(batch) for _ in range(rounds)]
        if self._first is not None and len(self._first) == len(batch.items):
            runs.append(self._read(self._first, batch))
        for row, scores in enumerate(zip(*runs, strict=True)):
            if len({*scores}) > 1:
                here = batch.with_items([batch.items[row]])
                raise Broken(f"again and again: {' and '.join(map(repr, {*scores}))} at row {row}", here)

    @over("calls", compares=True)
    def neighbours(self, batch: RewardCall) -> None:
        only_if(self.declared.per_completion, "it declares per_completion=False")
        alone = [self._scores(batch.with_items([item]))[0] for item in batch.items]
        self._agree(self._scores(batch), alone, "beside the others and alone", batch)

    def inputs(self) -> None:
        def judge(batch: RewardCall) -> None:
            arguments = batch.arguments()
            call(self.plugin, arguments)
            for name, value in batch.arguments().items():
                if isinstance(value, list) and arguments[name] != value:
                    raise Broken(f"it changed {name!r}", batch)

        spaced = replace(self.ordinary.items[0], completion="  18 \n")
        self._over([RewardCall((*self.ordinary.items, spaced), form) for form in self._forms], judge)

    def formats(self) -> None:
        only_if(not self._refused, f"it takes messages alone: with strings {self._refused}")
        only_if(not self._of_texts_alone, f"it takes texts alone, no conversations: {self._of_texts_alone}")
        strings = [item for item in self.ordinary.items if isinstance(item.completion, str)]
        only_if(strings, "the completions that were given are messages")

        def judge(batch: RewardCall) -> None:
            messages = replace(batch, form="messages")
            in_messages = self._scores(messages)
            if self.deterministic:
                self._agree(self._scores(batch), in_messages, "as a string and as a message", messages)

        self._over([self.ordinary.with_items(strings)], judge)

    def hostile_text(self) -> None:
        items = self.ordinary.items
        for where, completions in {"hostile text": HOSTILE, **EMPTY}.items():
            rows = [replace(items[row % len(items)], completion=text) for row, text in enumerate(completions)]
            forms = self._forms[:1] if self.slow else self._forms
            if not isinstance(completions[0], str):
                forms = ("messages",) if "messages" in self._forms else ()
            together = [rows] if self.slow or len(rows) == 1 else [*([row] for row in rows), rows]
            self._over([RewardCall(tuple(some), form) for form in forms for some in together], self._scores, where)

    @over("calls")
    def parts(self, batch: RewardCall) -> None:
        scores = [score for score in self._scores(batch) if isinstance(score, Parts)]
        only_if(scores, "it returns no Parts")
        names = Counter(part.name for score in scores for part in score.parts)
        if len(scores) > 1 and names and max(names.values()) == 1:
            listed = ", ".join(map(shown, list(names)[:3]))
            raise Broken(f"each of its parts has a name of its own ({listed}, ...)", batch)

    def outcomes(self) -> None:
        column = self.declared.reference_column or ""
        only_if(column, "it has no reference_column, so it compares with nothing")
        self._comparable_only()
        only_if(column in self.ordinary.columns, f"there is no column {column!r}; give one in columns")
        scores = self._scores(self.ordinary)
        scored = [(s, item) for s, item in zip(scores, self.ordinary.items, strict=True) if s is not None]
        wrong = min((score for score, _ in scored), default=0.0)
        right = max((score for score, _ in scored), default=0.0)
        only_if(not _same(right, wrong), "no completion scores better than the others; give a right one in completions")
        batch = self.ordinary.with_items([next(item for score, item in scored if score == right)])
        if self.declared.per_completion:
            one_none = self.ordinary.with_value(0, column, None)
            what = f"with {column!r} as it is and with None in row 0"
            self._over([one_none], lambda tried: self._agree(scores[1:], self._scores(tried)[1:], what, tried))
        for reference in (None, *self.unreadable):

            def judge(tried: RewardCall, reference: Any = reference) -> None:
                (score,) = self._scores(tried)
                if score is not None and _same(score, wrong):
                    what = f"a right answer gets {_said(score)}, as a wrong one: give None"
                    raise Broken(f"with the reference {shown(reference)} {what}", tried)

            tried = batch.with_value(0, column, reference)
            self._over([tried], judge, f"{column!r} is {shown(reference)}")

    def threads(self) -> None:
        batch = self.ordinary
        backwards = batch.with_items(batch.items[::-1])
        expected = (self._scores(batch), self._scores(backwards))
        rounds = _ROUNDS if self.seconds * len(batch.items) < _QUICK else 1
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns often, so that what they share is met half done
        try:
            with plugin_code(batch, before="called by two other threads at once "):
                found = run_together(
                    lambda: [self._scores(batch) for _ in range(rounds)],
                    lambda: [self._scores(backwards) for _ in range(rounds)],
                )
        finally:
            sys.setswitchinterval(interval)
        for which, wanted, theirs in zip((batch, backwards), expected, found, strict=True):
            for scores in theirs if self.deterministic else ():
                self._agree(wanted, scores, "called by the main thread and by two others at once", which)

    @over("calls")
    def global_state(self, batch: RewardCall) -> None:
        before = process_state()
        self._raw(batch)
        if names := self._changed_first or _differences(before, process_state()):
            raise Broken(f"a call changed {', '.join(names)}", batch)


def run_together(*works: Callable[[], T]) -> list[T]:
    """Run each in a thread of its own, which nobody waits for if this one is interrupted."""
    futures = [Future[T]() for _ in works]

    def run(future: Future[T], work: Callable[[], T]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised below
            future.set_exception(error)

    for pair in zip(futures, works, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    return [future.result() for future in futures]


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _said(score: float | None) -> str:
    return "None" if score is None else f"{score:.6g}"


def process_state() -> dict[str, Any]:
    """The global state of the process that others rely on, by name."""
    state: dict[str, Any] = {
        "the state of `random`": random.getstate(),
        "the working directory": Path.cwd(),
        "the handler of SIGALRM": signal.getsignal(signal.SIGALRM),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch's random generator"] = torch.random.get_rng_state().tolist()
        state["torch's default dtype"] = torch.get_default_dtype()
        state["torch's number of threads"] = torch.get_num_threads()
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy's random generator"] = repr(numpy.random.get_state())
    return state | {f"the environment variable {name}": value for name, value in os.environ.items()}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    # A library that was imported meanwhile has not changed its generator, and torch names its compiler's cache.
    imports = ("numpy", "torch", "the environment variable TORCHINDUCTOR_")
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [name for name in names if name in before or not name.startswith(imports)]
