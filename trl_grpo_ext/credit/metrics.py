"""The metrics of the flow: what hooks did to the advantages, and how an aggregation weighs tokens.

Each comes from a table with one row per completion, gathered over all ranks. An aggregation by weights is measured once
per generation batch, one with `reduce` at every micro-batch, by the slope of its scalar in each token's loss.
"""

import math

import torch

COLUMNS = 6


def change_table(before_B_T: torch.Tensor, after_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Per completion, `(B, 6)`: tokens, mean A, Σ (A - mean)², sign flips, Σ |change|, Σ |A before|, to be gathered."""
    live_B_T = (mask_B_T > 0).float()
    before_B_T, after_B_T = before_B_T.float(), after_B_T.float()
    tokens_B = live_B_T.sum(dim=1)
    means_B = (after_B_T * live_B_T).sum(dim=1) / tokens_B.clamp(min=1.0)
    flips_B_T = torch.sign(before_B_T) * torch.sign(after_B_T) < 0
    spread_B_T, moved_B_T = (after_B_T - means_B.unsqueeze(1)) ** 2, (after_B_T - before_B_T).abs()
    columns = [spread_B_T, flips_B_T.float(), moved_B_T, before_B_T.abs()]
    return torch.stack([tokens_B, means_B, *((column * live_B_T).sum(dim=1) for column in columns)], dim=1)


def change_metrics(name: str, table_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics of one hook from the `change_table` of all ranks; NaN if undefined."""
    tokens_N, means_N, within_N, flips_N, moved_N, mass_N = table_N_C.detach().cpu().double().unbind(dim=1)
    tokens, mass = tokens_N.sum(), mass_N.sum()
    mean = (tokens_N * means_N).sum() / tokens
    spread = within_N.sum() + (tokens_N * (means_N - mean) ** 2).sum()
    return {
        f"advantage/{name}/mean": float(mean),
        f"advantage/{name}/std": float((spread / tokens).sqrt()),
        f"advantage/{name}/sign_flips": float(flips_N.sum() / tokens),
        f"advantage/{name}/mass_moved": float(moved_N.sum() / mass) if mass > 0 else math.nan,
    }


def row_table(weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Per-completion inputs of the metrics, `(B, 6)`, to be gathered over all ranks."""
    tokens_3_B_T = torch.stack([mask_B_T, (advantages_B_T > 0) * mask_B_T, (advantages_B_T < 0) * mask_B_T])
    return torch.cat([tokens_3_B_T, tokens_3_B_T * weights_B_T]).detach().sum(dim=2).T.to(torch.float32)


def weight_metrics(table_N_C: torch.Tensor) -> dict[str, float]:
    """The metrics from the `row_table` of all ranks; NaN where there is no such token."""
    columns = table_N_C.detach().cpu().double().unbind(1)
    tokens_N, positive_N, negative_N, weights_N, on_positive_N, on_negative_N = columns
    mean = weights_N.sum() / tokens_N.sum()

    def relative(weight: torch.Tensor, tokens: torch.Tensor) -> float:
        return float(weight.sum() / tokens.sum() / mean)

    live_N = tokens_N > 0
    bounds = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    if live_N.any():
        bounds = torch.quantile(tokens_N[live_N], bounds)
    quarters_N = torch.bucketize(tokens_N.contiguous(), bounds)  # a length on a bound belongs to the shorter quarter
    of_quarter = [live_N & (quarters_N == quarter) for quarter in range(4)]
    return {
        **{f"loss_weight/length_q{q}": relative(weights_N[n], tokens_N[n]) for q, n in enumerate(of_quarter, 1)},
        "loss_weight/positive_advantage": relative(on_positive_N, positive_N),
        "loss_weight/negative_advantage": relative(on_negative_N, negative_N),
    }
