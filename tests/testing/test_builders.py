"""Ranks on one machine: they gather in order, and none waits in vain."""

import pytest

from trl_grpo_ext.testing import make_rollout
from trl_grpo_ext.testing.builders import Ranks, UnequalGathers, cut


def test_ranks_gather_in_order_and_are_not_waited_for_in_vain() -> None:
    two = Ranks(cut(make_rollout([1, 2, 3, 4]), [2, 2]))
    sums = two.run(lambda rollout: [float(rollout.gather(rollout.lengths_B * step)[-1]) for step in range(50)])
    assert (sums, two.gathers) == ([[4.0 * step for step in range(50)]] * 2, [50, 50])
    ranks = Ranks(cut(make_rollout([1, 1, 1]), [1, 1, 1]))
    with pytest.raises(UnequalGathers, match=r"\[0, 1, 1\]"):
        ranks.run(lambda rollout: rollout.gather(rollout.lengths_B) if rollout.local_rows.start else None)
    with pytest.raises(ZeroDivisionError):  # what a rank raises is said first
        ranks.run(lambda rollout: rollout.gather(rollout.lengths_B) if rollout.local_rows.start else 1 / 0)
