"""`turn_rewards`, `gigpo`, `tool_errors` and `masked_turns`: by hand, against slow loops, and what they refuse."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from trl_grpo_ext.advantages.turn_credit import GiGPO, MaskedTurns, ToolErrors, TurnRewards, rewards_of_turns
from trl_grpo_ext.credit.flow import apply_hooks
from trl_grpo_ext.credit.parts import with_parts
from trl_grpo_ext.errors import AlignmentError, ConfigurationError
from trl_grpo_ext.testing.builders import make_rollout, padded, turns_between
from trl_grpo_ext.types import Part, Parts, Place, Rollout

NAN = math.nan


def parts_of_turns(values: list[float]) -> Parts:
    return Parts({f"turn {turn}": (value, Place(turn=turn)) for turn, value in enumerate(values)}, sum(values))


def rollout_of(
    wrote: list[list[int]],
    turns: list[list[float] | None],
    outcomes: list[float],
    groups: list[int] | None = None,
    weights: tuple[float, float] = (1.0, 1.0),
    ids: list[list[int]] | None = None,
    **overrides: Any,
) -> Rollout:
    """Completions with a reward of turns and one of outcomes; `wrote` has 1 where the model wrote a token."""
    width = max(map(len, wrote))
    live_B_T = padded(wrote, width, 0.0, torch.float64)
    there_B_T = padded([[1.0] * len(row) for row in wrote], width, 0.0, torch.float64)
    totals = [NAN if row is None else sum(row) for row in turns]
    rewards_B_K = torch.tensor(list(zip(totals, outcomes, strict=True)), dtype=torch.float64)
    known = (rewards_B_K * torch.tensor(weights)).nansum(1).masked_fill(rewards_B_K.isnan().all(1), NAN)
    settings: dict[str, Any] = {
        "mask_B_T": live_B_T,
        "completion_mask_B_T": there_B_T,
        "tool_mask_B_T": torch.where(there_B_T > 0, live_B_T, 1.0),
        "rewards_B_K": rewards_B_K,
        "rewards_B": known,
        "reward_names": ("by_turn", "outcome"),
        "reward_weights_K": torch.tensor(weights, dtype=torch.float64),
        "parts": {"by_turn": [None if row is None else parts_of_turns(row) for row in turns]},
    }
    if ids is not None:
        settings["completion_ids_B_T"] = padded(ids, width, 0, torch.long)
    return make_rollout([len(row) for row in wrote], None, groups, **{**settings, **overrides})


def advantages(hook: Any, rollout: Rollout) -> list[list[float]]:
    """Of each completion, one value for each of its turns; all tokens of a turn must have the same."""
    given_B_T = torch.full(rollout.mask_B_T.shape, 9.0, dtype=torch.float64)
    new_B_T = apply_hooks(given_B_T, [hook], rollout)
    rows = []
    for new, numbers in zip(new_B_T.tolist(), rollout.turns_B_T.tolist(), strict=True):
        assert all(value == 0.0 for value, number in zip(new, numbers, strict=True) if number < 0)
        values = [{v for v, n in zip(new, numbers, strict=True) if n == turn} for turn in range(max(numbers) + 1)]
        assert all(len(value) == 1 for value in values)
        rows.append([value.pop() for value in values])
    return rows


TWO = [[1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1]]
"""Two completions of two turns and one of one turn."""


def test_returns_by_hand() -> None:
    rollout = rollout_of(TWO, [[1.0, 0.0], [0.0, 2.0], [0.5]], [1.0, 0.0, 0.0], weights=(2.0, 1.0))
    # r: (2, 0 + 1), (0, 4), (1); with gamma 1/2 G: (2.5, 1), (2, 4), (1).
    values = advantages(TurnRewards(gamma=0.5, normalise=False), rollout)
    mean = (2.5 + 2 + 1) / 3
    assert values == [pytest.approx([2.5 - mean, -1.5]), pytest.approx([2 - mean, 1.5]), pytest.approx([1 - mean])]
    first, second = statistics.stdev([2.5, 2, 1]) + 1e-4, statistics.stdev([1, 4]) + 1e-4
    values = advantages(TurnRewards(gamma=0.5), rollout)
    assert values[0] == pytest.approx([(2.5 - mean) / first, -1.5 / second])


def test_mt_grpo_by_hand() -> None:
    """Two turns each: A° + λ·A' and A°, as in 2505.11821."""
    two = [[1, 0, 1]] * 4
    rollout = rollout_of(two, [[0.3, 9.0], [0.0, 9.0], [0.1, 7.0], [0.0, 7.0]], [1.0, 0.0, 0.0, 1.0])
    outcome, turn = [0.5, -0.5, -0.5, 0.5], [0.2, -0.1, 0.0, -0.1]
    deviations = statistics.stdev([1, 0, 0, 1]) + 1e-4, statistics.stdev([0.3, 0, 0.1, 0]) + 1e-4
    values = advantages(TurnRewards(form="turn_plus_outcome", turn_weight=2.0), rollout)
    for row, (one, other) in enumerate(zip(outcome, turn, strict=True)):
        end = one / deviations[0]
        assert values[row] == pytest.approx([end + 2.0 * other / deviations[1], end])
    # A completion of one turn has the outcome's alone.
    short = rollout_of([[1, 0, 1], [1, 1]], [[1.0, 0.0], [1.0]], [0.0, 1.0])
    values = advantages(TurnRewards(form="turn_plus_outcome", normalise=False), short)
    assert values == [[-0.5, -0.5], [0.5]]


