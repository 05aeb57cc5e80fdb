"""Compare the gradients of selections of plugins on the same completions: signal, noise, direction.

    from trl_grpo_ext.history.gradients import measure_gradients

    found = measure_gradients("outputs/run", ["a.yaml", "b.yaml"], model="outputs/run/checkpoint-100")
    found.selections[1].worth      # how many times more completions plain TRL needs for the same signal-to-noise ratio
    found.plain()                  # everything, for JSON

The replay reads the completions and runs the selections. `derivatives` computes gradients, `statistics` the estimates,
`rollout` samples completions if there are none, and `page` draws.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigurationError
from ..replay import replay
from ..replay.comparison import QUARTERS, TENTHS, Comparison, by_tenth, quarters
from ..replay.selections import selection_settings
from ..replay.tokens import Tokenize, Tokens, load_tokenizer
from .derivatives import DIMENSIONS, ROWS, CountSketch, Group, Groups, Policy, key_of
from .rollout import load_policy, prompt_tokens, roll_out
from .statistics import Estimate, Prompts, compare, holm, shares

__all__ = ["Estimate", "GradientQuality", "SelectionQuality", "Share", "load_policy", "measure_gradients"]

PLAIN, POLICY_GRADIENT = "plain TRL", "policy gradient"
FOLDER = "gradients"
"""Folder of the sketches, beside the completions."""
FEW = 50
"""With fewer prompts, intervals are unreliable."""
_OTHER_POLICY = 0.01
"""Nats per token by which saved log-probabilities may differ from the model's without a note."""
_OF_THE_FIRST = ("rewards", "reward_weights", "max_completion_length", "num_generations", "mask_truncated_completions")
"""Settings that plain TRL and the policy gradient share with the first selection."""

_Parts = tuple[Sequence["Share"], Sequence["Share"], Sequence["Share"]]
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of the batch gradient's squared norm that comes from some of the tokens; may be negative."""

    name: str
    share: Estimate


@dataclass(frozen=True, kw_only=True)
class SelectionQuality:
    """The gradient of one selection.

    Attributes:
        name: Its name.
        hooks: Its advantage hooks.
        aggregation: Its loss aggregation.
        ratio: Signal-to-noise ratio of the gradient of a batch of `GradientQuality.batch_size` completions,
            `|μ|² / tr Σ`, with `μ` the mean and `Σ` the covariance of that gradient.
        noise_scale: Completions of a batch whose ratio is 1; None if no signal is detected.
        worth: How many times more completions plain TRL needs for the same ratio.
        worth_p: p of a difference of the ratio to plain TRL's, corrected by Holm's method.
        to_plain: Cosine of the mean gradient to plain TRL's.
        to_policy_gradient: Cosine of the mean gradient to the policy gradient of the raw reward.
        bias_p: p of that cosine being below 1, corrected by Holm's method.
        halves: Cosine between the mean gradients of two halves of the prompts.
        by_position: Shares of tenths of every completion; empty if not requested.
        by_sign: Shares of tokens by the sign of their advantage.
        by_length: Shares of quarters of the completions by length.
    """

    name: str
    hooks: Sequence[str]
    aggregation: str
    ratio: Estimate
    noise_scale: float | None
    worth: Estimate
    worth_p: float | None
    to_plain: Estimate
    to_policy_gradient: Estimate
    bias_p: float | None
    halves: Estimate
    by_position: Sequence[Share] = ()
    by_sign: Sequence[Share] = ()
    by_length: Sequence[Share] = ()


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
        backward_passes: Run this time, over all groups; 0 if all was known.
        batch_size: Completions of the batch whose ratio is given.
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
    backward_passes: int
    batch_size: int
    selections: Sequence[SelectionQuality]
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)

    def plain(self) -> dict[str, Any]:
        """Everything but the gradients, as JSON can hold it."""
        whole = dataclasses.asdict(dataclasses.replace(self, gradients={}))
        return {name: value for name, value in whole.items() if name != "gradients"}


