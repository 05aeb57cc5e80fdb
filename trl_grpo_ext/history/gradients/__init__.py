"""Compare the gradients of selections of plugins on the same completions: signal, noise, direction.

    from trl_grpo_ext.history.gradients import measure_gradients

    found = measure_gradients("outputs/run", ["a.yaml", "b.yaml"], model="outputs/run/checkpoint-100")
    found.selections[2].worth      # how many times more completions plain TRL needs for the same signal-to-noise ratio
    found.plain()                  # everything, for JSON

The replay reads the completions and runs the selections, `derivatives` computes gradients, `statistics` the estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import ConfigurationError
from ..files import Say
from ..replay import replay
from ..replay.comparison import Comparison
from ..replay.selections import Selections, named_selections, selection_settings
from ..replay.tokens import load_tokenizer
from .derivatives import DIMENSIONS, ROWS, CountSketch, Group, Policy, load_policy, prompt_tokens
from .statistics import Estimate, Prompts, compare

__all__ = ["Estimate", "GradientQuality", "SelectionQuality", "load_policy", "measure_gradients"]

PLAIN, POLICY_GRADIENT = "plain TRL", "policy gradient"
FEW = 50
"""With fewer prompts, intervals are unreliable."""
RESAMPLES = 1000
"""Of the bootstrap."""
_OTHER_POLICY = 0.01
"""Nats per token by which saved log-probabilities may differ from the model's without a note."""
_OF_THE_FIRST = ("rewards", "reward_weights", "max_completion_length", "num_generations", "mask_truncated_completions")
"""Settings that plain TRL and the policy gradient share with the first selection."""

Progress = Callable[[Sequence[Any]], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class SelectionQuality:
    """The gradient of one selection.

    Attributes:
        name: Its name.
        hooks: Its advantage hooks.
        aggregation: Its loss aggregation.
        ratio: Signal-to-noise ratio `|μ|² / tr Σ` of the gradient of a batch of `GradientQuality.batch_size`
            completions, with `μ` the mean and `Σ` the covariance of that gradient.
        worth: How many times more completions plain TRL needs for the same ratio.
        to_plain: Cosine of the mean gradient to plain TRL's.
        to_policy_gradient: Cosine of the mean gradient to the policy gradient of the raw reward.
    """

    name: str
    hooks: Sequence[str]
    aggregation: str
    ratio: Estimate
    worth: Estimate
    to_plain: Estimate
    to_policy_gradient: Estimate


@dataclass(frozen=True, kw_only=True)
class GradientQuality:
    """The gradients of selections on the same completions. Undefined numbers are None.

    Attributes:
        source: The file or folder.
        model: Path of the model, or its class.
        notes: How the files were read, and what the numbers leave out; one sentence each.
        groups: Their number.
        prompts: Their number; groups of one prompt are not independent, so it decides how wide the intervals are.
        completions: Their number.
        tokens: Live tokens.
        parameters: Trained parameters of the model.
        dimensions: Of the sketch.
        sketch_error: Bound on the relative standard error that the sketch adds to a squared norm; 0 if it is exact.
        batch_size: Completions of the batch whose ratio is given: the mean of the batches that were read.
        selections: Plain TRL, the policy gradient, and then each given selection.
        gradients: By selection, each group's sketched gradient `(M, k)`; not in `plain()`.
    """

    source: str
    model: str
    notes: Sequence[str]
    groups: int
    prompts: int
    completions: int
    tokens: int
    parameters: int
    dimensions: int
    sketch_error: float
    batch_size: int
    selections: Sequence[SelectionQuality]
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)

    def plain(self) -> dict[str, Any]:
        """Everything but the gradients, as JSON can hold it."""
        whole = dataclasses.asdict(dataclasses.replace(self, gradients={}))
        return {name: value for name, value in whole.items() if name != "gradients"}


