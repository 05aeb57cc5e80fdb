"""What a chain tells about its hooks: the four metrics by hand, their names, and that parts of a batch add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import make_forward, make_rollout, mask_of, padded
from trl_grpo_ext.credit.chain import HookChain, change_tables, metrics_of
from trl_grpo_ext.credit.metrics import change_metrics, change_table, unique_names


class Add:
    def __init__(self, number: float, *stages: str) -> None:
        self.role = "transform" if "on_rollout" in stages else "forward"
        for stage in stages:
            setattr(self, stage, lambda advantages_B_T, context: advantages_B_T + number)


def metrics(before: Any, after: Any, lengths: list[int]) -> dict[str, float]:
    mask = mask_of(lengths, width=before.size(1))
    found = change_metrics("x", change_table(before, after, mask))
    return {name.removeprefix("advantage/x/"): value for name, value in found.items()}


def test_by_hand() -> None:
    before = padded([[1, 1, 1], [-2, -2, 0]])
    after = padded([[1, -1, 3], [-2, 0, 0]])  # the last token of the second row is padding
    found = metrics(before, after, [3, 2])
    assert found["mean"] == pytest.approx((1 - 1 + 3 - 2 + 0) / 5)
    assert found["std"] == pytest.approx(math.sqrt((1 + 1 + 9 + 4 + 0) / 5 - 0.2**2))
    assert found["sign_flips"] == pytest.approx(1 / 5)  # to zero is no flip
    assert found["mass_moved"] == pytest.approx((0 + 2 + 2 + 0 + 2) / (1 + 1 + 1 + 2 + 2))


def test_what_is_off_the_mask_does_not_count_whatever_it_is() -> None:
    before, after = torch.tensor([[1.0, 7.0]]), torch.tensor([[2.0, -9.0]])
    assert metrics(before, after, [1]) == {"mean": 2.0, "std": 0.0, "sign_flips": 0.0, "mass_moved": 1.0}


@pytest.mark.parametrize(("factor", "moved", "flips"), [(0.5, 0.5, 0), (-1.0, 2.0, 1), (1.0, 0.0, 0), (0.0, 1.0, 0)])
def test_scales(factor: float, moved: float, flips: float) -> None:
    before = padded([[1, -3, 2]])
    found = metrics(before, before * factor, [3])
    assert (found["mass_moved"], found["sign_flips"]) == pytest.approx((moved, flips))


def test_where_nothing_came_in_the_share_is_not_defined() -> None:
    assert math.isnan(metrics(torch.zeros(1, 2), torch.ones(1, 2), [2])["mass_moved"])
    assert math.isnan(metrics(torch.zeros(1, 2), torch.zeros(1, 2), [0])["mean"])


@given(st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(0, 99), st.data())
@settings(max_examples=50, deadline=None)
def test_ranks_add_up(lengths: list[int], seed: int, data: Any) -> None:
    torch.manual_seed(seed)
    mask = mask_of(lengths, width=5)
    before, after = torch.randn(mask.shape) * mask, torch.randn(mask.shape) * mask
    whole = change_table(before, after, mask)
    at = data.draw(st.integers(0, len(lengths)))
    parts = [change_table(before[rows], after[rows], mask[rows]) for rows in (slice(0, at), slice(at, None))]
    torch.testing.assert_close(torch.cat(parts), whole)
    mine = {k.split("/")[-1]: v for k, v in change_metrics("x", whole).items()}
    live = after[mask > 0].double()
    if live.numel():
        assert mine["mean"] == pytest.approx(float(live.mean()), abs=1e-6)
        assert mine["std"] == pytest.approx(float(live.std(correction=0)), abs=1e-6)


@pytest.mark.parametrize("value", [1 / 3, 1000.1, -1e-7])
def test_advantages_that_are_all_alike_have_no_spread(value: float) -> None:
    after = torch.full((5, 7), value)
    assert metrics(torch.zeros(5, 7), after, [7] * 5)["std"] == pytest.approx(0.0, abs=1e-6 * abs(value))


def test_a_chain_tells_what_each_hook_did() -> None:
    twice = Add(1.0, "on_rollout")
    chain = HookChain([twice, Add(2.0, "on_forward"), Add(3.0, "on_rollout", "on_forward"), twice])
    rollout = make_rollout([2, 1])
    result, changes = chain.on_rollout(torch.zeros(2, dtype=torch.float64), rollout)
    assert result.tolist() == [[5, 5], [5, 0]]
    assert [change.name for change in changes] == ["Add", "Add_2", "Add_3"]
    assert [change.after_B_T[0, 0].item() for change in changes] == [1, 4, 5]

    forward = make_forward(rollout.mask_B_T, rollout.mask_B_T, rollout.mask_B_T)
    result, changes = chain.on_forward(result, forward)
    assert result.tolist() == [[10, 10], [10, 0]]
    assert [change.name for change in changes] == ["Add_2/forward", "Add_4"]

    found = metrics_of(changes, change_tables(changes, rollout.mask_B_T))
    assert found["advantage/Add_4/mean"] == 10
    assert found["advantage/Add_2/forward/mass_moved"] == pytest.approx(3 / 5)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "b", "a"], ["a", "a_2", "b", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_"]),
    ],
)
def test_names_are_unique(names: list[str], expected: list[str]) -> None:
    assert unique_names(names) == expected
