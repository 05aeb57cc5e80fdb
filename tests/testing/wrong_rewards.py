"""Rewards with one planted defect each, published ones among them, and some that keep all rules."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ENOUGH = threading.Event()
"""Set it to let the threads that were left behind end."""


def text_of(completion: Any) -> str:
    """A careful reading of either form."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


class Right:
    """1.0 where the reference's number stands in the completion; None where the reference has none."""

    reference_column = "answer"

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        return [self.score(text_of(c), answer) for c, answer in zip(completions, columns["answer"], strict=True)]

    def score(self, text: str, answer: Any) -> float | None:
        number = re.search(r"\d+", str(answer))
        return None if number is None else float(number.group() in text)


class Simple:
    """1.0 where there is an 18; compares with nothing."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [float("18" in text_of(c)) for c in completions]


async def right_async(completions: list[Any], **columns: Any) -> list[float]:
    return [float("18" in text_of(c)) for c in completions]


class NamesItsColumns:
    def __call__(self, completions: list[Any], answer: list[str]) -> list[float]:
        return [0.0] * len(completions)


class OnlyTheFirst(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return super().__call__(completions)[:1]


class InWords(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [str(score) for score in super().__call__(completions)]


class TooLargeForFloat32(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [score * 1e39 for score in super().__call__(completions)]


class LowersTheReference:
    def __call__(self, completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
        return [float(a.lower() in text_of(c)) for c, a in zip(completions, answer, strict=True)]


class ReadsAnyNumber:
    """int() refuses more than 4,300 digits."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        numbers = [re.findall(r"[0-9]+", text_of(c)) for c in completions]
        return [float(bool(found) and int(found[-1]) == 18) for found in numbers]


class LastMessage:
    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [float("18" in (c if isinstance(c, str) else c[-1]["content"])) for c in completions]


class ReadsTheBrackets:
    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [float(str(c).startswith("<think>")) for c in completions]


class ALittleNoise(Simple):
    """Too little for the rules that compare scores up to the last digits."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [score + 1e-9 * int.from_bytes(os.urandom(2)) / 2**16 for score in super().__call__(completions)]


class Declared(Simple):
    """Random, and says so."""

    deterministic = False

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [score + int.from_bytes(os.urandom(2)) / 2**16 for score in super().__call__(completions)]


class PaysTheFirstMore(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [score - 0.1 * place for place, score in enumerate(super().__call__(completions))]


class LessTheMean(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        scores = super().__call__(completions)
        return [score - sum(scores) / len(scores) for score in scores]


class Marks(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        columns["answer"][0] = "seen"
        return super().__call__(completions)


class Lambda(Simple):
    def __init__(self) -> None:
        self.key = lambda text: text


class KeepsItsTexts(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        self.texts = [text_of(c) for c in completions]
        time.sleep(0.001)
        return [float("18" in text) for text in self.texts]


class SetsAnAlarm(Simple):
    """signal works on the main thread alone."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))
        return super().__call__(completions)


