"""Rewards of which each breaks one rule, and one that keeps them all."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
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


class NaNs(Simple):
    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return [score or float("nan") for score in super().__call__(completions)]


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


BREAKS: list[tuple[str, type]] = [
    ("reward.call", NamesItsColumns),
    ("reward.length", OnlyTheFirst),
    ("reward.types", InWords),
    ("reward.types", NaNs),
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
]