def measure_gradients(
    completions: str | Path,
    selections: Selections,
    *,
    model: Any,
    tokenizer: Any = None,
    temperature: float = 1.0,
    dimensions: int = DIMENSIONS,
    rows: int = ROWS,
    progress: Progress = lambda items: items,
    **reading: Any,
) -> GradientQuality:
    """Measure the gradients of selections of plugins on saved completions, without training.

    Args:
        completions: A run's output_dir, or a folder or file that `replay` reads.
        selections: Paths of YAML files, or what such files hold; a mapping gives them names. Plain TRL and the policy
            gradient, with the rewards of the first, come before them.
        model: The policy that sampled the completions: a path or hub id of a model or an adapter, or what `load_policy`
            returned.
        tokenizer: A tokenizer, its path or hub id; None is the model's.
        temperature: Of the run's sampling; the logits are divided by it.
        dimensions: Of the sketch. With no fewer than the model has trained parameters everything is exact.
        rows: Completions of a micro-batch.
        progress: Wraps the list of the groups.
        **reading: `dataset`, `steps`, `limit` and `num_generations`, as `replay` takes them.

    Raises:
        ConfigurationError: The files, the model or the selections cannot be read, or lack what a plugin needs.
        PluginError: A plugin does not load.
        RewardError, PluginOutputError, PluginRunError: A plugin failed.
    """
    if not selections:
        raise ConfigurationError("There is nothing to measure: give at least one selection, --with a.yaml.")
    by_path = isinstance(model, str | Path)
    loaded = load_policy(str(model)) if by_path else model
    if tokenizer is None:
        tokenizer = model if by_path else getattr(loaded, "name_or_path", "")
    tokenizer = load_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    policy = Policy(loaded, temperature=temperature, rows=rows)
    named = named_selections(selections)
    if taken := named.keys() & {PLAIN, POLICY_GRADIENT}:
        raise ConfigurationError(f"A selection may not be called {taken.pop()!r}; rename the file.")
    first = selection_settings(next(iter(named.values())))
    shared = {key: first[key] for key in _OF_THE_FIRST if key in first}
    true = {**shared, "advantage_hooks": ["leave_one_out"], "loss_aggregation": "seq_mean_token_sum"}
    compared = replay(
        completions,
        {PLAIN: shared, POLICY_GRADIENT: true, **named},
        tokenizer=tokenizer,
        show=0,
        **reading,
    )
    notes = list(compared.notes)
    names = [one.name for one in compared.selections]
    items = _items(compared, names, tokenizer)
    of_prompts = Prompts([tuple(item.group.prompt) for item in items])
    number = len(of_prompts.sizes_M)
    if number < 4:
        raise ConfigurationError(
            f"{completions}: {number} prompts are too few to tell signal from noise; at least 4 are needed."
        )
    if number < FEW:
        notes.append(f"With {number} prompts the intervals are rough; a few hundred make them reliable.")
    sketch = CountSketch(policy.trained, dimensions)
    gradients = _gradients(policy, sketch, items, progress, notes.append)
    by_name = dict(zip(names, gradients.unbind(dim=0), strict=True))
    per_batch = compared.groups / len(compared.batches)
    found = compare(by_name, PLAIN, POLICY_GRADIENT, of_prompts, resamples=RESAMPLES, groups_per_batch=per_batch)
    qualities = [
        SelectionQuality(name=name, hooks=tuple(own.hooks), aggregation=own.aggregation, **found[name])
        for name, own in zip(names, compared.selections, strict=True)
    ]
    if unseen := [one.name for one in qualities if one.ratio.low is None or one.ratio.low <= 0]:
        notes.append(
            f"{', '.join(unseen)}: the signal cannot be distinguished from 0 with {number} prompts, so ratios to "
            f"it are rough or missing. More prompts help."
        )
    return GradientQuality(
        source=str(completions),
        model=str(model) if by_path else getattr(model, "name_or_path", "") or type(model).__name__,
        notes=tuple(notes),
        groups=len(items),
        prompts=number,
        completions=compared.completions,
        tokens=compared.tokens,
        parameters=sketch.parameters,
        dimensions=sketch.dimensions,
        sketch_error=0.0 if sketch.exact else (2 / sketch.dimensions) ** 0.5,
        batch_size=round(compared.completions / len(compared.batches)),
        selections=tuple(qualities),
        gradients=by_name,
    )


# ------------------------------------------------------------------------------------- from batches to group gradients


class _Item(NamedTuple):
    """One group of one batch; its `n` tokens one completion after the other.

    The coefficients are weight times advantage under each selection, times the batch's groups, so that the mean over
    groups is the gradient of a batch.
    """

    group: Group
    coefficients_S_n: torch.Tensor
    saved_n: torch.Tensor | None
    live_n: torch.Tensor


def _items(compared: Comparison, selections: Sequence[str], tokenizer: Any) -> list[_Item]:
    items = []
    for number, batch in enumerate(compared.batches):
        tokens = batch.tokens
        results = [compared.results[name][number] for name in selections]
        weighted = [one.weights_B_T.double() * one.advantages_B_T.double() for one in results]
        size, count = batch.num_generations, len(batch.texts)
        saved = (batch.records or {}).get("prompt_ids", [None] * count)
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


def _gradients(
    policy: Policy, sketch: CountSketch, items: Sequence[_Item], progress: Progress, note: Say
) -> torch.Tensor:
    """Every group's gradient under every selection, `(S, M, k)`."""
    found, apart, counted = [], 0.0, 0
    for item in progress(items):
        sketches_S_k, logps_n = policy.gradients(item.group, item.coefficients_S_n, sketch)
        found.append(sketches_S_k)
        if logps_n is not None and item.saved_n is not None:
            apart += float((logps_n - item.saved_n)[item.live_n].abs().sum())
            counted += int(item.live_n.sum())
    if counted and apart / counted > _OTHER_POLICY:
        note(
            f"The saved log-probabilities differ from the model's by {apart / counted:.2g} nats per token: another "
            "policy, or another temperature, sampled the completions. The numbers hold for the model's own completions."
        )
    return torch.stack(found, dim=1)