def test_gigpo_by_hand() -> None:
    ids = [[1, 2, 7, 3], [1, 7, 7, 3, 4], [1, 1, 1], [5, 7, 2]]
    rollout = rollout_of([*TWO, [1, 0, 1]], [None] * 4, [1.0, 0.0, 0.0, 3.0], ids=ids)
    # With gamma 1/2 the turns have (.5, 1), (0, 0), (0), (1.5, 3) to come, in the states P 7, P 77, P, P 7.
    episode = [0.0, -1.0, -1.0, 2.0]
    values = advantages(GiGPO(gamma=0.5, step_weight=2.0), rollout)
    assert values[0] == pytest.approx([episode[0] + 2 * (0.5 - 0.5), episode[0] + 2 * -1.0])
    assert values[1] == pytest.approx([episode[1] + 2 * (0 - 0.5), episode[1]])  # nobody else saw 77
    assert values[2] == pytest.approx([episode[2] + 2 * (0 - 0.5)])
    assert values[3] == pytest.approx([episode[3] + 2 * (1.5 - 0.5), episode[3] + 2 * 1.0])
    both = advantages(GiGPO(gamma=0.5, normalise=True), rollout)
    deviation = statistics.stdev([1, 0, 0, 3]) + 1e-6
    first = statistics.stdev([0.5, 0, 0, 1.5]) + 1e-6
    assert both[3] == pytest.approx([2 / deviation + 1.0 / first, 2 / deviation + 1.0 / (math.sqrt(2) + 1e-6)])
    # By a column, as it says.
    states = [["a", {"at": 1, "on": 2}], ["b", {"on": 2, "at": 1}], ["c"], ["d", 5]]
    values = advantages(GiGPO(gamma=0.5, states="s"), replace(rollout, columns={"s": states}))
    assert values == [pytest.approx([0.0, 0.5]), pytest.approx([-1.0, -1.5]), [-1.0], [2.0, 2.0]]
    # Turns of one completion that saw the same are compared, too: states in which it was twice.
    again = rollout_of([[1, 0, 1, 0, 1]], [[0.0, 1.0, 0.0]], [0.0], ids=[[1, 7, 1, 7, 1]])
    assert advantages(GiGPO(gamma=1.0), again) == [[0.0, 0.5, -0.5]]


def test_without_turn_rewards_every_turn_has_the_outcomes_advantage() -> None:
    """What TRL gives, to 1e-12 in float64: (r - mean) / (std + 1e-4)."""
    outcomes = [1.0, 0.0, 0.25, 0.5]
    rollout = rollout_of([[1, 0, 1], [1, 1, 0, 1], [1], [1, 0, 1, 0, 1]], [None] * 4, outcomes)
    expected = (torch.tensor(outcomes).double() - 0.4375) / (torch.tensor(outcomes).double().std() + 1e-4)
    same = rollout_of([[1, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1]], [None] * 4, outcomes)  # two turns each
    for hook, batch in ((TurnRewards(form="turn_plus_outcome"), rollout), (TurnRewards(), same)):
        for row, values in enumerate(advantages(hook, batch)):
            assert values == pytest.approx([expected[row].item()] * len(values), abs=1e-12)


