"""`environment_steps` and `record_steps`."""

import asyncio
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest

from trl_grpo_ext import load_rewards
from trl_grpo_ext.errors import PluginOutputError, RewardError
from trl_grpo_ext.rewards.environment import EnvironmentSteps, record_steps

ERROR = "{'error': 'no such move'}"


def said(*turns: Any) -> list[dict[str, Any]]:
    """Turns: the names of the tools that are called, and the answers that came."""
    messages: list[dict[str, Any]] = []
    for names, answers in turns:
        calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "name": name, "content": text} for name, text in zip(names, answers)]  # noqa: B905
    return messages


def paid(step_rewards: Any, completion: Any, **parameters: Any) -> tuple[float, dict[int, float | None]]:
    environment = SimpleNamespace(step_rewards=step_rewards)
    [score] = EnvironmentSteps(**parameters)(completions=[completion], environments=[environment])
    assert score is not None
    return float(score), {part.places[0].turn: part.score for part in score.parts}


TWO = said((["a", "b"], ["1", "2"]), ([], []), (["a"], ["3"]))


def test_environment_steps_by_hand() -> None:
    assert paid([1.0, 2.0, 4.0], TWO) == (7.0, {0: 3.0, 2: 4.0})
    assert paid([1.0, 2.0, 4.0], TWO, score="last")[0] == 4.0
    assert paid([1.0, 2.0, 4.0], TWO, score="mean")[0] == pytest.approx(7 / 3)
    assert paid([5.0, 6.0], TWO) == (11.0, {0: 5.0, 2: 6.0})  # one for each turn with calls
    assert paid([1.0, None, math.nan], TWO) == (1.0, {0: 1.0})
    assert paid([], [{"role": "assistant", "content": "no call"}]) == (0.0, {})


def test_steps_of_calls_that_ran() -> None:
    failed = said((["a"], [ERROR]), (["a"], ["1"]), (["a"], []))
    assert paid([1.0, 2.0], failed) == (3.0, {1: 1.0, 2: 2.0})  # the last one's answer did not fit
    assert paid([1.0], failed) == (1.0, {1: 1.0})
    assert paid([0.5, 1.0, 2.0], failed) == (3.5, {0: 0.5, 1: 1.0, 2: 2.0})
    # Recorded steps are found by name.
    mixed = said((["search", "move"], ["x", "1"]), (["search"], ["y"]), (["move"], []))
    assert paid([("move", 1.0), ("move", 2.0)], mixed) == (3.0, {0: 1.0, 2: 2.0})
    with pytest.raises(PluginOutputError):
        paid([("move", 1.0)] * 3, mixed)


def test_what_cannot_be_scored() -> None:
    environments = [SimpleNamespace(step_rewards=[None]), None]
    assert EnvironmentSteps()(completions=[said((["a"], ["1"]))] * 2, environments=environments) == [None, None]
    for steps in ([1.0], [1.0] * 4):  # no turn can have taken them
        with pytest.raises(PluginOutputError):
            paid(steps, TWO)
    [reward] = load_rewards(["environment_steps"])
    with pytest.raises(RewardError, match="environment_factory"):
        reward(prompts=["?"], completions=[TWO], completion_ids=[[1]])
    for environment in (SimpleNamespace(), SimpleNamespace(step_rewards=["much"])):
        with pytest.raises(RewardError):
            EnvironmentSteps()(completions=[TWO], environments=[environment])


class Game:
    """Pays 1 for an even move."""

    def reset(self, **columns: Any) -> str:
        self.reward, self.total = 0.0, 0.0
        return "play"

    def move(self, by: int) -> str:
        """Move."""
        self.reward = float(by % 2 == 0)
        self.total += self.reward
        if by > 9:
            raise ValueError("too far")
        return str(by)

    async def think(self) -> str:
        """Think."""
        self.reward = 0.25
        return "hm"

    def _helper(self) -> None:
        """No tool."""


def test_record_steps() -> None:
    make = record_steps(Game)
    one, other = make(), make()
    assert type(one) is type(other)
    assert inspect.iscoroutinefunction(one.think)
    assert inspect.signature(one.move) == inspect.signature(Game().move)
    one.reset(target=3)
    one.move(2)
    one.move(by=3)
    for wrong in ((10,), ("far", "away")):  # the second never reaches the game
        with pytest.raises((ValueError, TypeError)):
            one.move(*wrong)
    asyncio.run(one.think())
    assert one.step_rewards == [("move", 1.0), ("move", 0.0), ("move", 1.0), ("move", None), ("think", 0.25)]
    assert other.step_rewards == []
    summed = record_steps(lambda: Game(), "total", cumulative=True)()
    summed.reset()
    for by in (2, 4, 5):
        summed.move(by)
    assert [value for _, value in summed.step_rewards] == [1.0, 1.0, 0.0]


def test_a_trajectory_rubric_of_openenv() -> None:
    rubrics = pytest.importorskip("openenv.core.rubrics", reason="needs openenv-core")

    class Won(rubrics.ExponentialDiscountingTrajectoryRubric):  # type: ignore[name-defined,misc]
        def score_trajectory(self, trajectory: Any) -> float:
            return float(trajectory[-1][1].won)

    def played(*observations: Any) -> Any:
        rubric = Won(gamma=0.5)
        for observation in observations:
            rubric("move", observation)
        return SimpleNamespace(rubric=rubric)

    going, won = SimpleNamespace(done=False, won=False), SimpleNamespace(done=True, won=True)
    [score] = EnvironmentSteps(score="last")(completions=[TWO], environments=[played(going, going, won)])
    assert score == 1.0
    assert {part.places[0].turn: part.score for part in score.parts} == {0: 0.75, 2: 1.0}
