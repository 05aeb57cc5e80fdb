"""The flow from group advantages to a scalar loss, as pure functions over tensors, independent of TRL.

    r (B,) ──shapers──▶ r (B,) ──TRL or an estimator──▶ A (B, T) ──transforms, forward hooks──▶ A (B, T)
    A (B, T) ──TRL's loss, autograd──▶ l (B, T) ──weights──▶ Σ w·l

Dimensions are those of `types`: `B` completions on this rank, `T` completion tokens.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..errors import PluginOutputError, PluginRunError, TRLGRPOExtError, reworded
from ..guard.outcomes import exception_text, source_line
from ..guard.unchanged import Fingerprints
from ..types import NEEDS, Declaration, Forward, HookDeclaration, Rollout, Totals, implements, role_of
from .groups import gather_groups, group_mean, weighted_rewards

_REASON = 40  # characters of a group filter's reason, at most

FIGURES = ("mean", "std", "sign_flips", "mass_moved")
"""Names of what a run logs of each hook's change."""

TRL_REDUCTIONS = {
    **dict.fromkeys(("cispo", "dapo", "vespo"), "token_mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq_mean_token_mean"),
    "luspo": "seq_mean_token_sum",
    "bnpo": "token_mean_local",
    "dr_grpo": "constant_length",
}
"""By `loss_type` of TRL, the aggregation that weighs tokens as TRL's own reduction does (docs/how_it_works.md)."""


def plugin_label(plugin: object) -> str:
    """The plugin's name in messages: its own `__name__` if it has one, else its class's."""
    return str(getattr(plugin, "__name__", type(plugin).__name__))


