"""What an aggregation really does: how much a token counts by its completion's length and its advantage's sign.

Every figure is a mean weight per token relative to the mean over all live tokens, so under `token_mean` all are 1.
Above 1, such tokens pull more than their share.

| metric | tokens |
| --- | --- |
| `loss_weight/length_q1` to `_q4` | of the shortest to the longest quarter of the completions |
| `loss_weight/positive_advantage` | with an advantage above 0 |
| `loss_weight/negative_advantage` | with an advantage below 0 |

An aggregation by weights is measured once per generation batch. One with `reduce` is measured at every micro-batch, by
the slope of its scalar in each token's loss.
"""

from __future__ import annotations

import torch


def row_table(weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """What the metrics need of each completion, `(B, 6)`, to be gathered over all ranks."""
    positive_B_T, negative_B_T = (advantages_B_T > 0) * mask_B_T, (advantages_B_T < 0) * mask_B_T
    tokens_B_T_C = torch.stack([mask_B_T, positive_B_T, negative_B_T], dim=-1)
    weights_B_T_C = tokens_B_T_C * weights_B_T.unsqueeze(-1)
    return torch.cat([tokens_B_T_C, weights_B_T_C], dim=-1).detach().sum(1).to(torch.float32)


def weight_metrics(table_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics from the `row_table` of all ranks; NaN where there is no such token."""
    tokens_N, positive_N, negative_N, *weights = table_N_C.detach().cpu().double().unbind(1)
    weights_N, on_positive_N, on_negative_N = weights
    mean = weights_N.sum() / tokens_N.sum()

    def relative(weight: torch.Tensor, tokens: torch.Tensor) -> float:
        return float(weight.sum() / tokens.sum() / mean)

    live_N = tokens_N > 0
    bounds = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    if live_N.any():
        bounds = torch.quantile(tokens_N[live_N], bounds)
    quarters_N = torch.bucketize(tokens_N.contiguous(), bounds)  # a length on a bound belongs to the shorter quarter
    metrics = {}
    for quarter in range(4):
        rows_N = live_N & (quarters_N == quarter)
        metrics[f"loss_weight/length_q{quarter + 1}"] = relative(weights_N[rows_N], tokens_N[rows_N])
    metrics["loss_weight/positive_advantage"] = relative(on_positive_N, positive_N)
    metrics["loss_weight/negative_advantage"] = relative(on_negative_N, negative_N)
    return metrics
