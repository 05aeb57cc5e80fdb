"""The estimators: by hand, against slow loops, on several ranks, what relates one to another, and what they refuse."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer

from tests.contexts import Ranks, cut, make_rollout
from tests.support import length_reward, relative_gap, train
from trl_grpo_ext import advantages as estimators
from trl_grpo_ext import available, load_advantage_hooks
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError, PluginOutputError
from trl_grpo_ext.types import Rollout

NAN = math.nan


def on_tokens(selection: Any, rollout: Rollout, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Advantages `(B, T)` after the hook; what comes in is 9 everywhere, and must be replaced."""
    incoming = torch.full((len(rollout.prompts),), 9.0, dtype=dtype)
    return flow.apply_hooks(incoming, loaded(json.dumps(selection)), rollout)


@cache
def loaded(selection: str) -> list[Any]:
    """Hooks keep nothing, so that they may be loaded once for thousands of examples."""
    return load_advantage_hooks([json.loads(selection)])


def advantages(selection: Any, rewards: Sequence[float], groups: Sequence[int] | None = None) -> list[float]:
    """Advantages of completions of one token each."""
    rollout = make_rollout([1] * len(rewards), rewards, groups, num_generations=8)
    result: list[float] = on_tokens(selection, rollout).squeeze(1).tolist()
    return result


ROOT2 = 2**0.5
FEW = [1.0] * 2 + [0.0] * 6
PAIRS = [0.0, 1.0, 2.0, 6.0], [0, 0, 1, 1]
BY_HAND: list[tuple[Any, list[float], list[int] | None, list[float]]] = [
    # μ = 1; deviations 0, -1, -1, 2; their squares sum to 6, so σ = √(6/3) = √2.
    ("raw_reward", [1, 0, 0, 3], None, [1, 0, 0, 3]),
    ("centred", [1, 0, 0, 3], None, [0, -1, -1, 2]),
    ("max_only", [1, 0, 0, 3], None, [0, 0, 0, 3]),
    ("leave_one_out", [1, 0, 0, 3], None, [1 - 3 / 3, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]),
    ("normalised", [1, 0, 0, 3], None, [a / (ROOT2 + 1e-4) for a in (0, -1, -1, 2)]),
    ("mean_relative", [1, 0, 0, 3], None, [0, -1, -1, 2]),
    ("mean_relative", [1, -0.0], None, [1, -1]),
    # Two of eight: μ = 1/4; squares 2 · 9/16 + 6 · 1/16 = 3/2, so σ = √(3/14): .75/σ and -.25/σ.
    ({"name": "normalised", "epsilon": 1e-12}, FEW, None, [0.75 / (3 / 14) ** 0.5] * 2 + [-0.25 / (3 / 14) ** 0.5] * 6),
    ("mean_relative", FEW, None, [3] * 2 + [-1] * 6),
    # r - μ = ∓.5 and ∓2, squares sum to 8.5; over the batch μ = 2.25, and squares sum to 20.75.
    ("batch_whitening", *PAIRS, [d / (8.5 / 3) ** 0.5 for d in (-0.5, 0.5, -2, 2)]),
    (
        {"name": "batch_whitening", "baseline": "batch"},
        *PAIRS,
        [d / (20.75 / 3) ** 0.5 for d in (-2.25, -1.25, -0.25, 3.75)],
    ),
]


@pytest.mark.parametrize(("selection", "rewards", "groups", "expected"), BY_HAND)
def test_by_hand(selection: Any, rewards: list[float], groups: list[int] | None, expected: list[float]) -> None:
    """The hook, and the function of arrays, with one more completion that nobody scored."""
    assert advantages(selection, rewards, groups) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    parameters = dict(selection) if isinstance(selection, dict) else {"name": selection}
    estimate = getattr(estimators, parameters.pop("name"))
    rewards_N = torch.tensor([*rewards, NAN], dtype=torch.float64)
    groups_N = torch.tensor([*(groups or [0] * len(rewards)), 0])
    given = (rewards_N,) if estimate is estimators.raw_reward else (rewards_N, groups_N)
    assert estimate(*given, **parameters).tolist() == pytest.approx([*expected, 0.0], rel=1e-9, abs=1e-12)


def test_optimal_baseline_by_hand() -> None:
    # Σ L r / Σ L = 2 · 1 / 8 = 1/4.
    assert on_tokens("optimal_baseline", make_rollout([2, 6], [1.0, 0.0]))[:, 0].tolist() == [0.75, -0.25]
    # A completion without tokens has no weight, nor has one without a reward: (1 · 4 + 3 · 2) / (1 + 3) = 2.5.
    rollout = make_rollout([1, 0, 3, 2], [4.0, 100.0, 2.0, NAN])
    assert on_tokens("optimal_baseline", rollout)[:, 0].tolist() == [1.5, 0, -0.5, 0]
    # Lengths are counts of the tokens that count: 1 and 3 here, though both completions have 3.
    masked = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    rollout = replace(make_rollout([3, 3], [1.0, 0.0]), mask_B_T=masked)
    assert on_tokens("optimal_baseline", rollout).tolist() == [[0, 0, 0.75], [-0.25, -0.25, -0.25]]


