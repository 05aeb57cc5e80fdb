"""Switches for any hook in a chain: keep the signs of advantages, or keep their sum.

    advantage_hooks: [{name: segment_weights, answer: 2.0, preserve_sum: true}]

Both correct the hook's result towards the incoming advantages:

- `preserve_sign`: a token whose sign the hook changed gets 0.
- `preserve_sum`: each completion's advantages keep their sum, `S`. With `P` and `M` the sums of the hook's positive and
  negative advantages (`M` as a positive number), positive ones are multiplied by `f` and negative ones divided by it,
  such that `f·P - M/f = S`. So no sign flips, zeros stay zero, and if all advantages of a completion have one sign they
  keep their ratios. Of all ways to restore the sum this stays nearest to the hook's advantages in relative entropy. If
  it is impossible, because the hook left no advantage of the needed sign, the completion keeps its incoming advantages.

Shapers and estimators refuse both, because they have no incoming advantages to preserve. A mask (`last = True`) refuses
`preserve_sum`, which would give masked completions their advantages back. A hook that gives advantages to groups
without signal refuses both, which would remove them all.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigurationError
from ..types import HOOK_METHODS, Forward, Rollout, implements, role_of
from .flow import plugin_label, run_hook


def keep_signs(before_B_T: torch.Tensor, after_B_T: torch.Tensor) -> torch.Tensor:
    """`after_B_T`, with 0 wherever its sign is not that of `before_B_T`."""
    return torch.where(torch.sign(after_B_T) == torch.sign(before_B_T), after_B_T, torch.zeros_like(after_B_T))


def keep_sums(before_B_T: torch.Tensor, after_B_T: torch.Tensor) -> torch.Tensor:
    """`after_B_T`, scaled so that each row sums to what `before_B_T` does; both zero off the mask.

    It minimises Σ a'·log(a'/a) - a' over the absolute values, subject to the sum (one Lagrange multiplier, log f).
    """
    wide_B_T = after_B_T.double()
    sum_B = before_B_T.double().sum(dim=1)
    positive_B = wide_B_T.clamp(min=0.0).sum(dim=1)
    negative_B = (-wide_B_T).clamp(min=0.0).sum(dim=1)
    root_B = torch.sqrt(sum_B**2 + 4 * positive_B * negative_B)
    # The two forms of the positive root of P·f² - S·f - M = 0; each is exact where the other would cancel.
    factor_B = torch.where(sum_B >= 0, (sum_B + root_B) / (2 * positive_B), 2 * negative_B / (root_B - sum_B))
    usable_B = torch.isfinite(factor_B) & (factor_B > 0)
    factor_B_1 = torch.where(usable_B, factor_B, 1.0).unsqueeze(1)
    scaled_B_T = torch.where(wide_B_T > 0, wide_B_T * factor_B_1, wide_B_T / factor_B_1)
    return torch.where(usable_B.unsqueeze(1), scaled_B_T.to(after_B_T.dtype), before_B_T)


class Preserving:
    """Wraps a hook and corrects its results as the module's docstring says."""

    def __init__(self, hook: Any, *, preserve_sign: bool = False, preserve_sum: bool = False) -> None:
        self.role, wanted = role_of(hook), "preserve_sum" if preserve_sum else "preserve_sign"
        problem = ""
        if self.role in ("shaper", "estimator"):
            problem = f"has no effect: as {self.role} it has no incoming advantages. Put it on a transform after it."
        elif preserve_sum and self.role == "transform" and getattr(hook, "last", False):
            problem = "would give completions that this mask masks their advantages back. Take it out."
        elif getattr(hook, "makes_signal", False):
            problem = "would leave nothing of it, since it gives advantages where none come in. Take it out."
        if problem:
            raise ConfigurationError(f"{wanted} of the advantage hook {plugin_label(hook)!r} {problem}")
        self.hook, self.preserve_sign, self.preserve_sum = hook, preserve_sign, preserve_sum
        self.__name__ = plugin_label(hook)
        # Only the stages that the hook has, so that the chain passes over the others as it does for the hook itself.
        if implements(hook, "on_rollout"):
            self.on_rollout = self._on_rollout
        if implements(hook, "on_forward"):
            self.on_forward = self._on_forward

    def __getattr__(self, name: str) -> Any:
        """Answer with the hook's `needs`, `teachers`, `state_dict` and the like."""
        if name in HOOK_METHODS or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["hook"], name)

    def _on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        return self._kept(advantages_B_T, run_hook(self.hook, "on_rollout", advantages_B_T, rollout))

    def _on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        return self._kept(advantages_B_T, run_hook(self.hook, "on_forward", advantages_B_T, forward))

    def _kept(self, before_B_T: torch.Tensor, after_B_T: torch.Tensor) -> torch.Tensor:
        if self.preserve_sign:
            after_B_T = keep_signs(before_B_T, after_B_T)
        return keep_sums(before_B_T, after_B_T) if self.preserve_sum else after_B_T
