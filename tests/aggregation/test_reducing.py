"""`tail_mean` from the mean of all completions to the worst one."""

import pytest

from tests.aggregation.completions import BATCH, loss_and_gradient


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 10 / 3), (2 / 3, 4), (0.5, 14 / 3), (1 / 3, 6), (0.1, 6)])
def test_tail_mean_from_all_to_the_worst(fraction: float, expected: float) -> None:
    assert loss_and_gradient({"name": "tail_mean", "fraction": fraction}, BATCH)[0] == pytest.approx(expected)
