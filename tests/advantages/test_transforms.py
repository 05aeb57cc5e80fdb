"""The transforms and `reward_schedule`: by hand, what rounding does, what is refused, and a resumed training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.advantages.token_batches import after_rollout, hook
from tests.contexts import make_rollout, padded
from tests.support import length_reward, train
from trl_grpo_ext.advantages.transforms import RewardSchedule
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("sign_scaling", {"positive": 0.5, "negative": 2.0}, [[0.5, -4, 0], [-1, 2, 0]]),
        ("clip_advantages", {"low": -1.0, "high": 3.0}, [[1, -1, 0], [-0.5, 3, 0]]),
    ],
)
def test_sizes_by_hand(name: str, parameters: dict[str, float], expected: list[list[float]]) -> None:
    incoming = padded([[1.0, -2.0, 0.0], [-0.5, 4.0]], width=3)
    result = flow.apply_hooks(incoming, [hook(name, **parameters)], make_rollout([3, 2], width=3))
    assert result.tolist() == expected


@pytest.mark.parametrize(
    ("text", "ngram", "expected"),
    [
        ("abcxabcy", 3, "....abc."),  # the first occurrence is not punished
        ("abcabcabc", 3, "...abcabc"),  # bca, cab too
        ("aaaa", 3, ".aaa"),  # occurrences may overlap
        ("abxab", 2, "...ab"),  # at the very end
        ("ab", 3, ".."),  # shorter than an n-gram
    ],
)
def test_repetition_penalty_by_hand(text: str, ngram: int, expected: str) -> None:
    rollout = make_rollout([len(text)], completion_ids_B_T=torch.tensor([[ord(letter) for letter in text]]))
    (row,) = after_rollout(rollout, [1.0], "repetition_penalty", ngram=ngram, penalty=0.25)
    assert row == [1.0 if letter == "." else 0.75 for letter in expected]


def test_repetition_penalty_of_large_vocabularies_does_not_collide() -> None:
    ids = torch.randint(0, 260_000, (16, 4000), generator=torch.Generator().manual_seed(0))
    ids[3, 3000:3040] = ids[3, 100:140]
    rollout = make_rollout([4000] * 16, completion_ids_B_T=ids)
    result = flow.apply_hooks(torch.ones(16), [hook("repetition_penalty")], rollout)
    assert (result != 1).nonzero().tolist() == [[3, place] for place in range(3000, 3040)]


def test_truncation_masking_by_hand() -> None:
    rollout = make_rollout([2] * 4, truncated_B=torch.tensor([True, True, False, False]))
    for keep, truncated in (("nothing", [[0, 0], [0, 0]]), ("negative", [[0, 0], [-1, -1]])):
        rows = after_rollout(rollout, [1.0, -1.0, 1.0, -1.0], "truncation_masking", keep=keep)
        assert rows == [*truncated, [1, 1], [-1, -1]]


def test_sequence_rejection_by_hand() -> None:
    # Mean log-ratios over live tokens: 0.1, -0.2 and (0.3 - 0.3)/2; the tool's token and the padding are in no mean,
    # nor is a token that the sampler has not scored. Of the last completion it has scored none.
    old = padded([[-1.0, -1.0, -1.0]] * 4)
    apart = padded([[0.1, 9.0, math.nan], [-0.2, math.nan, math.nan], [0.3, 9.0, -0.3], [math.nan] * 3])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0] * 3], dtype=torch.float64)
    rollout = make_rollout([3, 1, 3, 3], old_logps_B_T=old, sampling_logps_B_T=old - apart, mask_B_T=mask)
    for low, high, kept in (
        (math.exp(-0.21), math.exp(0.11), [True, True, True]),
        (math.exp(-0.19), math.exp(0.11), [True, False, True]),
        (0.0, math.exp(0.09), [False, True, True]),
        (0.999, 1.001, [False, False, True]),
    ):
        rows = after_rollout(rollout, [1.0, -1.0, 2.0, 3.0], "sequence_rejection", low=low, high=high)
        assert [any(row) for row in rows] == [*kept, True]


class TestWhiten:
    def test_by_hand(self) -> None:
        # Completions: mean 1, deviations 0, -1, -1, 2, squares sum to 6, σ = √2. Tokens: 3 of 4, 1 of 0: mean 3, σ = 2.
        incoming = [1.0, 0.0, 0.0, 3.0]
        rows = after_rollout(make_rollout([1] * 4, incoming), incoming, "whiten")
        assert [row[0] for row in rows] == pytest.approx([0, -(0.5**0.5), -(0.5**0.5), 2**0.5])
        rows = after_rollout(make_rollout([3, 1], [1.0, 0.0]), [4.0, 0.0], "whiten", over="tokens")
        assert rows == [pytest.approx([0.5] * 3), pytest.approx([-1.5, 0, 0])]
        # Without any reward, as with a teacher alone, what came in is whitened all the same.
        rows = after_rollout(make_rollout([1] * 3, [math.nan] * 3), [1.0, 3.0, 0.0], "whiten")
        assert [row[0] for row in rows] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])

    @pytest.mark.parametrize("over", ["completions", "tokens"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_equal_advantages_become_exactly_nothing(self, over: str, dtype: torch.dtype) -> None:
        incoming = torch.full((7,), 1 / 3, dtype=dtype)
        rollout = make_rollout([1, 2, 3, 1, 2, 0, 5], [1.0] * 7)
        result = flow.apply_hooks(incoming, [hook("whiten", over=over)], rollout)
        assert result.dtype == dtype
        assert not result.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rounding_is_taken_for_zero(self, dtype: torch.dtype) -> None:
        rewards = [0.1, 0.7, 0.3, 0.2, 0.9, 0.4, *[0.3] * 3]
        rollout = make_rollout([1] * 9, rewards, [0] * 3 + [1] * 3 + [2] * 3)
        rollout = replace(rollout, rewards_B=rollout.rewards_B.to(dtype))
        result = flow.apply_hooks(torch.zeros(9, dtype=dtype), [hook("normalised"), hook("whiten")], rollout)
        assert not result[6:].any()
        assert result[:6].all()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("successes", [1, 0, 1, 1, 0, 0, 0, 1]),
        ("failures", [0, 1, 0, 0, 1, 1, 0, 0]),
        ("mixed_groups", [1, 1, 0, 0, 0, 0, 1, 0]),
    ],
)
def test_outcome_filter_by_hand_and_by_raw_rewards(keep: str, kept: list[int]) -> None:
    raw, shaped = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, math.nan, 1.0], [0.2, 0.9] * 4
    rollout = make_rollout([1] * 8, shaped, [0, 0, 1, 1, 2, 2, 0, 3], raw_rewards_B=torch.tensor(raw))
    assert after_rollout(rollout, [1.0] * 8, "outcome_filter", keep=keep) == [[one] for one in kept]


class TestRewardSchedule:
    POINTS = {"form": [[10, 1.0], [20, 3.0], [40, 0.0]]}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("form", "weights"), [("linear", [1, 1, 2, 3, 1.5, 0, 0]), ("step", [1, 1, 1, 3, 3, 0, 0])]
    )
    def test_weights_by_hand(self, form: str, weights: list[float]) -> None:
        schedule = RewardSchedule(weights=self.POINTS, form=form)
        assert [schedule.weight("form", step) for step in (0, 10, 15, 20, 30, 40, 1000)] == weights

    def test_rewards_by_hand(self) -> None:
        rollout = make_rollout(
            [1, 1, 1],
            (3.0, 0.0, math.nan),
            step=15,
            rewards_B_K=torch.tensor([[1.0, 4.0], [0.0, math.nan], [math.nan, math.nan]], dtype=torch.float64),
            reward_names=("right", "form"),
            reward_weights_K=torch.tensor([1.0, 0.5], dtype=torch.float64),
        )
        schedule = RewardSchedule(weights={**self.POINTS, "right": [[0, 2.0]]})
        shaped = flow.shape_rewards(schedule, rollout, "unused")  # form 2 and not 0.5, right 2 and not 1
        assert shaped.reward_weights_K.tolist() == [2.0, 2.0]
        assert shaped.rewards_B.nan_to_num(nan=-9).tolist() == [2 * 1.0 + 2 * 4.0, 0.0, -9]
        assert torch.equal(shaped.raw_rewards_B.nan_to_num(), shaped.rewards_B.nan_to_num())
        assert shaped.group_baselines_B.tolist() == [5.0] * 3
        assert shaped.reward_names == rollout.reward_names
        assert schedule.metrics == {"form": 2.0, "right": 2.0}
        with pytest.raises(ConfigurationError, match="'from'"):
            RewardSchedule(weights={"from": [[0, 1.0]]}).on_rewards(rollout)

    @pytest.mark.parametrize("points", [[], 1.0, "01", [1.0], [[0]], [[-1, 1.0]], [[True, 1.0]], [[5, 1.0], [5, 2.0]]])
    def test_points_that_are_none_are_refused(self, points: Any) -> None:
        for weights in ({"a": points}, {}, None, {"a": [[0, math.nan]]}):
            with pytest.raises(ConfigurationError):
                RewardSchedule(weights=weights)

    def test_training_resumes_to_the_bit_and_weighs_as_scheduled(self, tiny_model: Path, tmp_path: Path) -> None:
        schedule = {"name": "reward_schedule", "weights": {"length_reward": [[0, 1.0], [4, -1.0]]}}
        settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        settings |= {"advantage_hooks": [schedule], "reward_funcs": [length_reward]}
        whole = train(tiny_model, tmp_path, **settings)
        for log, weight in zip((log for log in whole.logs if "reward" in log), (1.0, 0.5, 0.0, -0.5), strict=True):
            mean = log["rewards/length_reward/mean"]
            assert log["reward"] == pytest.approx(weight * mean, abs=1e-6)
            assert log["advantage/reward_schedule/length_reward"] == weight
            assert "raw_reward" not in log
        for step in (1, 3):
            resumed = train(tiny_model, tmp_path / str(step), **settings, resume=str(tmp_path / f"checkpoint-{step}"))
            assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
