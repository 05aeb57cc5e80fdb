"""span_credit: by hand, with functions that point now and then."""

import math
from typing import Any

import torch

from tests.advantages.token_batches import hook
from tests.contexts import Ranks, cut, make_rollout
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

NAN = math.nan


def rollout_of(
    lengths: list[int],
    rewards: list[list[float]],
    spans: dict[str, Any] | None = None,
    weights: list[float] | None = None,
    **overrides: Any,
) -> Rollout:
    """Reward functions r0, r1, ..., and tokens of one character."""
    functions = len(rewards[0])
    settings = {
        "rewards_B_K": torch.tensor(rewards, dtype=torch.float64),
        "reward_names": tuple(f"r{k}" for k in range(functions)),
        "reward_weights_K": torch.tensor(weights or [1.0] * functions, dtype=torch.float64),
        "reward_spans": spans or {},
    }
    return make_rollout(lengths, **{**settings, **overrides})


def credit(rollout: Rollout, dtype: torch.dtype = torch.float64, **parameters: Any) -> torch.Tensor:
    incoming = torch.full((len(rollout.texts),), 9.0, dtype=dtype)  # replaced, whatever it was
    return flow.apply_hooks(incoming, [hook("span_credit", **parameters)], rollout)


def test_span_credit_by_hand() -> None:
    # r0: 1, 0, weight 2: centred .5, -.5, paid 1, -1. r1: 4, 0: centred 2, -2.
    # r0 points at the character 1 of the first, and at 0 and 1 of the second completion; r1 points nowhere.
    spans = {"r0": [[(1, 2, 0.7)], [(0, 2, 0.3), (1, 2, 0.1)]]}
    rollout = rollout_of([3, 3], [[1, 4], [0, 0]], spans, weights=[2, 1])
    assert credit(rollout).tolist() == [[2, 3, 2], [-3, -3, -2]]


def test_normalised_by_hand() -> None:
    # r0: 1, 0: standard deviation √.5, r1: 4, 0: √8.
    rollout = rollout_of([1, 1], [[1, 4], [0, 0]], weights=[2, 1])
    expected = 2 * 0.5 / (math.sqrt(0.5) + 1e-4) + 2 / (math.sqrt(8) + 1e-4)
    torch.testing.assert_close(
        credit(rollout, normalise=True).squeeze(1), torch.tensor([expected, -expected], dtype=torch.float64)
    )


def test_pointing_at_nothing() -> None:
    # Centred 1, -1, 0. The first points, the second doesn't, the third was not even given spans.
    rollout = rollout_of([2, 2, 2], [[2], [0], [1]], {"r0": [[(0, 1, 1.0)], [], ()]})
    assert credit(rollout).tolist() == [[1, 0], [-1, -1], [0, 0]]
    assert credit(rollout, without_spans="none").tolist() == [[1, 0], [0, 0], [0, 0]]
    # A span without characters, or whose characters no token wrote, is nothing, too.
    silent = rollout_of(
        [2, 2], [[2], [0]], {"r0": [[(1, 1, 1.0)], [(0, 1, 1.0)]]}, offsets=lambda row: [(0, 0), (1, 2)]
    )
    assert credit(silent).tolist() == [[1, 1], [-1, -1]]
    assert credit(silent, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that found nothing in any completion of the batch is still one that points.
    nowhere = rollout_of([2, 2], [[2], [0]], {"r0": [(), ()]})
    assert credit(nowhere, without_spans="none").tolist() == [[0, 0], [0, 0]]
    # A function that returns plain numbers pays everything.
    assert credit(rollout_of([2, 2], [[2], [0]]), without_spans="none").tolist() == [[1, 1], [-1, -1]]


def test_whether_a_function_points_is_agreed_on_by_all_ranks() -> None:
    # The second rank's only completion came without spans, so its rewards are plain numbers there.
    spans = {"r0": [[(0, 1, 1.0)], []]}
    whole = rollout_of([2, 2], [[2], [0]], spans)
    first, second = cut(whole, [1, 1])
    second.reward_spans.clear()  # type: ignore[attr-defined]
    results = Ranks([first, second]).run(lambda r: credit(r, without_spans="none"))
    assert torch.cat(results).tolist() == credit(whole, without_spans="none").tolist() == [[1, 0], [0, 0]]
