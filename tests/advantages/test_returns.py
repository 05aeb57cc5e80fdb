"""Returns over live tokens, and the two hooks that are sums of them: kl_in_reward and group_mean_gae."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages.token_batches import after_rollout, hook, live_places, on_ranks, rollouts
from tests.contexts import make_rollout, padded
from trl_grpo_ext.advantages.returns import discounted_returns, live_tokens_behind
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

LOGPS, REF_LOGPS = [-1.0, -0.5, -2.0], [-1.5, -0.4, -1.0]  # k1: .5, -.1, -1


def three_tokens(**overrides: Any) -> Rollout:
    return make_rollout([3], old_logps_B_T=padded([LOGPS]), ref_logps_B_T=padded([REF_LOGPS]), **overrides)


class TestReturns:
    @given(rollouts(), st.floats(0, 1))
    @settings(max_examples=60, deadline=None)
    def test_equal_a_loop_from_behind(self, rollout: Rollout, gamma: float) -> None:
        values_B_T = rollout.old_logps_B_T
        assert values_B_T is not None
        result = discounted_returns(values_B_T, rollout.mask_B_T > 0, gamma)
        behind = live_tokens_behind(rollout.mask_B_T > 0)
        for row in range(len(result)):
            total, expected = 0.0, [0.0] * result.size(1)
            for count, place in enumerate(reversed(live_places(rollout, row))):
                total = float(values_B_T[row, place]) + gamma * total
                expected[place] = total
                assert int(behind[row, place]) == count
            assert result[row].tolist() == pytest.approx(expected, abs=1e-12)

    def test_what_stands_off_the_live_tokens_is_not_read(self) -> None:
        values = torch.tensor([[math.nan, 1.0, math.inf, 2.0, -math.inf]])
        live = torch.tensor([[False, True, False, True, False]])
        assert discounted_returns(values, live, 0.5).tolist() == [[0, 2, 0, 2, 0]]

    def test_long_completions_neither_overflow_nor_drift(self) -> None:
        live = torch.ones(1, 20_000, dtype=torch.bool)
        returns = discounted_returns(torch.ones(1, 20_000), live, 0.9)
        assert returns[0, 0].item() == pytest.approx(10.0, rel=1e-6)  # 1 / (1 - 0.9)
        assert discounted_returns(torch.ones(1, 20_000), live, 1.0)[0, 0].item() == 20_000

    def test_half_precision_is_summed_in_single(self) -> None:
        returns = discounted_returns(torch.ones(1, 1000, dtype=torch.bfloat16), torch.ones(1, 1000) > 0, 1.0)
        assert returns.dtype == torch.float32
        assert returns[0, 0].item() == 1000


def expected_kl(rollout: Rollout, advantages: list[float], coefficient: float, gamma: float, estimator: str) -> Any:
    table = [[0.0] * rollout.mask_B_T.size(1) for _ in advantages]
    for row, advantage in enumerate(advantages):
        places = live_places(rollout, row)
        kl = []
        for place in places:
            logp, ref = float(rollout.old_logps_B_T[row, place]), float(rollout.ref_logps_B_T[row, place])  # type: ignore[index]
            estimates = {
                "k1": logp - ref,
                "k2": (logp - ref) ** 2 / 2,
                "k3": math.exp(ref - logp) - (ref - logp) - 1,
            }
            kl.append(estimates[estimator])
        for t, place in enumerate(places):
            penalty = sum(gamma ** (s - t) * kl[s] for s in range(t, len(places)))
            table[row][place] = gamma ** (len(places) - 1 - t) * advantage - coefficient * penalty
    return table


class TestKLInReward:
    def test_by_hand(self) -> None:
        # k1 is .5, -.1, -1, and its sums from each token on are -.6, -1.1, -1.
        (row,) = after_rollout(three_tokens(), [1.0], "kl_in_reward", coefficient=0.1)
        assert row == pytest.approx([1.06, 1.11, 1.1])
        # γ = .9, from behind: -1, -.1 - .9 = -1, .5 - .9 = -.4. A = 1 fades to .9 and .81.
        (row,) = after_rollout(three_tokens(), [1.0], "kl_in_reward", coefficient=0.1, gamma=0.9)
        assert row == pytest.approx([0.81 + 0.04, 0.9 + 0.1, 1 + 0.1])

    @pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106530659712633)])
    def test_estimators(self, estimator: str, kl: float) -> None:
        rollout = make_rollout([1], old_logps_B_T=padded([[-1.0]]), ref_logps_B_T=padded([[-1.5]]))
        ((value,),) = after_rollout(rollout, [0.0], "kl_in_reward", coefficient=1.0, estimator=estimator)
        assert -value == pytest.approx(kl, abs=1e-12)

    @given(rollouts(), st.floats(0.01, 2), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from(["k1", "k2", "k3"]))
    @settings(max_examples=60, deadline=None)
    def test_equals_a_loop(self, rollout: Rollout, coefficient: float, gamma: float, estimator: str) -> None:
        advantages = [float(row) - 1.5 for row in range(len(rollout.prompts))]
        parameters = {"coefficient": coefficient, "gamma": gamma, "estimator": estimator}
        result = after_rollout(rollout, advantages, "kl_in_reward", **parameters)
        for row, expected in zip(result, expected_kl(rollout, advantages, coefficient, gamma, estimator), strict=True):
            assert row == pytest.approx(expected, abs=1e-9)

    def test_what_a_tool_wrote_is_skipped_and_takes_no_time(self) -> None:
        tool = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
        rollout = make_rollout(
            [4],
            mask_B_T=tool,
            old_logps_B_T=padded([[-1, math.nan, -9, -2]]),
            ref_logps_B_T=padded([[-2, -1, math.inf, -4]]),
        )
        (row,) = after_rollout(rollout, [1.0], "kl_in_reward", coefficient=0.1, gamma=0.5)
        assert row == pytest.approx([0.5 - 0.1 * (1 + 0.5 * 2), 0, 0, 1 - 0.1 * 2])

    def test_the_penalty_does_not_depend_on_rewards(self) -> None:
        (row,) = after_rollout(three_tokens(rewards=[math.nan]), [0.0], "kl_in_reward", coefficient=0.1)
        assert row == pytest.approx([0.06, 0.11, 0.1])

    def test_half_precision(self) -> None:
        incoming = torch.tensor([1.0], dtype=torch.bfloat16)
        result = flow.apply_rollout_hooks(incoming, [hook("kl_in_reward", coefficient=0.1)], three_tokens())
        assert result.dtype == torch.bfloat16
        assert result[0].tolist() == pytest.approx([1.06, 1.11, 1.1], rel=1e-2)


class TestAdaptiveCoefficient:
    PARAMETERS: dict[str, Any] = {"coefficient": 0.1, "target": 0.5, "horizon": 10}  # noqa: RUF012

    def rollout(self, **overrides: Any) -> Rollout:
        """KL .5 and 1.0 of two completions, mean .75; a third has no live token."""
        logps = padded([[-1.0, -1.0], [-1.0, -2.0], [-1.0, -1.0]])
        ref_logps = padded([[-1.0, -1.5], [-2.0, -2.0], [-9.0, -9.0]])
        return make_rollout([2, 2, 0], groups=[0, 0, 0], old_logps_B_T=logps, ref_logps_B_T=ref_logps, **overrides)

    def after(self, of_hook: Any, rollout: Rollout) -> float:
        flow.apply_rollout_hooks(torch.zeros(len(rollout.prompts), dtype=torch.float64), [of_hook], rollout)
        return float(of_hook.state_dict()["coefficient"])

    @pytest.mark.parametrize(
        ("target", "factor"),
        [
            (0.75, 1.0),
            (0.7, 1 + (0.75 / 0.7 - 1) * 0.3),  # 3 completions of a horizon of 10
            (0.1, 1 + 0.2 * 0.3),
            (50.0, 1 - 0.2 * 0.3),
        ],
    )
    def test_by_hand(self, target: float, factor: float) -> None:
        adaptive = hook("kl_in_reward", **{**self.PARAMETERS, "target": target})
        assert self.after(adaptive, self.rollout()) == pytest.approx(0.1 * factor, rel=1e-12)

    def test_a_batch_is_penalised_by_the_coefficient_before_it(self) -> None:
        adaptive = hook("kl_in_reward", coefficient=0.1, target=0.1, horizon=3)
        incoming = torch.zeros(1, dtype=torch.float64)
        first = flow.apply_rollout_hooks(incoming, [adaptive], three_tokens())
        second = flow.apply_rollout_hooks(incoming, [adaptive], three_tokens())
        assert first[0].tolist() == pytest.approx([0.06, 0.11, 0.1])
        # KL is -.6, far below the target: the coefficient falls by 0.2 · 1/3.
        assert second[0].tolist() == pytest.approx([(1 - 0.2 / 3) * x for x in (0.06, 0.11, 0.1)])

    def test_k1_is_what_is_steered_whatever_the_penalty(self) -> None:
        for estimator in ("k1", "k2", "k3"):
            adaptive = hook("kl_in_reward", coefficient=0.1, target=0.7, horizon=10, estimator=estimator)
            assert self.after(adaptive, self.rollout()) == pytest.approx(0.1 * (1 + (0.75 / 0.7 - 1) * 0.3))

    def test_not_in_evaluation(self) -> None:
        assert self.after(hook("kl_in_reward", **self.PARAMETERS), self.rollout(training=False)) == 0.1

    def test_not_without_a_live_token(self) -> None:
        rollout = make_rollout([0, 0], old_logps_B_T=torch.zeros(2, 1), ref_logps_B_T=torch.zeros(2, 1))
        assert self.after(hook("kl_in_reward", **self.PARAMETERS), rollout) == 0.1

    def test_stays_positive_where_a_batch_is_larger_than_the_horizon(self) -> None:
        adaptive = hook("kl_in_reward", coefficient=0.1, target=50.0, horizon=0.1)
        assert self.after(adaptive, self.rollout()) == pytest.approx(0.08)

    def test_a_checkpoint_takes_it_up_again(self) -> None:
        adaptive = hook("kl_in_reward", **self.PARAMETERS)
        self.after(adaptive, self.rollout())
        state = json.loads(json.dumps(adaptive.state_dict()))
        resumed = hook("kl_in_reward", **self.PARAMETERS)
        resumed.load_state_dict(state)
        assert self.after(resumed, self.rollout()) == self.after(adaptive, self.rollout()) != 0.1

    def test_a_fixed_coefficient_has_no_state_and_takes_none(self) -> None:
        fixed = hook("kl_in_reward", coefficient=0.3)
        assert fixed.state_dict() == {}
        fixed.load_state_dict({"coefficient": 7.0})
        assert fixed.coefficient == 0.3

    @pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1]])
    def test_all_ranks_agree_on_it(self, sizes: list[int]) -> None:
        hooks = [hook("kl_in_reward", **{**self.PARAMETERS, "target": 0.7}) for _ in sizes]
        rows = on_ranks(self.rollout(), sizes, [0.0] * 3, hooks)
        for row, expected in zip(rows, [[-0.05, -0.05], [-0.1, 0], [0, 0]], strict=True):
            assert row == pytest.approx(expected)
        expected_coefficient = 0.1 * (1 + (0.75 / 0.7 - 1) * 0.3)
        assert [of_rank.coefficient for of_rank in hooks] == pytest.approx([expected_coefficient] * len(sizes))


def expected_gae(rollout: Rollout, gamma: float, lam: float) -> list[list[float]]:
    rewards, groups = rollout.rewards_B.tolist(), rollout.group_ids_B.tolist()
    table = [[0.0] * rollout.mask_B_T.size(1) for _ in rewards]
    for row, reward in enumerate(rewards):
        scored = [r for r, g in zip(rewards, groups, strict=True) if g == groups[row] and not math.isnan(r)]
        if math.isnan(reward):
            continue
        value = sum(scored) / len(scored)
        advantage, value_after, earned = 0.0, 0.0, reward
        for place in reversed(live_places(rollout, row)):
            delta = earned + gamma * value_after - value
            advantage = delta + gamma * lam * advantage
            table[row][place] = advantage
            value_after, earned = value, 0.0
    return table


class TestGroupMeanGAE:
    def test_by_hand(self) -> None:
        # Rewards 1 and 0, μ = .5. γ = 1: δ = 0, 0, ±.5; with λ = .5 it halves at every token backwards.
        rows = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gae_lambda=0.5)
        assert rows == [[0.125, 0.25, 0.5], [-0.25, -0.5, 0]]
        # γ = .5, λ = 1: δ = -.25, -.25, .5, so A = .5, -.25 + .5·.5 = 0, -.25 + .5·0.
        (row, _) = after_rollout(make_rollout([3, 2], [1, 0]), [9.0, 9.0], "group_mean_gae", gamma=0.5, gae_lambda=1)
        assert row == [-0.25, 0, 0.5]

    def test_by_default_credit_fades_with_the_distance_to_the_end(self) -> None:
        (row, _) = after_rollout(make_rollout([3, 3], [1, 0]), [0.0, 0.0], "group_mean_gae")
        assert row == pytest.approx([0.5 * 0.95**2, 0.5 * 0.95, 0.5])

    @given(rollouts())
    @settings(max_examples=60, deadline=None)
    def test_without_discount_it_is_the_reward_minus_the_groups_mean(self, rollout: Rollout) -> None:
        count = len(rollout.prompts)
        rows = after_rollout(rollout, [9.0] * count, "group_mean_gae", gamma=1.0, gae_lambda=1.0)
        for row, values in enumerate(rows):
            gap = float(rollout.rewards_B[row] - rollout.group_baselines_B[row])
            for place in live_places(rollout, row):
                assert values[place] == pytest.approx(0.0 if math.isnan(gap) else gap, abs=1e-12)

    @given(rollouts(), st.sampled_from([0.2, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
    @settings(max_examples=60, deadline=None)
    def test_equals_the_recursion(self, rollout: Rollout, gamma: float, lam: float) -> None:
        rows = after_rollout(rollout, [9.0] * len(rollout.prompts), "group_mean_gae", gamma=gamma, gae_lambda=lam)
        for row, expected in zip(rows, expected_gae(rollout, gamma, lam), strict=True):
            assert row == pytest.approx(expected, abs=1e-9)

    def test_unscored_and_alone(self) -> None:
        nan = math.nan
        rollout = make_rollout([2] * 5, [nan, 5, nan, nan, 1], groups=[0, 0, 1, 1, 2])
        rows = after_rollout(rollout, [9.0] * 5, "group_mean_gae", gamma=0.5)
        assert rows[0] == rows[2] == rows[3] == [0, 0]
        # Alone in a group: μ is the own reward, and only the discount is left: γμ - μ.
        assert rows[1] == [-2.5, 0]
        assert rows[4] == [-0.5, 0]

    @given(rollouts(), st.integers(0, 6))
    @settings(max_examples=30, deadline=None)
    def test_on_two_ranks(self, rollout: Rollout, first: int) -> None:
        count = len(rollout.prompts)
        sizes = [min(first, count), count - min(first, count)]
        if 0 in sizes:
            sizes = [count]
        whole = after_rollout(rollout, [9.0] * count, "group_mean_gae", gamma=0.9)
        parts = on_ranks(rollout, sizes, [9.0] * count, [hook("group_mean_gae", gamma=0.9) for _ in sizes])
        assert parts == whole
