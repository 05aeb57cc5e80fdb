"""teacher_log_ratio: by hand, against a loop, and what it asks the trainer for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from tests.advantages.token_batches import after_rollout, hook, live_places, rollouts
from tests.contexts import make_rollout, padded
from trl_grpo_ext.credit import flow
from trl_grpo_ext.types import Rollout

LOGPS, TEACHER_LOGPS = padded([[-1.0, -0.5, -2.0]]), padded([[-1.5, -0.4, -1.0]])


def test_by_hand_with_the_reference_as_teacher() -> None:
    rollout = make_rollout([3], old_logps_B_T=LOGPS, ref_logps_B_T=TEACHER_LOGPS)
    (row,) = after_rollout(rollout, [9.0], "teacher_log_ratio")
    assert row == pytest.approx([-0.5, 0.1, 1.0])


def test_by_hand_with_a_model_of_its_own() -> None:
    others = {"org/teacher": TEACHER_LOGPS, "org/another": LOGPS}
    rollout = make_rollout([3], old_logps_B_T=LOGPS, ref_logps_B_T=LOGPS, teacher_logps_B_T=others)
    (row,) = after_rollout(rollout, [9.0], "teacher_log_ratio", teacher="org/teacher", coefficient=2)
    assert row == pytest.approx([-1.0, 0.2, 2.0])
    (row,) = after_rollout(rollout, [9.0], "on_policy_distillation", teacher="org/teacher", mode="add")
    assert row == pytest.approx([8.5, 9.1, 10.0])


@pytest.mark.parametrize(
    ("teacher", "needs", "teachers"),
    [("reference", {"old_logps", "ref_logps"}, ()), ("org/teacher", {"old_logps"}, ("org/teacher",))],
)
def test_it_asks_for_what_it_reads_and_for_no_more(teacher: str, needs: set[str], teachers: tuple[str, ...]) -> None:
    asking = hook("teacher_log_ratio", teacher=teacher)
    assert set(asking.needs) == needs
    assert tuple(asking.teachers) == teachers


@given(rollouts())
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_and_rewards_do_not_matter(rollout: Rollout) -> None:
    count = len(rollout.prompts)
    replaced = after_rollout(rollout, [9.0] * count, "teacher_log_ratio", teacher="teacher", coefficient=0.5)
    added = after_rollout(rollout, [9.0] * count, "teacher_log_ratio", teacher="teacher", coefficient=0.5, mode="add")
    assert rollout.old_logps_B_T is not None
    for row in range(count):
        expected = [0.0] * rollout.mask_B_T.size(1)
        for place in live_places(rollout, row):
            gap = float(rollout.teacher_logps_B_T["teacher"][row, place]) - float(rollout.old_logps_B_T[row, place])
            expected[place] = 0.5 * gap
        assert replaced[row] == pytest.approx(expected, abs=1e-12)
        live = [9.0 + value if place in live_places(rollout, row) else 0.0 for place, value in enumerate(expected)]
        assert added[row] == pytest.approx(live, abs=1e-12)


def test_an_unscored_completion_is_distilled_too() -> None:
    rollout = make_rollout([3], [math.nan], old_logps_B_T=LOGPS, ref_logps_B_T=TEACHER_LOGPS)
    assert after_rollout(rollout, [0.0], "teacher_log_ratio")[0] == pytest.approx([-0.5, 0.1, 1.0])


def test_half_precision_advantages_do_not_round_the_log_probabilities() -> None:
    # In bfloat16 both log-probabilities would be -10.
    rollout = make_rollout([1], old_logps_B_T=padded([[-10.01]]), ref_logps_B_T=padded([[-10.0]]))
    incoming = torch.tensor([1.0], dtype=torch.bfloat16)
    result = flow.apply_rollout_hooks(incoming, [hook("teacher_log_ratio")], rollout)
    assert result.dtype == torch.bfloat16
    assert result.item() == pytest.approx(0.01, rel=1e-2)
