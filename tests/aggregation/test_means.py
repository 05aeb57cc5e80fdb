"""`token_mean_step`, the mean that needs the counts of an optimizer step."""

from dataclasses import replace

import pytest

from tests.aggregation.completions import LOSSES
from tests.contexts import mask_of, padded
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.types import StepTotals, Totals


def test_token_mean_step_over_several_steps() -> None:
    # Steps {1, 2} and {3} are means of their own, 12/6 and 6/1; token_mean gives 2 · 12/7 and 2 · 6/7.
    totals = Totals(tokens=7, sequences=3, prompts=1, max_completion_length=8, optimizer_steps=2.0)
    aggregation = load_loss_aggregation("token_mean_step")
    for rows, expected in ((LOSSES[:2], 12 / 6), (LOSSES[2:], 6.0)):
        step = StepTotals(tokens=sum(map(len, rows)), sequences=len(rows))
        loss = aggregation.reduce(padded(rows), mask_of([len(row) for row in rows]), replace(totals, step=step))
        assert float(loss) == pytest.approx(expected)


def test_token_mean_step_needs_the_totals_of_a_step() -> None:
    aggregation = load_loss_aggregation("token_mean_step")
    assert aggregation.declares.needs == ("step_totals",)  # by which the trainer knows
    totals = Totals(tokens=1, sequences=1, prompts=1, max_completion_length=8)
    with pytest.raises(ConfigurationError, match=r"token_mean_step: totals\.step"):
        flow.reduced_loss(aggregation, padded([[1.0]]), mask_of([1]), totals)
