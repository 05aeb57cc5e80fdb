"""kl_in_reward and teacher_log_ratio: by hand, against loops, the adaptive coefficient, and what they ask for."""

import copy
import json
import math
import pickle
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import Ranks, cut, make_rollout, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.chain import HookChain
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import Rollout, role_of

LOGPS, REF_LOGPS = [-1.0, -0.5, -2.0], [-1.5, -0.4, -1.0]  # k1: .5, -.1, -1


def three_tokens(**overrides: Any) -> Rollout:
    return make_rollout([3], old_logps_B_T=padded([LOGPS]), ref_logps_B_T=padded([REF_LOGPS]), **overrides)


class TestKLInReward:
    def test_by_hand(self) -> None:
        # k1 is .5, -.1, -1, and its sums from each token on are -.6, -1.1, -1.
        (row,) = after_rollout(three_tokens(), [1.0], "kl_in_reward", coefficient=0.1)
        assert row == pytest.approx([1.06, 1.11, 1.1])
        # γ = .9, from the end: -1, -.1 - .9 = -1, .5 - .9 = -.4. A = 1 fades to .9 and .81.
        (row,) = after_rollout(three_tokens(), [1.0], "kl_in_reward", coefficient=0.1, gamma=0.9)
        assert row == pytest.approx([0.81 + 0.04, 0.9 + 0.1, 1 + 0.1])

    @pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106530659712633)])
    def test_estimators(self, estimator: str, kl: float) -> None:
        rollout = make_rollout([1], old_logps_B_T=padded([[-1.0]]), ref_logps_B_T=padded([[-1.5]]))
        ((value,),) = after_rollout(rollout, [0.0], "kl_in_reward", coefficient=1.0, estimator=estimator)
        assert -value == pytest.approx(kl, abs=1e-12)

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

    def test_as_a_shaper_it_acts_before_the_group_is_compared(self) -> None:
        # Rewards 1 and 1, penalties of .1·1 and .1·3: what counts is .1 apart from the mean .8.
        logps, refs = padded([[-1.0, -1.0]] * 2), padded([[-1.5, -1.5], [-2.5, -2.5]])
        rollout = make_rollout([2, 2], [1.0, 1.0], old_logps_B_T=logps, ref_logps_B_T=refs)
        chain = HookChain([hook("centred"), hook("kl_in_reward", form="completion", coefficient=0.1)])
        shaped = chain.on_rewards(rollout)
        assert shaped.rewards_B.tolist() == pytest.approx([0.9, 0.7])
        assert shaped.raw_rewards_B.tolist() == [1, 1]
        result, _ = chain.on_rollout(torch.zeros(2, dtype=torch.float64), shaped)
        assert result[:, 0].tolist() == pytest.approx([0.1, -0.1])

    @pytest.mark.parametrize(
        ("form", "role", "has", "lacks"),
        [
            ("completion", "shaper", "on_rewards", "on_rollout"),
            ("return_to_go", "transform", "on_rollout", "on_rewards"),
        ],
    )
    def test_it_has_the_method_of_its_role_and_no_other(self, form: str, role: str, has: str, lacks: str) -> None:
        one = pickle.loads(pickle.dumps(copy.deepcopy(hook("kl_in_reward", form=form))))
        assert role_of(one) == role
        assert hasattr(one, has)
        assert not hasattr(one, lacks)


class TestAdaptiveCoefficient:
    PARAMETERS: dict[str, Any] = {"coefficient": 0.1, "target": 0.5, "horizon": 10}  # noqa: RUF012

    def rollout(self, **overrides: Any) -> Rollout:
        """KL .5 and 1.0 of two completions, mean .75; a third has no live token."""
        logps = padded([[-1.0, -1.0], [-1.0, -2.0], [-1.0, -1.0]])
        ref_logps = padded([[-1.0, -1.5], [-2.0, -2.0], [-9.0, -9.0]])
        return make_rollout([2, 2, 0], groups=[0, 0, 0], old_logps_B_T=logps, ref_logps_B_T=ref_logps, **overrides)

    def after(self, of_hook: Any, rollout: Rollout) -> float:
        flow.apply_hooks(torch.zeros(len(rollout.prompts), dtype=torch.float64), [of_hook], rollout)
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
        first = flow.apply_hooks(incoming, [adaptive], three_tokens())
        second = flow.apply_hooks(incoming, [adaptive], three_tokens())
        assert first[0].tolist() == pytest.approx([0.06, 0.11, 0.1])
        # KL is -.6, far below the target: the coefficient falls by 0.2 · 1/3.
        assert second[0].tolist() == pytest.approx([(1 - 0.2 / 3) * x for x in (0.06, 0.11, 0.1)])

    def test_a_checkpoint_takes_it_up_again(self) -> None:
        adaptive, resumed = (hook("kl_in_reward", **self.PARAMETERS) for _ in range(2))
        self.after(adaptive, self.rollout())
        resumed.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
        assert self.after(resumed, self.rollout()) == self.after(adaptive, self.rollout()) != 0.1

    @pytest.mark.parametrize("sizes", [[1, 2], [1, 1, 1]])
    def test_all_ranks_agree_on_it(self, sizes: list[int]) -> None:
        parameters = {**self.PARAMETERS, "target": 0.7}
        found = Ranks(cut(self.rollout(), sizes)).run(lambda part: self.after(hook("kl_in_reward", **parameters), part))
        assert found == pytest.approx([0.1 * (1 + (0.75 / 0.7 - 1) * 0.3)] * len(sizes))


def test_teacher_log_ratio_by_hand() -> None:
    others = {"org/teacher": padded([REF_LOGPS]), "org/another": padded([LOGPS])}
    rollout = three_tokens(teacher_logps_B_T=others)
    (row,) = after_rollout(rollout, [9.0], "teacher_log_ratio")
    assert row == pytest.approx([-0.5, 0.1, 1.0])
    (row,) = after_rollout(rollout, [9.0], "teacher_log_ratio", teacher="org/teacher", coefficient=2)
    assert row == pytest.approx([-1.0, 0.2, 2.0])
    (row,) = after_rollout(rollout, [9.0], "on_policy_distillation", teacher="org/teacher", mode="add")
    assert row == pytest.approx([8.5, 9.1, 10.0])


def test_a_teacher_with_another_prompt_by_hand() -> None:
    hinted = {"policy given hint": padded([REF_LOGPS])}
    rollout = three_tokens(teacher_logps_B_T=hinted)
    (row,) = after_rollout(rollout, [9.0], "teacher_log_ratio", teacher="policy", prompt="hint")
    assert row == pytest.approx([-0.5, 0.1, 1.0])
    weighed: dict[str, Any] = {"prompt": "hint", "strength": 0.5, "clip": 0.2}
    (row,) = after_rollout(rollout, [1.0], "self_distilled", **weighed)
    assert row == pytest.approx([0.9, 1 + 0.5 * (math.exp(0.1) - 1), 1.1])
    (row,) = after_rollout(rollout, [-2.0], "rlsd", **weighed)
    assert row == pytest.approx([-2.2, -2 * (1 + 0.5 * (math.exp(-0.1) - 1)), -1.8])
    with pytest.raises(ConfigurationError, match=r"'policy'.*prompt"):
        hook("teacher_log_ratio", teacher="policy")