class LeavesAThread(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        threading.Thread(target=ENOUGH.wait, daemon=True).start()
        return super().__call__(completions)


class Seeds(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        random.seed(0)
        return super().__call__(completions)


class OnlyTheFirstCallSets(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        os.environ["SET_BY_A_REWARD"] = "1"
        return super().__call__(completions)


class NoReferenceIsWrong(Right):
    def score(self, text: str, answer: Any) -> float | None:
        return super().score(text, answer) or 0.0


class Slow(Simple):
    conformance = {"seconds_per_completion": 0.0005}  # noqa: RUF012

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        time.sleep(0.001 * len(completions))
        return super().__call__(completions)


SEEN: set[str] = set()


class RemembersForAll(Simple):
    """Novelty, for all that this module makes."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        texts = [text_of(c) for c in completions]
        fresh = [text not in SEEN for text in texts]
        SEEN.update(texts)
        return [score + 0.1 * new for score, new in zip(super().__call__(completions), fresh, strict=True)]


class RemembersOnItself(Simple):
    """Novelty, but each object for itself."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        texts = [text_of(c) for c in completions]
        fresh = [text not in self.seen for text in texts]
        self.seen.update(texts)
        return [score + 0.1 * new for score, new in zip(super().__call__(completions), fresh, strict=True)]


class WarmsUp(Simple):
    """Another reward after some calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        self.calls += 1
        return [score * (1.0 if self.calls < 8 else 2.0) for score in super().__call__(completions)]


class Exits(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        raise SystemExit(0)


class ExitsOnNothing(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        if not all(text_of(c) for c in completions):
            raise SystemExit("no text")
        return super().__call__(completions)


class ExitsHard(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        os._exit(0)


class Crashes(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


class Sleeps(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        time.sleep(1000)


class LooksForEver(Simple):
    """huggingface/Math-Verify#65: one expression, and parsing never returns."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        while any("((((" in text_of(c) for c in completions):
            pass
        return super().__call__(completions)


class SleepsInAThread(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1000)
        return super().__call__(completions)


class FirstRowOnly(Right):
    """Every completion against the first prompt's answer."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        return [self.score(text_of(c), columns["answer"][0]) for c in completions]


class SharedAnswers(Right):
    """Right where any row's answer stands in the text."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        any_row = [max(self.score(text_of(c), a) or 0.0 for a in columns["answer"]) for c in completions]
        return [None if a is None else score for a, score in zip(columns["answer"], any_row, strict=True)]


class DividesByDigits(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [1 / len(re.findall(r"\d", text_of(c))) for c in completions]


class MeansNothing(Simple):
    """NaN where there is no word."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        lengths = [[len(word) for word in text_of(c).split(" ")] for c in completions]
        return [sum(one) / len(one) if sum(one) else float("nan") for one in lengths]


class OtherColumn:
    """huggingface/open-r1#385: the data set's column is `solution`."""

    def __call__(self, completions: list[Any], solutions: list[str], **columns: Any) -> list[float]:
        return [float(s in text_of(c)) for c, s in zip(completions, solutions, strict=True)]


class Positional:
    def __call__(self, texts: list[Any], **columns: Any) -> list[float]:
        return [0.0 for _ in texts]


class OneForAll(Simple):
    """huggingface/trl#6533: a single value, which torch spreads over all completions."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [1.0]


class ForgetsToReturn(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        super().__call__(completions)


class MessagesOnly(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [float("18" in c[0]["content"]) for c in completions]


class AbsentKey:
    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [float(t in text_of(c)) for c, t in zip(completions, columns["target"], strict=True)]


class Encodes(Simple):
    """A lone surrogate has no UTF-8."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [len(text_of(c).encode()) / 1000 for c in completions]


class OneNoneSpoilsAll(Right):
    """Where one row has no answer, no row gets a score."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        if None in columns["answer"]:
            return [None] * len(completions)
        return super().__call__(completions, **columns)


class Pops(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        scores = super().__call__(completions)
        for completion in completions:
            if isinstance(completion, list) and completion:
                completion.pop()
        return scores


class Strips(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        for completion in completions:
            for message in completion if isinstance(completion, list) else ():
                message["content"] = (message.get("content") or "").strip()
        return super().__call__(completions)


class KeepsALock(Simple):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class LeavesAProcess(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        subprocess.Popen(["sleep", "5"])
        return super().__call__(completions)


class OneRankReduces(Simple):
    """A collective where there is something to share."""

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        import torch
        from torch import distributed

        scores = super().__call__(completions)
        if distributed.is_initialized() and scores[0]:
            distributed.all_reduce(torch.tensor(scores))
        return scores


# ---------------------------------------------------------------------------------------------- odd, but legal


def lazily(completions: list[Any], **columns: Any) -> Any:
    """A generator."""
    return (float("18" in text_of(c)) for c in completions)


def in_an_array(completions: list[Any], **columns: Any) -> Any:
    import numpy

    return numpy.array(["18" in text_of(c) for c in completions], dtype=numpy.float64)


def everything_by_name(
    prompts: list[Any], completions: list[Any], completion_ids: list[Any], trainer_state: Any = None, **kwargs: Any
) -> list[float]:
    """What TRL passes beside the columns; the score falls with the tokens."""
    return [1.0 / (1 + len(ids)) for ids in completion_ids]


def only_keywords(**everything: Any) -> list[float]:
    return [float("18" in text_of(c)) for c in everything["completions"]]


def logs(completions: list[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any) -> list[float]:
    """Talks, warns and logs."""
    print("scoring", len(completions))
    warnings.warn("careful", stacklevel=1)
    if log_metric is not None:
        log_metric("seen", float(len(completions)))
        log_extra("seen", [True] * len(completions))
    return [float("18" in text_of(c)) for c in completions]


@functools.cache
def _length(text: str) -> int:
    return len(text)


def memoised(completions: list[Any], **columns: Any) -> list[float]:
    """It remembers, and it makes no difference."""
    return [-1e30 * _length(text_of(c)) for c in completions]


def seldom_says(completions: list[Any], **columns: Any) -> list[float | None]:
    return [1.0 if "boxed" in text_of(c) else None for c in completions]


def in_a_process(completions: list[Any], **columns: Any) -> list[float]:
    """Starts one and waits for it."""
    subprocess.run([sys.executable, "-S", "-c", ""], check=True, cwd="/")
    return [float("18" in text_of(c)) for c in completions]


def waits_for_threads(completions: list[Any], **columns: Any) -> list[float]:
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda c: float("18" in text_of(c)), completions)]


def compares_on_purpose(completions: list[Any], **columns: Any) -> list[float]:
    lengths = [len(text_of(c)) for c in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]


compares_on_purpose.per_completion = False  # type: ignore[attr-defined]


class Slotted:
    """No `__dict__`, no `__name__`; and its examples say what it pays for.

    >>> Slotted("rhubarb")(completions=["some rhubarb", "none"])
    [1.0, 0.0]
    """

    __slots__ = ("word",)

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [float(self.word in text_of(c)) for c in completions]


partly = functools.partial(only_keywords, unused=True)

SOUND: list[Any] = [
    *(Right(), Simple(), right_async, Declared(), lazily, in_an_array, everything_by_name, only_keywords, logs),
    *(memoised, seldom_says, in_a_process, waits_for_threads, compares_on_purpose, Slotted("rhubarb"), partly),
]


BREAKS: list[tuple[str, type]] = [
    ("reward.call", NamesItsColumns),
    ("reward.length", OnlyTheFirst),
    ("reward.types", InWords),
    ("reward.types", TooLargeForFloat32),
    ("reward.none", LowersTheReference),
    ("reward.hostile_text", ReadsAnyNumber),
    ("reward.empty", LastMessage),
    ("reward.formats", ReadsTheBrackets),
    ("reward.determinism", ALittleNoise),
    ("reward.order", PaysTheFirstMore),
    ("reward.neighbours", LessTheMean),
    ("reward.inputs", Marks),
    ("reward.pickle", Lambda),
    ("reward.threads", KeepsItsTexts),
    ("reward.threads", SetsAnAlarm),
    ("reward.leftovers", LeavesAThread),
    ("reward.global_state", Seeds),
    ("reward.global_state", OnlyTheFirstCallSets),
    ("reward.outcomes", NoReferenceIsWrong),
    ("reward.time", Slow),
    ("reward.determinism", RemembersForAll),
    ("reward.determinism", RemembersOnItself),
    ("reward.determinism", WarmsUp),
    ("reward.run", Exits),
    ("reward.empty", ExitsOnNothing),
    ("reward.rows", FirstRowOnly),
    ("reward.neighbours", SharedAnswers),
    ("reward.run", DividesByDigits),
    ("reward.empty", MeansNothing),
    ("reward.call", OtherColumn),
    ("reward.call", Positional),
    ("reward.length", OneForAll),
    ("reward.length", ForgetsToReturn),
    ("reward.run", AbsentKey),
    ("reward.hostile_text", Encodes),
    ("reward.none", OneNoneSpoilsAll),
    ("reward.inputs", Pops),
    ("reward.inputs", Strips),
    ("reward.pickle", KeepsALock),
    ("reward.leftovers", LeavesAProcess),
    ("reward.collectives", OneRankReduces),
]
"""The rule that is reported first, and the plugin."""

HANGS: list[tuple[str, type]] = [
    ("reward.run", ExitsHard),
    ("reward.run", Crashes),
    ("reward.run", Sleeps),
    ("reward.hostile_text", LooksForEver),
    ("reward.threads", SleepsInAThread),
]
"""Those that take a process of their own."""