def test_every_function_of_arrays_is_a_hook() -> None:
    assert {info.name for info in available("advantage_hook")} >= {*estimators.__all__}


def refused_on_all_ranks(selection: Any, rollout: Rollout, sizes: list[int], says: str) -> None:
    def refuses(part: Rollout) -> bool:
        with pytest.raises(PluginOutputError, match=says):
            on_tokens(selection, part)
        return True

    assert all(Ranks(cut(rollout, sizes)).run(refuses))


def test_rewards_that_an_estimator_cannot_take_stop_every_rank() -> None:
    refused_on_all_ranks("mean_relative", make_rollout([1] * 4, [1.0, 0.0, -0.25, NAN]), [2, 1, 1], r"-0\.25")
    for name in ("raw_reward", "normalised", "optimal_baseline"):
        with pytest.raises(PluginOutputError, match=f"'{name}'.* finite"):
            on_tokens(name, make_rollout([1] * 3, [1.0, math.inf, 0.0]))


def pass_at_k(k: int, rollout: Rollout) -> torch.Tensor:
    return on_tokens({"name": "pass_at_k", "k": k}, rollout)


def success_and_failure(n: int, c: int, k: int) -> tuple[float, float]:
    """Advantages of the first and of the last of n completions of which the first c succeed."""
    values = pass_at_k(k, make_rollout([1] * n, [1.0] * c + [0.0] * (n - c))).squeeze(1).tolist()
    return values[0], values[-1]


def published(n: int, c: int, k: int) -> tuple[float, float]:
    mean = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    sigma = math.sqrt(mean * (1 - mean))
    in_failing_sets = Fraction(math.comb(n - c - 1, k - 1), math.comb(n - 1, k - 1))
    return float(1 - mean) / sigma, float(1 - mean - in_failing_sets) / sigma


def test_pass_at_k_by_hand() -> None:
    # n 4, c 1, k 2: 3 of 6 sets hold no success, R̄ = σ = 1/2. A success: (1/2)/(1/2). A failure is in 3 sets, 2 of
    # them without a success: (1/2 - 2/3)/(1/2).
    assert success_and_failure(4, 1, 2) == pytest.approx((1, -1 / 3))
    # n 8, c 2, k 4: 15 of 70 sets hold none; σ = √(15 · 55)/70. C(5, 3)/C(7, 3) = 10/35.
    assert success_and_failure(8, 2, 4) == pytest.approx((15 / 825**0.5, (15 - 70 * 10 / 35) / 825**0.5))
    # All sets are worth the same.
    for n, c, k in [(8, 0, 2), (8, 8, 2), (8, 7, 2), (8, 5, 4), (4, 1, 4), (1, 1, 1), (1, 0, 1)]:
        assert success_and_failure(n, c, k) == (0, 0)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_pass_at_k_is_the_published_formula(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 1024))
    k = data.draw(st.integers(1, n - 1))
    c = data.draw(st.integers(1, n - k))  # some set holds no success
    expected = published(n, c, k)
    if expected[0] > 1e-140:  # below, the formula's own σ² leaves the range of floats
        assert success_and_failure(n, c, k) == pytest.approx(expected, rel=1e-6, abs=1e-140)


def test_pass_at_k_goes_by_the_rewards_before_any_shaper() -> None:
    shaped = [0.4, 0.9, 0.9, 0.9]  # a penalty, and what would be three successes
    rollout = make_rollout([1] * 4, shaped, raw_rewards_B=torch.tensor([1.0, 0.0, 0.0, NAN], dtype=torch.float64))
    assert pass_at_k(2, rollout).squeeze(1).tolist() == pytest.approx([0.5**0.5, -(0.125**0.5), -(0.125**0.5), 0])


def test_a_k_that_no_group_can_have_stops_every_rank_in_training() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.0, NAN], [0, 0, 0, 1, 1, 1]
    refused_on_all_ranks({"name": "pass_at_k", "k": 4}, make_rollout([1] * 6, rewards, groups), [3, 2, 1], "k=4.*=3")
    smaller = make_rollout([1] * 6, rewards, groups, training=False)  # as groups in evaluation may be
    assert pass_at_k(4, smaller).tolist() == [[0.0]] * 6


