"""Compare selections of plugins on the same completions, without training.

Without a model: what moves. `saved` reads the completions, `selections` loads the plugins, `running` runs
them in the trainer's order, `comparison` has the numbers. With one also signal, noise and direction: `derivatives`
makes gradients, and completions if there are none; `gradients` and `statistics` say what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...credit.flow import plugin_label
from ...errors import ConfigurationError
from ...types import implements
from ..run_files import Say
from .comparison import (
    Comparison,
    Disagreement,
    Gradients,
    Pair,
    Part,
    SelectionGradient,
    SelectionNumbers,
    what_moves,
)
from .derivatives import DIMENSIONS, NUM_GENERATIONS, ROWS, Policy, load_policy, sample
from .gradients import Progress, measured, with_references
from .running import BatchResult, run_selection
from .saved import SavedBatch, join_columns, load_tokenizer, read_saved
from .selections import LoadedSelection, Selections, load_selection, named_selections, reads_log_probabilities
from .statistics import Estimate

__all__ = [
    "BatchResult",
    "Comparison",
    "Disagreement",
    "Estimate",
    "Gradients",
    "Pair",
    "Part",
    "SavedBatch",
    "SelectionGradient",
    "SelectionNumbers",
    "compare",
    "load_policy",
]


def compare(
    completions: str | Path,
    selections: Selections,
    *,
    model: Any = None,
    sample_to: str | Path | None = None,
    tokenizer: str | Any = None,
    dataset: str | Path | None = None,
    right_at: float = 0.5,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    show: int = 5,
    temperature: float = 1.0,
    dimensions: int = DIMENSIONS,
    rows: int = ROWS,
    progress: Progress = lambda items, title: items,
) -> Comparison:
    """Compare what selections of plugins do with the same completions.

    Args:
        completions: A run's output_dir, a folder or a file with token records, TRL's tables of completions, or JSON
            Lines with `prompt` and `completion`; with `sample_to`, a `.jsonl` or `.parquet` file of prompts.
        selections: Paths of YAML files, of a whole run if you like, or what such files hold; the first is the base. A
            mapping gives them names.
        model: The policy that sampled the completions: a path or hub id of a model or an adapter, or what `load_policy`
            returned. With it the gradients are measured, also those of plain TRL and of the policy gradient with the
            rewards of the first selection.
        sample_to: A folder without completions, for new ones of the model: `num_generations` for each prompt, at most
            `limit` in all, as token records.
        tokenizer: A tokenizer, its path or hub id; None is the model's. Without both, texts are split into words.
        dataset: A `.jsonl` or `.parquet` file with the columns that rewards need, joined by the prompt; by default the
            file of prompts, if there is one.
        right_at: The least value of the base's first reward that counts as right.
        steps: First and last step; None means no bound.
        limit: Most completions, in whole groups.
        num_generations: Completions per prompt, for files that don't say; by default a selection's, or all in a row.
        show: How many completions to list for each pair.
        temperature: Of the sampling; the model's logits are divided by it.
        dimensions: Of the sketch. With no fewer than the model has trained parameters everything is exact.
        rows: Completions of a micro-batch.
        progress: Wraps a list that takes long, given its title.

    Raises:
        ConfigurationError: The files, the model or the selections cannot be read, or lack what a plugin needs.
        PluginError: A plugin does not load.
        RewardError, PluginOutputError, PluginRunError: A plugin failed; the message names it, and of a reward the
            completion.
    """
    if not selections:
        raise ConfigurationError("There is nothing to compare: give at least one selection, --with a.yaml.")
    notes: list[str] = []
    given = named_selections(selections)
    policy = None
    if model is not None:
        name = str(model) if isinstance(model, str | Path) else ""
        policy = Policy(load_policy(name) if name else model, name=name, temperature=temperature, rows=rows)
        tokenizer = policy.name if tokenizer is None else tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer))
    everything = given if policy is None else with_references(given)
    chosen = [load_selection(name, one) for name, one in everything.items()]
    asked = [one for one in chosen if one.name in given]
    in_a_group = (one.settings["num_generations"] for one in asked)
    num_generations = num_generations or next(filter(None, in_a_group), None)
    source = str(completions)
    if sample_to is not None:
        if policy is None:
            raise ConfigurationError("Sampling needs a model: give --model.")
        if without := [one.name for one in asked if one.rewards is None]:
            raise ConfigurationError(f"{without[0]} lists no rewards, and new completions have none. Add `rewards:`.")
        num_generations = num_generations or NUM_GENERATIONS
        sample(
            policy,
            tokenizer,
            completions,
            sample_to,
            num_generations=num_generations,
            longest=asked[0].settings["max_completion_length"],
            limit=limit,
            progress=progress,
        )
        dataset = completions if dataset is None else dataset
        completions = sample_to
    batches = read_saved(
        completions,
        notes.append,
        steps=steps,
        limit=limit,
        num_generations=num_generations,
        with_logps=any(reads_log_probabilities(hook) for one in chosen for hook in one.hooks),
        tokenizer=tokenizer,
    )
    if dataset is not None:
        batches = join_columns(batches, dataset)
    tokens_are = "records" if batches[0].records is not None else "words" if tokenizer is None else "tokenizer"
    if tokens_are == "records" and sample_to is None:
        notes.append("Records may hold a sample of each generation batch; counts over a batch are over the sample.")
    _explain(asked, batches, tokens_are, notes.append)
    results: dict[str, list[BatchResult]] = {one.name: [] for one in chosen}
    for batch in batches:
        known: dict[str, Any] = {}
        for one in chosen:
            results[one.name].append(run_selection(one, batch, known, tokenizer))
    gradients = None
    if policy is not None:
        gradients = measured(policy, tokenizer, batches, results, dimensions, progress, notes.append)
    return what_moves(
        asked,
        batches,
        {one.name: results[one.name] for one in asked},
        right_at=right_at,
        show=show,
        source=source,
        tokens_are=tokens_are,
        gradients=gradients,
        notes=tuple(dict.fromkeys(notes)),
    )


def _explain(chosen: Sequence[LoadedSelection], batches: Sequence[SavedBatch], tokens_are: str, note: Say) -> None:
    """Say what the numbers are based on."""
    if tokens_are == "words":
        note("The files have no tokens, so texts are split into words and punctuation. --tokenizer gives tokens.")
    if tokens_are != "records" and any(batch.truncated is None for batch in batches):
        note("The files don't say which completions were truncated: all are taken as finished by an end token.")
    if unsaid := [one.name for one in chosen if one.rewards is None]:
        names = ", ".join(batches[0].rewards) or "none"
        note(f"{', '.join(unsaid)}: no rewards are selected, so the saved ones are used: {names}.")
    for one in chosen:
        if at_forward := [plugin_label(hook) for hook in one.hooks if implements(hook, "on_forward")]:
            hooks = ", ".join(at_forward)
            note(f"{one.name}: for {hooks} the saved log-probabilities stand for the old and the current policy.")
        if one.left_out:
            listed = ", ".join(f"{key}: {value}" for key, value in one.left_out.items())
            note(f"{one.name}: left out of the comparison: {listed}.")
