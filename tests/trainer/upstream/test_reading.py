"""What is read of TRL: the weights of its reductions are those of the aggregations that stand for them."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.contexts import make_rollout
from trl_grpo_ext import load_loss_aggregation
from trl_grpo_ext.credit import flow
from trl_grpo_ext.credit.flow import TRL_REDUCTIONS
from trl_grpo_ext.trainer.upstream import contract, reading
from trl_grpo_ext.trainer.upstream.reading import Progress
from trl_grpo_ext.types import Rollout, StepTotals, implements


def test_loss_types_have_trls_weights() -> None:
    assert TRL_REDUCTIONS.keys() == contract.LOSS_TYPES
    rollout: Rollout = make_rollout([3, 0, 5, 1], groups=[0, 0, 1, 1], limit=9)
    facts: Any = SimpleNamespace(ranks=1)
    progress = Progress(training=True, step=0, max_completion_length=9)
    for loss_type, name in TRL_REDUCTIONS.items():
        aggregation = load_loss_aggregation(name)
        if implements(aggregation, "weights"):
            ours = flow.token_weights(aggregation, rollout)
        else:
            loss = torch.ones_like(rollout.mask_B_T).requires_grad_()
            scalar = aggregation.reduce(loss, rollout.mask_B_T, rollout.totals)
            ours = flow.reduced_weights(aggregation, scalar, loss, rollout.mask_B_T)
        theirs = reading.reduction_weights(loss_type, rollout.mask_B_T, torch.tensor(9.0), facts, progress)
        assert torch.allclose(ours, theirs), loss_type
    assert StepTotals(tokens=1, sequences=1).micro_batches == 1  # what a comparison takes a step for
