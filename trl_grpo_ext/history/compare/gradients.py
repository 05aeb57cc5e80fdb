"""Signal, noise and direction: what the gradients of the selections on groups of completions say of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import ConfigurationError
from ..run_files import Say
from .comparison import Gradients, SelectionGradient
from .derivatives import CountSketch, Group, Policy, prompt_tokens
from .running import BatchResult
from .saved import SavedBatch
from .selections import Given, selection_settings
from .statistics import Estimate, Prompts, estimates

PLAIN = "plain TRL"
POLICY_GRADIENT = "policy gradient"
FEW = 50  # with fewer prompts, intervals are unreliable
RESAMPLES = 1000  # of the bootstrap
_OTHER_POLICY = 0.01  # nats per token by which saved log-probabilities may differ without a note
_OF_THE_FIRST = ("rewards", "reward_weights", "max_completion_length", "mask_truncated_completions")
"""Settings that plain TRL and the policy gradient share with the first selection."""
_UNDEFINED = Estimate(None, None, None)
Progress = Callable[[Sequence[Any], str], Iterable[Any]]  # wraps a list that takes long, given its title


def with_references(given: Mapping[str, Given]) -> dict[str, Given]:
    """Selections after plain TRL and the policy gradient, both with the rewards of the first."""
    if taken := given.keys() & {PLAIN, POLICY_GRADIENT}:
        raise ConfigurationError(f"A selection may not be called {taken.pop()!r}; rename the file.")
    first = selection_settings(next(iter(given.values())))
    shared = {key: first[key] for key in _OF_THE_FIRST if key in first}
    true = {**shared, "advantage_hooks": ["leave_one_out"], "loss_aggregation": "seq_mean_token_sum"}
    return {PLAIN: shared, POLICY_GRADIENT: true, **given}


def measured(
    policy: Policy,
    tokenizer: Any,
    batches: Sequence[SavedBatch],
    results: Mapping[str, Sequence[BatchResult]],
    dimensions: int,
    progress: Progress,
    note: Say,
) -> Gradients:
    """Measure the gradients of selections, the first two of which are those of `with_references`."""
    items = _items(batches, results, tokenizer)
    prompts = Prompts([tuple(item.group.prompt) for item in items])
    number = len(prompts.sizes_M)
    if number < 4:
        raise ConfigurationError(f"{number} prompts are too few to tell signal from noise; at least 4 are needed.")
    if number < FEW:
        note(f"With {number} prompts the intervals are rough; a few hundred make them reliable.")
    sketch = CountSketch(policy.trained, dimensions)
    sketches_S_M_k = _sketches(policy, sketch, items, progress, note)
    by_name = dict(zip(results, sketches_S_M_k.unbind(dim=0), strict=True))
    found = estimates(
        by_name, PLAIN, POLICY_GRADIENT, prompts, resamples=RESAMPLES, groups_per_batch=len(items) / len(batches)
    )
    seen = {name for name, one in found.items() if (one["ratio"].low or 0.0) > 0}
    for name, one in found.items():
        for direction, other in (("to_plain", PLAIN), ("to_policy_gradient", POLICY_GRADIENT)):
            if not {name, other} <= seen:
                one[direction] = _UNDEFINED
    if unseen := [name for name in found if name not in seen]:
        what = f"{', '.join(unseen)}: the signal cannot be distinguished from 0 with {number} prompts"
        note(f"{what}, so there is no cosine to it, and a worth is rough or missing. More prompts help.")
    return Gradients(
        model=policy.name or type(policy.model).__name__,
        prompts=number,
        parameters=sketch.parameters,
        dimensions=sketch.dimensions,
        sketch_error=0.0 if sketch.exact else (2 / sketch.dimensions) ** 0.5,
        batch_size=round(sum(len(batch.texts) for batch in batches) / len(batches)),
        selections=[SelectionGradient(name=name, signal_seen=name in seen, **one) for name, one in found.items()],
        sketches=by_name,
    )


class _Item(NamedTuple):
    """One group of one batch; its `n` tokens one completion after the other."""

    group: Group
    # Weight times advantage under each selection, times the batch's groups: the mean over groups is a batch's gradient.
    coefficients_S_n: torch.Tensor
    saved_n: torch.Tensor | None
    live_n: torch.Tensor


def _items(batches: Sequence[SavedBatch], results: Mapping[str, Sequence[BatchResult]], tokenizer: Any) -> list[_Item]:
    items = []
    for number, batch in enumerate(batches):
        tokens = batch.tokens
        of_batch = [of_selection[number] for of_selection in results.values()]
        weighted = [one.weights_B_T.double() * one.advantages_B_T.double() for one in of_batch]
        size = batch.num_generations
        count = len(batch.texts)
        saved: Sequence[Sequence[int] | None] = batch.prompt_ids or [None] * count
        for first in range(0, count, size):
            members = slice(first, first + size)
            own = saved[first]
            prompt = prompt_tokens(batch.prompts[first], tokenizer) if own is None else list(map(int, own))
            if not prompt:
                raise ConfigurationError(f"{batch.where}: the prompt of row {first} has no token to continue.")
            token_G_T = tokens.completion_mask_B_T[members] > 0
            items.append(
                _Item(
                    group=Group(prompt, tokens.id_rows[members]),
                    coefficients_S_n=torch.stack([one[members][token_G_T] for one in weighted]) * (count // size),
                    saved_n=None if tokens.logps_B_T is None else tokens.logps_B_T[members][token_G_T],
                    live_n=tokens.mask_B_T[members][token_G_T] > 0,
                )
            )
    return items


def _sketches(
    policy: Policy, sketch: CountSketch, items: Sequence[_Item], progress: Progress, note: Say
) -> torch.Tensor:
    """Every group's gradient under every selection, `(S, M, k)`."""
    found = []
    apart = 0.0
    counted = 0
    for item in progress(items, "Gradients"):
        sketches_S_k, logps_n = policy.gradients(item.group, item.coefficients_S_n, sketch)
        found.append(sketches_S_k)
        if logps_n is not None and item.saved_n is not None:
            apart += float((logps_n - item.saved_n)[item.live_n].abs().sum())
            counted += int(item.live_n.sum())
    if counted and apart / counted > _OTHER_POLICY:
        what = f"The saved log-probabilities differ from the model's by {apart / counted:.2g} nats per token"
        note(f"{what}: another policy, or temperature, sampled. The numbers hold for the model's own completions.")
    return torch.stack(found, dim=1)