def measure_gradients(
    completions: str | Path,
    selections: Sequence[str | Path | Mapping[str, Any]] | Mapping[str, str | Path | Mapping[str, Any]],
    *,
    model: Any,
    tokenizer: Any = None,
    dataset: str | Path | None = None,
    prompts: str | Path | None = None,
    samples: int = 8,
    max_completion_length: int | None = None,
    batch_size: int | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    temperature: float = 1.0,
    dimensions: int = DIMENSIONS,
    rows: int = ROWS,
    seed: int = 0,
    resamples: int = 1000,
    with_shares: bool = True,
    keep: str | Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    load_in_4bit: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    progress: Progress = lambda items, count, what: items,
) -> GradientQuality:
    """Measure the gradients of selections of plugins on saved completions, or on new ones, without training.

    Args:
        completions: A run's output_dir, or a folder or file that `replay` reads; with `prompts` the folder that gets
            the rollout.
        selections: Paths of YAML files, or what such files hold; a mapping gives them names. Plain TRL and the policy
            gradient, with the rewards of the first, come before them.
        model: The policy that sampled the completions: a path or hub id of a model or an adapter, or a loaded model.
        tokenizer: A tokenizer, its path or hub id; None is the model's.
        dataset: A `.jsonl` or `.parquet` file with the columns that rewards need, joined by the prompt; with `prompts`
            it is that file.
        prompts: A `.jsonl` or `.parquet` file with a column `prompt`: completions are sampled of these.
        samples: Completions of each prompt.
        max_completion_length: Tokens at most of those; None is the first selection's, or TRL's default.
        batch_size: Completions of the batch whose ratio is given, and of a generation batch of a rollout; None is the
            mean of the batches that were read, and 64 in a rollout.
        steps: First and last step; None is no bound.
        limit: Completions at most, in whole groups.
        num_generations: Completions of a prompt, for files that don't say; None is to infer it.
        temperature: Of sampling; the logits are divided by it.
        dimensions: Of the sketch. With no fewer than the model has trained parameters everything is exact.
        rows: Completions of a micro-batch.
        seed: Of the sketch, the bootstrap and the rollout.
        resamples: Of the bootstrap.
        with_shares: Whether to measure which tokens the gradient comes from, which takes a second pass.
        keep: Folder for what was computed; None is `gradients/` beside the completions.
        dtype, device, load_in_4bit: Of a model given by its path; see `load_policy`.
        say: Called, as it goes, with what will be in `notes`.
        progress: Wraps the loops that take long: items, their number, and what is done.

    Raises:
        ConfigurationError: The files, the model or the selections cannot be read, or lack what a plugin needs.
        PluginError: A plugin does not load.
        RewardError, PluginOutputError, PluginRunError: A plugin failed.
    """
    named = isinstance(selections, Mapping)
    given = list(selections.values()) if isinstance(selections, Mapping) else list(selections)
    if not given:
        raise ConfigurationError("There is nothing to measure: give at least one selection, --with a.yaml.")
    if dimensions < 2 or rows < 1 or resamples < 100:
        raise ConfigurationError(
            f"dimensions={dimensions}, rows={rows}, resamples={resamples}: at least 2, 1 and 100 are needed."
        )
    notes: list[str] = []

    def note(sentence: str) -> None:
        if sentence not in notes:
            notes.append(sentence)
            say(sentence)

    loaded = (
        load_policy(str(model), dtype=dtype, device=device, load_in_4bit=load_in_4bit)
        if isinstance(model, str | Path)
        else model
    )
    if tokenizer is None:
        tokenizer = getattr(loaded, "name_or_path", "") if not isinstance(model, str | Path) else model
    tokenizer = load_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    policy = Policy(loaded, temperature=temperature, rows=rows)
    first = selection_settings(given[0])
    shared = {key: first[key] for key in _OF_THE_FIRST if key in first}
    if prompts is not None:
        roll_out(
            Path(completions),
            prompts,
            policy,
            tokenizer,
            samples=samples,
            prompts_at_once=max((batch_size or 64) // samples, 1),
            max_completion_length=max_completion_length or first.get("max_completion_length") or 512,
            seed=seed,
            progress=progress,
        )
        dataset = prompts if dataset is None else dataset
    references: list[Mapping[str, Any]] = [
        shared,
        {**shared, "advantage_hooks": ["leave_one_out"], "loss_aggregation": "seq_mean_token_sum"},
    ]
    compared = replay(
        completions,
        [*references, *given],
        tokenizer=tokenizer,
        dataset=dataset,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        show=0,
        say=lambda sentence: None,
        progress=lambda batches, count: progress(batches, count, "Running the selections"),
    )
    played_as = [one.name for one in compared.selections]
    names = [PLAIN, POLICY_GRADIENT, *(list(selections) if named else played_as[2:])]
    if taken := [name for name in names[2:] if names.count(name) > 1]:
        raise ConfigurationError(f"A selection may not be called {taken[0]!r}; rename the file.")
    called = dict(zip(played_as, names, strict=True))
    for sentence in compared.notes:  # the replay numbers what has no file
        note(re.sub(r"\bselection \d+\b", lambda match: called.get(match[0], match[0]), sentence))
    items = _items(compared, played_as, Tokenize(tokenizer), tokenizer)
    of_prompts = Prompts.of([tuple(item.group.prompt) for item in items])
    number = len(of_prompts.sizes_M)
    if number < 4:
        raise ConfigurationError(
            f"{completions}: {number} prompts are too few to tell signal from noise; at least 4 are needed."
        )
    if number < FEW:
        note(f"With {number} prompts the intervals are rough; a few hundred make them reliable.")
    sketch = CountSketch(policy.trained, dimensions, seed)
    groups = Groups(policy, sketch, _folder(completions, keep))
    gradients, notes_of_policy = _gradients(groups, items, progress)
    for sentence in notes_of_policy:
        note(sentence)
    by_name = dict(zip(names, gradients.unbind(dim=0), strict=True))
    found = compare(by_name, PLAIN, POLICY_GRADIENT, of_prompts, resamples=resamples, seed=seed)
    parts: list[_Parts] = [((), (), ())] * len(names)
    if with_shares:
        parts = _shares(groups, items, gradients, of_prompts, resamples, seed, progress)
    per_batch = batch_size or (compared.completions / len(compared.batches))
    group_size = compared.completions / compared.groups
    worth_p = _holm([found[name].worth_p for name in names[2:]])
    bias_p = _holm([found[name].bias_p for name in names[2:]])
    qualities = []
    for place, name in enumerate(names):
        one, own = found[name], compared.selections[place]
        ratio = one.ratio.value
        qualities.append(
            SelectionQuality(
                name=name,
                hooks=tuple(own.hooks),
                aggregation=own.aggregation,
                ratio=_scale(one.ratio, per_batch / group_size),
                noise_scale=group_size / ratio if ratio is not None and ratio > 0 else None,
                worth=one.worth,
                worth_p=worth_p[place - 2] if place > 1 else None,
                to_plain=one.to_plain,
                to_policy_gradient=one.to_policy_gradient,
                bias_p=bias_p[place - 2] if place > 1 else None,
                halves=one.halves,
                by_position=parts[place][0],
                by_sign=parts[place][1],
                by_length=parts[place][2],
            )
        )
    if unseen := [one.name for one in qualities if one.ratio.low is None or one.ratio.low <= 0]:
        note(
            f"{', '.join(unseen)}: the signal cannot be distinguished from 0 with {number} prompts, so ratios to "
            f"it are rough or missing. More prompts help."
        )
    return GradientQuality(
        source=str(completions),
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        notes=tuple(notes),
        groups=len(items),
        prompts=number,
        completions=compared.completions,
        tokens=compared.tokens,
        parameters=sketch.parameters,
        dimensions=sketch.dimensions,
        sketch_error=0.0 if sketch.exact else (2 / sketch.dimensions) ** 0.5,
        backward_passes=groups.backward_passes,
        batch_size=round(per_batch),
        selections=tuple(qualities),
        gradients=by_name,
    )


# ------------------------------------------------------------------------------------- from batches to group gradients


@dataclass(frozen=True)
class _Item:
    """One group of one batch; its `n` tokens one completion after the other.

    The coefficients are weight times advantage under each selection, times the batch's groups, so that the mean over
    groups is the gradient of a batch.
    """

    group: Group
    coefficients_S_n: torch.Tensor
    advantages_S_n: torch.Tensor
    lengths_G: torch.Tensor
    saved_n: torch.Tensor | None
    live_n: torch.Tensor


def _items(compared: Comparison, selections: Sequence[str], tokenize: Tokenize, tokenizer: Any) -> list[_Item]:
    items = []
    prompts: dict[str, list[int]] = {}
    for number, batch in enumerate(compared.batches):
        tokens: Tokens = tokenize(batch)
        results = [compared.results[name][number] for name in selections]
        weighted = [one.weights_B_T.double() * one.advantages_B_T.double() for one in results]
        size, count = batch.num_generations, len(batch.texts)
        saved = (batch.tokens or {}).get("prompt_ids")
        for first in range(0, count, size):
            members = slice(first, first + size)
            if saved is not None and saved[first] is not None:
                prompt = [int(token) for token in saved[first]]
            else:
                key = repr(batch.prompts[first])
                if key not in prompts:
                    prompts[key] = prompt_tokens(batch.prompts[first], tokenizer)
                prompt = prompts[key]
            if not prompt:
                raise ConfigurationError(f"{batch.where}: the prompt of row {first} has no token to continue.")
            token_G_T = tokens.completion_mask_B_T[members] > 0
            items.append(
                _Item(
                    group=Group(prompt, [[int(token) for token in row] for row in tokens.id_rows[members]]),
                    coefficients_S_n=torch.stack([one[members][token_G_T] for one in weighted]) * (count // size),
                    advantages_S_n=torch.stack([one.advantages_B_T[members][token_G_T] for one in results]),
                    lengths_G=tokens.mask_B_T[members].sum(dim=1),
                    saved_n=None if tokens.logps_B_T is None else tokens.logps_B_T[members][token_G_T],
                    live_n=tokens.mask_B_T[members][token_G_T] > 0,
                )
            )
    return items


def _gradients(groups: Groups, items: Sequence[_Item], progress: Progress) -> tuple[torch.Tensor, list[str]]:
    """Every group's gradient under every selection, `(S, M, k)`, and notes on the policy."""
    found, apart, counted = [], 0.0, 0
    for item in progress(items, len(items), "Gradients"):
        sketches_S_k, logps_n = groups.gradients(item.group, item.coefficients_S_n)
        found.append(sketches_S_k)
        if logps_n is not None and item.saved_n is not None:
            apart += float((logps_n - item.saved_n)[item.live_n].abs().sum())
            counted += int(item.live_n.sum())
    said = []
    if counted and apart / counted > _OTHER_POLICY:
        said.append(
            f"The saved log-probabilities differ from the model's by {apart / counted:.2g} nats per token: another "
            "policy, or another temperature, sampled the completions. The numbers hold for the model's own completions."
        )
    return torch.stack(found, dim=1), said


def _shares(
    groups: Groups,
    items: Sequence[_Item],
    gradients_S_M_k: torch.Tensor,
    prompts: Prompts,
    resamples: int,
    seed: int,
    progress: Progress,
) -> list[_Parts]:
    """For each selection the shares by position, by sign and by length."""
    directions = [(key_of(mean_k), mean_k) for mean_k in gradients_S_M_k.mean(dim=1)]
    quarters_N = quarters(torch.cat([item.lengths_G for item in items]).double())
    lengths = torch.split(quarters_N, [len(item.lengths_G) for item in items])
    tables: list[list[torch.Tensor]] = [[] for _ in directions]
    for item, quarters_G in progress(list(zip(items, lengths, strict=True)), len(items), "Shares by token"):
        wanted = {key: mean_k for (key, mean_k), c in zip(directions, item.coefficients_S_n, strict=True) if c.any()}
        along = dict(zip(wanted, groups.along(item.group, wanted), strict=True)) if wanted else {}
        sizes = [len(row) for row in item.group.completions]
        token_G_T = torch.arange(max(*sizes, 1)) < torch.tensor(sizes).unsqueeze(1)
        for place, (key, _) in enumerate(directions):
            if key not in along:
                tables[place].append(torch.zeros(16, dtype=torch.float64))
                continue
            parts_n = item.coefficients_S_n[place] * along[key]
            parts_G_T = torch.zeros(token_G_T.shape, dtype=torch.float64).masked_scatter(token_G_T, parts_n)
            up = float(parts_n[item.advantages_S_n[place] > 0].sum())
            by_length = [float(parts_G_T[quarters_G == quarter].sum()) for quarter in range(4)]
            tenths = by_tenth(parts_G_T, token_G_T.double()).sum(dim=0).tolist()
            row = [*tenths, up, float(parts_n.sum()) - up, *by_length]
            tables[place].append(torch.tensor(row, dtype=torch.float64))
    tenth_names = [f"{n * 10} to {n * 10 + 10} %" for n in range(TENTHS)]
    found: list[_Parts] = []
    for table in tables:
        kinds = torch.split(torch.stack(table), [10, 2, 4], dim=1)
        named = zip((tenth_names, ("above 0", "below 0"), QUARTERS), kinds, strict=True)
        position, sign, length = (
            tuple(
                Share(name=name, share=one)
                for name, one in zip(of, shares(part_N_P, prompts, resamples=resamples, seed=seed), strict=True)
            )
            for of, part_N_P in named
        )
        found.append((position, sign, length))
    return found


def _folder(completions: str | Path, keep: str | Path | None) -> Path:
    if keep is not None:
        return Path(keep)
    path = Path(completions)
    return (path.parent if path.is_file() else path) / FOLDER


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


def _scale(one: Estimate, factor: float) -> Estimate:
    values = (one.value, one.low, one.high, one.error)
    return Estimate(*(None if value is None else value * factor for value in values))