def test_what_shapers_gave_to_tokens_belongs_to_their_turns() -> None:
    rollout = rollout_of([[1, 0, 1], [1, 0, 1]], [None, None], [1.0, 0.0])
    added_B_T = torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.0, -0.25]], dtype=torch.float64)
    shaped = replace(
        rollout,
        rewards_B_K=torch.cat([rollout.rewards_B_K, added_B_T.sum(1, keepdim=True)], dim=1),
        reward_names=(*rollout.reward_names, "shaper"),
        reward_weights_K=torch.ones(3, dtype=torch.float64),
        rewards_B=rollout.rewards_B + added_B_T.sum(1),
        token_rewards_B_T=added_B_T,
    )
    # Rewards of the turns: (.5, .25 + 1) and (0, -.25); to go: (1.75, 1.25) and (-.25, -.25).
    assert advantages(TurnRewards(normalise=False), shaped) == [[1.0, 0.75], [-1.0, -0.75]]


def test_parts_in_turns_count_for_their_turns() -> None:
    """A part in a turn, with its weight; a part without a turn, and the value, do not."""
    rollout = rollout_of([[1, 0, 1], [1, 0, 1]], [None, None], [0.0, 0.0])
    first = Parts([Part("a", 1.0, 0.5, Place(0, 1, 0)), Part("b", 3.0, places=Place(turn=1)), Part("c", 9.0)], 7.0)
    second = Parts([Part("a", 1.0, 2.0, Place(turn=0)), Part("d", 9.0, places=(0, 1)), Part("b", None)], 7.0)
    parted = with_parts(rollout, {"by_turn": [first, second]})
    assert rewards_of_turns(parted).turns_B_M.tolist() == [[0.5, 3.0], [2.0, 0.0]]
    assert rewards_of_turns(parted).outcome_B.tolist() == [0.0, 0.0]
    late = with_parts(rollout, {"by_turn": [first, Parts({"a": (1.0, Place(turn=2))})]})
    with pytest.raises(AlignmentError, match=r"'by_turn' has a part in turn 2 .* row 1"):
        rewards_of_turns(late)


def test_completions_without_turns_and_without_rewards() -> None:
    rollout = rollout_of([[0, 0], [1, 0, 1], [1]], [None, None, [1.0]], [1.0, NAN, 0.0])
    for hook in (TurnRewards(), GiGPO(), TurnRewards(form="turn_plus_outcome")):
        new_B_T = apply_hooks(torch.ones(3, 3).double(), [hook], rollout)
        assert bool(torch.isfinite(new_B_T).all())
        assert not bool(new_B_T[:2].any())  # nothing to credit, and nothing said


def failing(row: int) -> Any:
    return turns_between((1, 1, 0, 1, 0, 1), "abrcrd", failed=[0] if row == 0 else [1])


def credited(hook: Any) -> list[list[float]]:
    live = [[1, 1, 0, 1, 0, 1]] * 2
    rollout = replace(rollout_of(live, [None] * 2, [1.0, 0.0]), turns=failing)
    return apply_hooks(torch.tensor([1.0, -1.0]).double(), [hook], rollout).tolist()


def test_tool_errors_by_hand() -> None:
    assert credited(ToolErrors(penalty=0.25)) == [[0.75, 0.75, 0, 1, 0, 1], [-1, -1, 0, -1.25, 0, -1]]

    rollout = rollout_of([[1, 0, 1]], [None], [1.0])
    silent = [replace(turn, calls=()) for turn in turns_between((1, 0, 1), "aba")]
    with pytest.raises(AlignmentError, match="row 0"):
        ToolErrors().on_rollout(rollout.mask_B_T, replace(rollout, turns=lambda row: silent))


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, ([1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0])),
        ({"pick": "answers"}, ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1])),
        ({"pick": "first"}, ([1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0])),
        ({"pick": "last"}, ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1])),
        ({"pick": "failed"}, ([1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0])),
        ({"pick": "sound"}, ([0, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 1])),
    ],
)
def test_masked_turns_by_hand(parameters: dict[str, Any], kept: tuple[list[int], list[int]]) -> None:
    signs = (1, -1)
    assert credited(MaskedTurns(**parameters)) == [[s * k for k in row] for s, row in zip(signs, kept, strict=True)]


def test_a_column_of_states_must_fit() -> None:
    rollout = rollout_of([[1, 0, 1], [1]], [None] * 2, [1.0, 0.0])
    hook = GiGPO(states="s")
    with pytest.raises(ConfigurationError, match="got 's'"):
        hook.on_rollout(rollout.mask_B_T, rollout)
    for states in (["a"], "ab", None):
        columns = {"s": [states, ["a"]]}
        with pytest.raises(ConfigurationError, match="2 states at row 0"):
            hook.on_rollout(rollout.mask_B_T, replace(rollout, columns=columns))