def expand_advantages(advantages: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Give every token its completion's advantage."""
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(mask_B_T.shape)
    return torch.where(mask_B_T > 0, advantages, torch.zeros_like(advantages))


def apply_hooks(advantages: torch.Tensor, hooks: Sequence[Any], context: Rollout | Forward) -> torch.Tensor:
    """Run each hook's method for this context, in the order given: advantages `(B, T)`, detached, zero off the mask."""
    method = "on_rollout" if isinstance(context, Rollout) else "on_forward"
    advantages_B_T = expand_advantages(advantages, context.mask_B_T)
    for hook in hooks:
        if implements(hook, method):
            advantages_B_T = run_hook(hook, method, advantages_B_T, context)
    return advantages_B_T


def run_hook(hook: Any, method: str, advantages_B_T: torch.Tensor, context: Rollout | Forward) -> torch.Tensor:
    """Run one method of one hook, turn returned spans into advantages, and check the result against the contract."""
    label = f"advantage hook {plugin_label(hook)!r}: {method}"
    mask_B_T = context.mask_B_T
    with torch.no_grad(), calling(hook, label, context, advantages_B_T=advantages_B_T):
        result = getattr(hook, method)(advantages_B_T, context)
        if isinstance(context, Rollout) and isinstance(result, list | tuple):
            result = context.span_values(result).to(advantages_B_T.dtype)
            if role_of(hook) != "estimator":
                result = advantages_B_T + result
    result_B_T = expand_advantages(tensor_like(mask_B_T, result, label).detach(), mask_B_T)
    refuse(~torch.isfinite(result_B_T), result_B_T, f"{label} must return finite advantages")
    return result_B_T


def run_shaper(hook: Any, rollout: Rollout) -> torch.Tensor:
    """What a shaper adds to each completion's reward, `(B,)` or `(B, T)`; 0 off the mask and for unscored ones."""
    label = f"advantage hook {plugin_label(hook)!r}: on_rewards"
    with torch.no_grad(), calling(hook, label, rollout):
        result = hook.on_rewards(rollout)
    scored_B = ~torch.isnan(rollout.rewards_B)
    live_B_T = rollout.mask_B_T > 0
    counts = scored_B.unsqueeze(1) & live_B_T
    if isinstance(result, torch.Tensor) and result.dim() == 1:
        counts = scored_B
    added = tensor_like(counts, result, label, "(completions,) or (completions, tokens)").detach()
    added = torch.where(counts, added, torch.zeros_like(added))
    refuse(~torch.isfinite(added), added, f"{label} must return finite rewards")
    return added


def shape_rewards(hook: Any, rollout: Rollout, name: str) -> Rollout:
    """The rollout after one shaper: with its weights, or with what it adds, a column of weight 1. Gathers twice."""
    if HookDeclaration.of(hook).changes_weights:
        label = f"advantage hook {plugin_label(hook)!r}: on_rewards"
        with torch.no_grad(), calling(hook, label, rollout):
            result = hook.on_rewards(rollout)
        weights_K = tensor_like(rollout.reward_weights_K, result, label, "(reward functions,)").detach()
        refuse(~torch.isfinite(weights_K), weights_K, f"{label} must return finite weights")
        weights_K = weights_K.to(rollout.reward_weights_K)
        rewards_B = weighted_rewards(rollout.rewards_B_K, weights_K).to(rollout.rewards_B.dtype)
        return _with_rewards(rollout, rewards_B, reward_weights_K=weights_K, raw_rewards_B=rewards_B)
    added = run_shaper(hook, rollout)
    tokens_B_T = rollout.token_rewards_B_T
    if added.dim() == 2:
        tokens_B_T = added if tokens_B_T is None else tokens_B_T + added
        added = added.to(torch.promote_types(added.dtype, torch.float32)).sum(dim=1)
    column_B = added.to(rollout.rewards_B_K.dtype).masked_fill(torch.isnan(rollout.rewards_B), torch.nan)
    return _with_rewards(
        rollout,
        rollout.rewards_B + column_B,
        rewards_B_K=torch.cat([rollout.rewards_B_K, column_B.unsqueeze(1)], dim=1),
        reward_names=(*rollout.reward_names, name),
        reward_weights_K=torch.cat([rollout.reward_weights_K, rollout.reward_weights_K.new_ones(1)]),
        token_rewards_B_T=tokens_B_T,
    )


def _with_rewards(rollout: Rollout, rewards_B: torch.Tensor, **changed: Any) -> Rollout:
    means_N = group_mean(rollout.gather(rewards_B), gather_groups(rollout))
    return replace(rollout, rewards_B=rewards_B, group_baselines_B=means_N[rollout.local_rows], **changed)


def token_weights(aggregation: Any, rollout: Rollout) -> torch.Tensor:
    """Get an aggregation's weights and check them against the contract."""
    label = f"loss aggregation {plugin_label(aggregation)!r}"
    with torch.no_grad(), calling(aggregation, f"{label}: weights", rollout):
        result = aggregation.weights(rollout)
    weights_B_T = tensor_like(rollout.mask_B_T, result, f"{label}: weights").detach()
    refuse(~torch.isfinite(weights_B_T), weights_B_T, f"{label}: weights must be finite")
    refuse(weights_B_T < 0, weights_B_T, f"{label}: weights must not be negative")
    rule = f"{label}: weights must be zero where rollout.mask_B_T is zero (multiply by it)"
    refuse((rollout.mask_B_T == 0) & (weights_B_T != 0), weights_B_T, rule)
    return weights_B_T


def group_verdicts(group_filter: Any, rollout: Rollout) -> list[bool | str]:
    """A group filter's verdict on each of this rank's completions: True to keep its group, else False or the reason."""
    label = f"group filter {plugin_label(group_filter)!r}: keep"
    rows = len(rollout.texts)
    with torch.no_grad(), calling(group_filter, label, rollout):
        result = group_filter.keep(rollout)
    said = result.tolist() if isinstance(result, torch.Tensor | np.ndarray) else result
    if isinstance(said, list | tuple):
        verdicts = [bool(one) if isinstance(one, np.bool_) else one for one in said]
        if len(verdicts) == rows and all(map(_is_verdict, verdicts)):
            return verdicts
    raise PluginOutputError(
        f"{label} must return for each of the {rows} completions True, False, or why in at most {_REASON} characters; "
        f"got {said!r:.100}."
    )


def _is_verdict(said: Any) -> bool:
    return isinstance(said, bool) or (isinstance(said, str) and 0 < len(said) <= _REASON)


def verdicts_by_group(
    group_filter: Any, verdicts_N: Sequence[bool | str], groups_N: Sequence[int]
) -> dict[int, bool | str]:
    """A filter's verdict on each group, over all ranks; it must be the same at all completions of the group."""
    known: dict[int, bool | str] = {}
    for group, verdict in zip(groups_N, verdicts_N, strict=True):
        if known.setdefault(group, verdict) != verdict:
            raise PluginOutputError(
                f"group filter {plugin_label(group_filter)!r}: keep must say the same of all completions of a group, "
                f"and of group {group} it said {known[group]!r} and {verdict!r}. Gather what decides over all ranks."
            )
    return known


def hook_metrics(hook: Any) -> Mapping[str, float]:
    """The hook's own metrics by name, in which those of `chain.metrics_of` are refused."""
    stages = [stage for stage in ("on_rollout", "on_forward") if implements(hook, stage)]
    taken = [f"{prefix}{figure}" for prefix, _ in zip(("", "forward/"), stages, strict=False) for figure in FIGURES]
    return refuse_taken(f"advantage hook {plugin_label(hook)!r}", getattr(hook, "metrics", {}), taken)


def sampler_metrics(sampler: Any) -> Mapping[str, float]:
    """The prompt sampler's own metrics by name, where `drawn` is the run's."""
    found = sampler.metrics() if implements(sampler, "metrics") else {}
    return refuse_taken(f"prompt sampler {plugin_label(sampler)!r}", found, ["drawn"])


def refuse_taken(label: str, metrics: Mapping[str, Any], taken: Sequence[str]) -> Mapping[str, Any]:
    """A plugin's own metrics; refused if one has the name of what a run logs of it, or two would have one key."""
    for name in metrics:
        if name in taken:
            what = f"its metric {name!r} has the name of one that the run logs of it ({', '.join(taken)})"
            raise PluginOutputError(f"{label}: {what}. Give it another name.")
    return metrics


def checked_draw(drawn: Any, count: int, rows: int, label: str) -> list[int] | None:
    """The `count` different numbers that `draw` returned of a pool of `rows`, or None; others are refused."""
    if drawn is None:
        return None
    try:
        numbers = [operator.index(number) for number in drawn]
    except TypeError:
        numbers = []
    if len(numbers) != count or len({*numbers}) != count or not all(0 <= number < rows for number in numbers):
        raise PluginOutputError(
            f"{label}: draw must return {count} different numbers of rows from 0 to {rows - 1}, or None if there are "
            f"no more; got {drawn!r:.200}."
        )
    return numbers


def reduced_loss(aggregation: Any, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
    """Get a `reduce` aggregation's scalar and check it against the contract."""
    label = f"loss aggregation {plugin_label(aggregation)!r}"
    with calling(aggregation, f"{label}: reduce", loss_B_T=loss_B_T, mask_B_T=mask_B_T):
        result = aggregation.reduce(loss_B_T, mask_B_T, totals)
    loss = tensor_like(loss_B_T.new_zeros(()), result, f"{label}: reduce", "(a scalar)")
    if bool(torch.isfinite(loss_B_T).all()):
        rule = f"{label}: reduce must return a finite number from finite losses, also without a live token"
        refuse(~torch.isfinite(loss), loss, rule)
    if loss_B_T.requires_grad and not loss.requires_grad:
        raise PluginOutputError(f"{label}: reduce has no gradient: compute it from loss_B_T.")
    return loss


def reduced_weights(
    aggregation: Any, loss: torch.Tensor, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor
) -> torch.Tensor:
    """The weight that a `reduce` aggregation gave each token: its scalar's slope in the token's loss, `(B, T)`."""
    label = f"loss aggregation {plugin_label(aggregation)!r}"
    (slope_B_T,) = torch.autograd.grad(loss, loss_B_T, retain_graph=True, allow_unused=True)
    if slope_B_T is None:
        raise PluginOutputError(f"{label}: what reduce returned was not computed from loss_B_T.")
    refuse(~torch.isfinite(slope_B_T), slope_B_T, f"{label}: the gradient of reduce must be finite")
    rule = f"{label}: the gradient of reduce must be zero where mask_B_T is zero (multiply by it)"
    refuse((mask_B_T == 0) & (slope_B_T != 0), slope_B_T, rule)
    return slope_B_T


def row_table(weights_B_T: torch.Tensor, advantages_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> torch.Tensor:
    """Per completion what `weight_metrics` reads, `(B, 6)`, to be gathered over all ranks."""
    tokens_3_B_T = torch.stack([mask_B_T, (advantages_B_T > 0) * mask_B_T, (advantages_B_T < 0) * mask_B_T])
    return torch.cat([tokens_3_B_T, tokens_3_B_T * weights_B_T]).detach().sum(dim=2).T.to(torch.float32)


def weight_metrics(table_N_C: torch.Tensor) -> dict[str, float]:
    """How an aggregation weighs tokens, from the `row_table` of all ranks; NaN where there is no such token."""
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


def split_loss(loss: torch.Tensor, advantages_B_T: torch.Tensor) -> torch.Tensor:
    """Each token's term of a policy loss `L`, by Euler's identity: `A · ∂L/∂A`, as `L` is homogeneous in `A`."""
    (slope_B_T,) = torch.autograd.grad(loss, advantages_B_T, create_graph=True)
    return advantages_B_T.detach() * slope_B_T


def kl_k3(
    logps_B_T: torch.Tensor, ref_logps_B_T: torch.Tensor, importance_ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """Per-token estimate of KL(policy ‖ reference), `exp(d) - d - 1` with `d = log π_ref - log π`, in nats.

    Source: the k3 estimator of http://joschu.net/blog/kl-approx.html, used by GRPO (2402.03300, eq. 4).
    """
    difference_B_T = ref_logps_B_T - logps_B_T
    kl_B_T = torch.exp(difference_B_T) - difference_B_T - 1
    return kl_B_T if importance_ratio is None else kl_B_T * importance_ratio


def importance_ratio(
    logps_B_T: torch.Tensor, old_logps_B_T: torch.Tensor, mask_B_T: torch.Tensor, level: str
) -> torch.Tensor:
    """π/π_old per token `(B, T)`; at level "sequence" its geometric mean per sequence `(B, 1)` (GSPO, 2507.18071)."""
    log_ratio_B_T = logps_B_T - old_logps_B_T
    if level == "sequence":
        lengths_B = mask_B_T.sum(-1).clamp(min=1.0)
        log_ratio_B_T = ((log_ratio_B_T * mask_B_T).sum(-1) / lengths_B).unsqueeze(-1)
    return torch.exp(log_ratio_B_T)


@contextmanager
def named(label: str, plugin: object, context: Any = None) -> Iterator[None]:
    """Name the plugin that raised, unless the error already does, where it did, and what it has not declared."""
    try:
        yield
    except TRLGRPOExtError as error:
        if plugin_label(plugin) in str(error):
            raise
        raise reworded(error, f"{label}: {error}") from error
    except (Exception, SystemExit) as error:
        text, line = exception_text(error), source_line(error)
        hint = _undeclared(plugin, context, line) if "None" in text else ""
        raise PluginRunError(f"{label} raised {type(error).__name__}: {text}{line}{hint}") from error


def _undeclared(plugin: object, context: Any, line: str) -> str:
    """A sentence on what the line reads of the context that is None because nobody needs it."""
    known = (*NEEDS, "advantages") if implements(plugin, "keep") else NEEDS
    seen = {} if context is None else vars(context)
    read = [need for need in known if f"{need}_B_T" in line and need not in Declaration.of(plugin).needs]
    absent = [need for need in read if seen.get(f"{need}_B_T", 0) is None]
    are = "is" if len(absent) == 1 else "are"
    fields = ", ".join(f"{need}_B_T" for need in absent)
    return f'. {fields} {are} None unless declared, as in needs=("{absent[0]}",).' if absent else ""


@contextmanager
def calling(plugin: object, label: str, context: Any = None, **tensors: torch.Tensor) -> Iterator[None]:
    """Name the plugin that raised, and refuse one that writes to its inputs, which the loss and the logs also read."""
    inputs = {} if context is None else dict(vars(context))
    for mapping in ("columns", "teacher_logps_B_T", "carried_B_T"):
        value = inputs.pop(mapping, None)
        inputs |= {f"{mapping}[{name!r}]": item for name, item in value.items()} if isinstance(value, dict) else {}
    prints = Fingerprints({**inputs, **tensors})
    with named(label, plugin, context):
        yield
    if (name := prints.changed()) is not None:
        raise PluginOutputError(
            f"{label} changed {name}, which others read as well. Make a copy first: no `_` methods, no `out=`, no "
            "assignment to a place."
        )


def tensor_like(shaped: torch.Tensor, result: Any, label: str, axes: str = "(completions, tokens)") -> torch.Tensor:
    """What a plugin returned, on that device, if it is a floating point tensor of that shape; else an error."""
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        got = result.dtype if isinstance(result, torch.Tensor) else type(result).__name__
        problem = f"a floating point tensor of shape {tuple(shaped.shape)}, got {got}"
    elif result.shape != shaped.shape:
        problem = f"shape {tuple(shaped.shape)} {axes}, got {tuple(result.shape)}"
    else:
        return result.to(shaped.device)
    raise PluginOutputError(f"{label}: expected {problem}.")


def refuse(bad: torch.Tensor, values: torch.Tensor, rule: str) -> None:
    """Refuse values that break a rule, with the first of them and its place."""
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        where = ", ".join(f"{axis} {index}" for axis, index in zip(("row", "token"), place, strict=False))
        raise PluginOutputError(f"{rule}; got {values[tuple(place)].item()} at {where}.")
