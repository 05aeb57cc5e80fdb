"""Compare selections of plugins on the same completions, without training.

Without a model: what moves. `saved` reads the completions, `selections` loads the plugins, `running` runs
them in the trainer's order, `comparison` has the numbers. With one also signal, noise and direction: `derivatives`
makes gradients, `gradients` and `statistics` say what they show.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ...credit.flow import plugin_label
from ...errors import ConfigurationError
from ...types import implements
from .comparison import Comparison, Gradients, Pair, Part, SelectionGradient, SelectionNumbers, what_moves
from .derivatives import DIMENSIONS, ROWS, Policy, load_policy, load_pretrained
from .gradients import Progress, measured, with_references
from .running import BatchResult, run_selection
from .saved import SavedBatch, facts_of_run, join_columns, number_of, read_saved
from .selections import LoadedSelection, Selections, load_selection, named_selections, reads_log_probabilities
from .statistics import Estimate

__all__ = [
    "BatchResult",
    "Comparison",
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
    tokenizer: Any = None,
    dataset: str | Path | None = None,
    right_at: float = 0.5,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    temperature: float | None = None,
    dimensions: int = DIMENSIONS,
    rows: int = ROWS,
    progress: Progress = lambda items, title: items,
) -> Comparison:
    """Compare what selections of plugins do with the same completions.

    Args:
        completions: A run's output_dir with token records, one file of them, or JSON Lines of texts with `prompt`,
            `completion`, `step`, `group`, `truncated` and maybe `rewards`, a mapping.
        selections: Paths of YAML files, of a whole run if you like, or what such files hold; the first is the base. A
            mapping gives them names.
        model: The policy that sampled the completions: a path or hub id of a model or an adapter, or what `load_policy`
            returned. With it the gradients are measured, also those of plain TRL and of the policy gradient with the
            rewards of the first selection.
        tokenizer: A tokenizer, its path or hub id; None is the model's, if `model` is a name.
        dataset: A `.jsonl` or `.parquet` file with the columns that rewards need, joined by the prompt.
        right_at: The least value of the base's first reward that counts as right.
        steps: First and last step; None means no bound.
        limit: Most completions, in whole groups.
        temperature: Of the sampling; the model's logits are divided by it. None is the run's, or 1.
        dimensions: Of the sketch. With no fewer than the model has trained parameters everything is exact.
        rows: Completions of a micro-batch.
        progress: Wraps a list that takes long, given its title.

    Raises:
        ConfigurationError: The files or the selections cannot be read, or lack what a plugin needs.
        PluginError: A plugin does not load.
        RewardError, PluginOutputError, PluginRunError: A plugin failed; the message names it, and of a reward the
            completion.
    """
    if not selections:
        raise ConfigurationError("There is nothing to compare: give at least one selection, --with a.yaml.")
    notes: list[str] = []
    given = named_selections(selections)
    run = facts_of_run(Path(completions), notes.append)
    if temperature is None:
        temperature = number_of(run.settings.get("temperature")) or 1.0
    policy = None
    if model is not None:
        name = str(model) if isinstance(model, str | Path) else ""
        policy = Policy(load_policy(name) if name else model, name=name, temperature=temperature, rows=rows)
        tokenizer = policy.name if tokenizer is None else tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = load_pretrained(AutoTokenizer, str(tokenizer))
    everything = given if policy is None else with_references(given)
    chosen = [load_selection(name, one, run.settings) for name, one in everything.items()]
    asked = [one for one in chosen if one.name in given]
    batches = read_saved(
        completions,
        notes.append,
        steps=steps,
        limit=limit,
        with_logps=any(reads_log_probabilities(hook) for one in chosen for hook in one.hooks),
        tokenizer=tokenizer,
        run=run,
    )
    if dataset is not None:
        batches = join_columns(batches, dataset)
    if batches[0].prompt_ids is not None:
        notes.append("Records may hold a sample of each generation batch; counts over a batch are over the sample.")
    for one in asked:
        notes += _notes(one, batches[0])
    results: dict[str, list[BatchResult]] = {one.name: [] for one in chosen}
    for batch in batches:
        known: dict[str, Any] = {}
        for one in chosen:
            results[one.name].append(run_selection(one, batch, known, tokenizer))
    gradients = None
    if policy is not None:
        gradients = measured(policy, tokenizer, batches, results, dimensions, progress, notes.append)
    return what_moves(
        batches,
        {one.name: results[one.name] for one in asked},
        right_at=right_at,
        source=str(completions),
        gradients=gradients,
        notes=tuple(notes),
    )


def _notes(one: LoadedSelection, batch: SavedBatch) -> list[str]:
    notes = []
    if one.rewards is None:
        notes.append(f"{one.name}: no rewards are selected, so the saved ones are used: {', '.join(batch.rewards)}.")
    if at_forward := [plugin_label(hook) for hook in one.hooks if implements(hook, "on_forward")]:
        hooks = ", ".join(at_forward)
        notes.append(f"{one.name}: for {hooks} the saved log-probabilities stand for the old and the current policy.")
    if one.left_out:
        listed = ", ".join(f"{key}: {value}" for key, value in one.left_out.items())
        notes.append(f"{one.name}: left out of the comparison: {listed}.")
    return notes