def two_rewards(first: list[float], second: list[float], groups: list[int], **parameters: Any) -> list[float]:
    """`decoupled_normalisation` of two reward functions, the second of weight 0.5."""
    rewards_B_K = torch.tensor([first, second], dtype=torch.float64).T
    weights_K = torch.tensor([1.0, 0.5], dtype=torch.float64)
    total = (rewards_B_K * weights_K).nansum(1).masked_fill(rewards_B_K.isnan().all(1), math.nan)
    both = {"rewards_B_K": rewards_B_K, "reward_names": ("a", "b"), "reward_weights_K": weights_K}
    rollout = make_rollout([1] * len(first), total.tolist(), groups, **both)
    result: list[float] = on_tokens({"name": "gdpo", **parameters}, rollout).squeeze(1).tolist()
    return result


def test_decoupled_normalisation_by_hand() -> None:
    # Of two, one is 1/√2 above and one below; where both got 1, both are 0. The sums are ±0.5/√2, and σ is √(0.5/3).
    advantages = two_rewards([1, 0, 1, 1], [0, 2, 1, 3], [0, 0, 1, 1], epsilon=1e-9)
    assert advantages == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5])
    # One function has no opinion on the third completion, none has one on the fourth; a group of equal rewards is 0.
    advantages = two_rewards([1, 0, NAN, NAN, 0.3, 0.3], [1, 3, 5, NAN, 0.1, 0.1], [0, 0, 0, 0, 1, 1], epsilon=1e-9)
    sums = [0.5**0.5 - 0.5, -(0.5**0.5), 0.5]  # 1, 3, 5 are -1, 0 and 1 standard deviation from their mean
    spread = (sum(x * x for x in sums) / 4) ** 0.5  # of five, two of which are 0, about a mean of 0
    assert advantages == pytest.approx([*(x / spread for x in sums), 0, 0, 0])
    assert advantages[3:] == [0, 0, 0]


def test_running_baseline_by_hand() -> None:
    (rae,) = load_advantage_hooks([{"name": "rae", "decay": 0.5, "column": "player"}])
    players, given = ["white", "black", "white", "black"], torch.zeros(4, 1, dtype=torch.float64)

    def batch(*rewards: float, training: bool = True) -> list[float]:
        rollout = make_rollout([1] * 4, rewards, columns={"player": players}, training=training)
        advantages_B_T: torch.Tensor = rae.on_rollout(given, rollout)
        return advantages_B_T.squeeze(1).tolist()

    assert batch(1, -1, 0, 0, training=False) == [1, -1, 0, 0]  # which moves nothing
    assert batch(1, -1, 0, 0) == [1, -1, 0, 0]
    # Two rewards of mean 0.5 each way: three quarters of the way to them.
    assert batch(1, -1, 1, math.nan) == [0.625, -0.625, 0.625, 0]
    # white: 0.25·0.375 + 0.75·1; black, with one reward: 0.5·(-0.375) + 0.5·(-1)
    state = json.loads(json.dumps(rae.state_dict()))
    assert sorted(state.values()) == [-0.6875, 0.84375]
    (rae,) = load_advantage_hooks([{"name": "running_baseline", "decay": 0.5, "column": "player"}])
    rae.load_state_dict(state)
    assert batch(0, 0, 0, 0) == [-0.84375, 0.6875, -0.84375, 0.6875]
    with pytest.raises(ConfigurationError, match="'player'"):
        rae.on_rollout(given, make_rollout([1] * 4))


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Has nothing to say about some completions."""
    return [None if len(ids) % 3 == 1 else sum(ids) / 7 for ids in completion_ids]


@pytest.mark.parametrize("reward", [length_reward, sometimes])
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_normalised_trains_as_trl_does(tiny_model: Path, tmp_path: Path, reward: Any, scale_rewards: str) -> None:
    """It has TRL's own advantages, and so its gradients, whatever `scale_rewards` says."""
    theirs = train(tiny_model, tmp_path / "trl", GRPOTrainer, reward_funcs=reward, scale_rewards="group")
    hooks = {"advantage_hooks": ["normalised"]}
    chosen: dict[str, Any] = {"reward_funcs": reward, "scale_rewards": scale_rewards, "trainer_arguments": hooks}
    ours = train(tiny_model, tmp_path / "ext", **chosen)
    logged = list(theirs.trainer._logs["advantages"])
    assert len({round(a, 3) for a in logged}) > 3  # there is something to compare
    assert (0.0 in logged) == (reward is sometimes)
    assert list(ours.trainer._logs["advantages"]) == pytest.approx(logged, rel=1e-5, abs=1e-6)
    for our_step, their_step in zip(ours.gradients, theirs.gradients, strict=True):
        assert relative_gap(our_step, their_step) < 1e-5
