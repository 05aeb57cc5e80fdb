"""One call of a guarded reward: in a worker process, in a thread, of a model; and what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import PluginOutputError, RewardError
from ..types import SpanScore
from .outcomes import Judgement, Outcome, shown
from .validation import checked_scores
from .workers import Done


@dataclasses.dataclass
class Result:
    """What became of one call: its scores, or why there are none."""

    scores: list[float | None] | None = None
    outcome: Outcome = Outcome.SCORED
    detail: str = ""
    cause: BaseException | None = None
    broken: PluginOutputError | None = None

    def judgement(self, position: int) -> Judgement:
        """The outcome of the call's completion at this position."""
        if self.scores is None:
            return Judgement(self.outcome, self.detail)
        score = self.scores[position]
        if score is None or math.isnan(score):
            return Judgement(Outcome.NONE)
        return Judgement(Outcome.SCORED, score=score)


def checked(returned: Any, count: int, reward: str) -> Result:
    """Hold what a reward returned against its contract."""
    try:
        return Result(checked_scores(returned, count, reward))
    except PluginOutputError as error:
        return Result(broken=error)


def late(timeout: float | None) -> Result:
    """The call took too long."""
    return Result(outcome=Outcome.TIMEOUT, detail=f"no result within {timeout:g} s")


def raised(error: Exception) -> Result:
    """The call raised."""
    try:
        message = str(error)
    except Exception:  # an exception's own text may raise
        message = "(its message cannot be read)"
    return Result(outcome=Outcome.ERROR, detail=f"{type(error).__name__}: {shown(message)}", cause=error)


class Task:
    """What a worker runs: the reward on one call's columns. The scores travel as JSON."""

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        self._reward, self._name = reward, name

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Score one call's completions."""
        returned = self._reward(**columns)
        try:
            scores = checked_scores(returned, len(columns["completions"]), self._name)
        except PluginOutputError as error:
            return {"broken": str(error)}
        return {"scores": [[score, score.spans] if isinstance(score, SpanScore) else score for score in scores]}


def from_worker(done: Done, count: int, reward: str) -> Result:
    """Read what became of a call in a worker process."""
    if done.status == "done":
        try:
            if "broken" in done.value:
                return Result(broken=PluginOutputError(str(done.value["broken"])))
            scores = [SpanScore(*score) if isinstance(score, list) else score for score in done.value["scores"]]
        except (TypeError, KeyError, ValueError, OverflowError) as error:  # not written by `Task`
            return Result(broken=PluginOutputError(f"The worker of {reward!r} sent no scores: {error}"))
        return checked(scores, count, reward)
    if done.status == "error":
        kind, _, message = done.detail.partition(": ")
        cause = RewardError(f"In the worker process:\n{done.traceback}")
        return Result(outcome=Outcome.ERROR, detail=f"{kind}: {shown(message)}", cause=cause)
    return Result(outcome=Outcome.TIMEOUT if done.status == "timeout" else Outcome.DIED, detail=done.detail)


class StillRunningError(Exception):
    """The call has not returned in time."""


class ThisProcess:
    """Calls in this process: directly, or where they have a deadline in a thread, which may be left behind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left_behind: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ThisProcess, (self._name,)

    def check_is_free(self) -> None:
        """Raise where a call that was left behind still runs.

        Raises:
            RewardError: It does.
        """
        if self._left_behind is not None and self._left_behind.is_alive():
            raise RewardError(
                f"{self._name}: an earlier call overran its timeout and still runs in its thread, which cannot be "
                "killed. Give it more time, or run it in worker processes (no `workers=0`), which a model cannot."
            )

    def run(self, function: Callable[..., Any], columns: Mapping[str, Any], timeout: float | None) -> Any:
        """Call the function.

        Raises:
            StillRunningError: It takes longer than `timeout` seconds.
        """
        if timeout is None:
            return function(**columns)
        ended: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                ended.append((function(**columns), None))
            except BaseException as error:  # raised again where the call was made
                ended.append((None, error))

        thread = threading.Thread(target=work, name=f"guarded-{self._name}", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            self._left_behind = thread
            raise StillRunningError
        returned, error = ended[0]
        if error is not None:
            raise error
        return returned


class Model:
    """A reward model as a reward function: `model(**inputs).logits[:, 0]`, as TRL scores it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Score prompt and completion together."""
        import torch

        pairs = list(zip(prompts, completions, strict=True))
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in pairs]
        else:
            texts = [self._tokenizer.apply_chat_template([*p, *c], tokenize=False) for p, c in pairs]
        inputs = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self._model.parameters()).device
        # Which GPU is the current one is a thread's own setting.
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), current:
            logits = self._model(**{name: value.to(device) for name, value in inputs.items()}).logits
            scores: list[float] = logits[:, 0].float().tolist()
        return scores


def is_model(reward: Any) -> bool:
    """Whether this is a `torch.nn.Module`; without importing torch, for without torch there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(reward, torch.nn.Module)
