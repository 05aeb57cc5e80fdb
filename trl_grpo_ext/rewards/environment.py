"""What an environment pays for each step, by turn: `environment_steps`, and `record_steps` for TRL's factories."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ..credit.turns import Exchange, is_tool_error, tool_calls
from ..errors import PluginOutputError, RewardError
from ..guard.parameters import Checked, choice
from ..types import Parts, Place, RewardDeclaration
from .tool_use import exchanges_of

Step = tuple[str | None, float | None]  # the tool that was called, if it is known, and what the environment paid


class EnvironmentSteps(Checked):
    """Score each turn by what the environment paid for the steps that the turn took.

        r_k = Σ rewards of the steps of turn k

    The rewards are those of each completion's own environment: `step_rewards`, a list, which `record_steps` keeps for
    any environment, else `compute_step_rewards()`, its own or of its `rubric`, as OpenEnv's trajectory rubrics have it.

    A step is the call of a tool. Recorded steps are found by the tools' names. Where only numbers are known, there must
    be as many as the completion has calls (all of them, those that ran, or those that returned), or turns with calls. A
    turn without steps has no part. A step that paid None, or NaN, adds nothing.

    Args:
        score: The completion's value: the "sum" of its steps' rewards, their "mean", or the "last" one.
    """

    __name__ = "environment_steps"
    declares = RewardDeclaration(conformance={"columns": {"environments": [SimpleNamespace(step_rewards=[]), None]}})
    score: str = choice("sum", "mean", "last")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Parts | None]:
        """`B` scores; None where the environment paid nothing, not even 0; a `RewardError` where it has no steps."""
        environments = columns.get("environments")
        if environments is None:
            raise RewardError("environment_steps needs an environment: give the trainer an environment_factory.")
        pairs = zip(completions, environments, strict=True)
        return [None if paying is None else self._scored(row, said, paying) for row, (said, paying) in enumerate(pairs)]

    def _scored(self, row: int, completion: Any, environment: Any) -> Parts | None:
        steps = steps_of(environment)
        exchanged = exchanges_of(completion)
        turns = _turns_of(steps, exchanged)
        if turns is None:
            calls = [len(tool_calls(message)) for message, _ in exchanged]
            said = f"row {row} has {len(steps)} rewards of steps, and calls tools {calls} times in its turns"
            raise PluginOutputError(f"environment_steps: {said}. Use record_steps.")
        paid = [(turn, value) for turn, (_, value) in zip(turns, steps, strict=True) if value is not None]
        if not paid:
            return None if steps else Parts({}, 0.0)
        sums: dict[int, float] = {}
        for turn, value in paid:
            sums[turn] = sums.get(turn, 0.0) + value
        total = math.fsum(sums.values())
        score = {"sum": total, "mean": total / len(paid), "last": paid[-1][1]}[self.score]
        return Parts({f"turn {turn}": (value, Place(turn=turn)) for turn, value in sums.items()}, score)


def steps_of(environment: Any) -> list[Step]:
    """What an environment paid for each step, in order; a `RewardError` if it does not say so, in numbers."""
    found = getattr(environment, "step_rewards", None)
    for owner in (environment, getattr(environment, "rubric", None)):
        if found is None and callable(compute := getattr(owner, "compute_step_rewards", None)):
            found = compute()
    kind = type(environment).__qualname__
    if not isinstance(found, list | tuple):
        raise RewardError(f"environment_steps: {kind} has no rewards by step; wrap its factory in record_steps.")
    pairs = [step if isinstance(step, tuple) and len(step) == 2 else (None, step) for step in found]
    try:
        return [(name, None if value is None or value != value else float(value)) for name, value in pairs]
    except (TypeError, ValueError) as error:
        raise RewardError(f"environment_steps: a reward of {kind} is no number: {found!r:.200}.") from error


def _turns_of(steps: Sequence[Step], turns: Sequence[Exchange]) -> list[int] | None:
    calls = [(turn, str(call.get("name"))) for turn, (message, _) in enumerate(turns) for call in tool_calls(message)]
    if all(name is not None for name, _ in steps):
        left = iter(calls)
        found = [next((turn for turn, called in left if called == name), None) for name, _ in steps]
        return None if None in found else [turn for turn in found if turn is not None]
    ended: list[tuple[int, bool | None]] = []  # each call's turn, and whether it failed; None where no answer came
    for turn, (message, answers) in enumerate(turns):
        called = len(tool_calls(message))
        results = [*(is_tool_error(answer.get("content")) for answer in answers), *[None] * called]
        ended += [(turn, error) for error in results[:called]]
    everything = [turn for turn, _ in ended]
    ran = [turn for turn, error in ended if not error]
    returned = [turn for turn, error in ended if error is False]
    candidates = (everything, ran, returned, sorted(set(everything)))
    return next((of_steps for of_steps in candidates if len(of_steps) == len(steps)), None)


def record_steps(factory: Callable[[], Any], reward: str = "reward", *, cumulative: bool = False) -> Callable[[], Any]:
    """A factory of the same environments, which keep what each call of a tool paid, for `environment_steps`.

    Args:
        factory: An environment's class, or a function that makes one, as TRL's `environment_factory` takes it.
        reward: The attribute in which the environment has a step's reward after the step.
        cumulative: Whether the attribute has the sum since `reset`.
    """

    @functools.cache  # TRL knows environments by their class
    def recording(kind: Any) -> Any:
        @functools.wraps(kind.reset)
        def reset(self: Any, *arguments: Any, **keywords: Any) -> Any:
            self.step_rewards = []
            return kind.reset(self, *arguments, **keywords)

        methods = {
            name: _recorded(method, reward, cumulative)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")
        }
        return type(kind.__name__, (kind,), {**methods, "reset": reset, "__module__": kind.__module__})

    def make() -> Any:
        environment = factory()
        kind: Any = type(environment)
        environment.__class__ = recording(kind)
        environment.step_rewards = []
        return environment

    return make


def _recorded(method: Callable[..., Any], reward: str, cumulative: bool) -> Callable[..., Any]:
    @contextmanager
    def noting(self: Any) -> Iterator[None]:
        before = getattr(self, reward, None)
        returned = False
        try:
            yield
            returned = True
        finally:
            value = getattr(self, reward, None)
            if not returned and value == before:  # it raised before it paid: the number is that of an earlier step
                value = before = None
            if cumulative and value is not None:
                value = value - (before or 0.0)
            self.step_rewards.append((method.__name__, value))

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with noting(self):
            return method(self, *arguments, **keywords)

    @functools.wraps(method)
    async def wait(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with noting(self):
            return await method(self, *arguments, **keywords)

    return wait if inspect.iscoroutinefunction(method) else call
