"""pass@k of an evaluation, over its problems on all ranks, from the completions that it samples anyway.

Source: Chen et al. (2021), https://arxiv.org/abs/2107.03374, equation 1.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigurationError
from .upstream.reading import RunFacts


def estimate_pass_at_k(passed: int, sampled: int, k: int) -> float:
    """The share of all choices of `k` of the `sampled` completions that hold one of the `passed`: unbiased."""
    return 1.0 - math.comb(sampled - passed, k) / math.comb(sampled, k)


@dataclass
class PassAtK:
    """Collects the rewards of an evaluation; completions without one (None, NaN) do not count among the n."""

    ks: Sequence[int]
    thresholds: Mapping[tuple[int, str], float]
    group_size: int
    _rewards: list[torch.Tensor] | None = field(default=None, init=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._rewards = []
        try:
            yield
        finally:
            self._rewards = None

    def add(self, rewards_N_K: torch.Tensor) -> None:
        """Collect the rewards of an evaluation batch of all ranks, in data order; ignored outside an evaluation."""
        if self._rewards is not None:
            self._rewards.append(rewards_N_K.detach().cpu())

    def metrics(self, problems: int | None) -> dict[str, float | None]:
        """Return pass@k of the first so many problems by metric name; None if nothing was judged."""
        if not self._rewards:
            return {}
        rewards_N_K = torch.cat(self._rewards)[: None if problems is None else problems * self.group_size]
        found: dict[str, float | None] = {}
        for (column, reward), threshold in self.thresholds.items():
            rewards_Q_G = rewards_N_K[:, column].view(-1, self.group_size)
            name = f"/{reward}" if len(self.thresholds) > 1 else ""
            judged_Q = (~torch.isnan(rewards_Q_G)).sum(1).tolist()
            passed_Q = (rewards_Q_G >= threshold).sum(1).tolist()  # NaN is not
            for k in self.ks:
                estimates = [estimate_pass_at_k(c, n, k) for c, n in zip(passed_Q, judged_Q, strict=True) if n >= k]
                found[f"pass@{k}{name}"] = math.fsum(estimates) / len(estimates) if estimates else None
                if left_out := len(judged_Q) - len(estimates):
                    why = f"are left out: {reward} judged fewer than {k} of their {self.group_size} completions"
                    warnings.warn(f"pass@{k}: {left_out} of {len(judged_Q)} problems {why}.", stacklevel=2)
        return found


def pass_at_k_of(settings: Any, facts: RunFacts, *, evaluates: bool) -> PassAtK:
    """The collector that the settings ask for, maybe of nothing; without thresholds 1.0 passes for the only reward."""
    if not settings.pass_at_k:
        return PassAtK((), {}, group_size=1)
    if not evaluates:
        warnings.warn("pass_at_k has no effect: this run has no eval_dataset to report it of.", stacklevel=3)
    names = facts.reward_names
    if settings.pass_thresholds is None and len(names) > 1:
        what = f"which reward decides: the run has {', '.join(names)}"
        raise ConfigurationError(f"pass_at_k needs to know {what}. Say it: pass_thresholds: {{{names[0]}: 1.0}}.")
    thresholds = settings.pass_thresholds or {names[0]: 1.0}
    if unknown := [name for name in thresholds if name not in names]:
        what = f"pass_thresholds has {unknown[0]!r}, which is no reward of this run"
        raise ConfigurationError(f"{what}. It has: {', '.join(names)}.")
    columns = {(names.index(name), name): value for name, value in thresholds.items()}
    return PassAtK(settings.pass_at_k, columns, facts.group_size(training=False))
