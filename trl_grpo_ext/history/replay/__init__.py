"""Two selections of plugins on the same saved completions, compared without any model.

    from trl_grpo_ext.history.replay import replay

    comparison = replay("outputs/run", ["a.yaml", "b.yaml"])
    comparison.pairs[0].moved      # share of the gradient mass that moves to other completions
    comparison.plain()             # everything, for JSON

The parts: `saved` and `tokens` read, `selections` loads the plugins, `running` runs them in the trainer's order, and
`comparison` has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...credit.flow import plugin_label
from ...errors import ConfigurationError
from ...types import implements
from ..files import Say
from .comparison import Comparison, Disagreement, Pair, Part, SelectionNumbers, compare
from .running import BatchResult, run_selection
from .saved import SavedBatch, join_columns, read_saved
from .selections import ReplaySelection, Selections, load_selection, named_selections, reads_log_probabilities
from .tokens import load_tokenizer

__all__ = [
    "BatchResult",
    "Comparison",
    "Disagreement",
    "Pair",
    "Part",
    "SavedBatch",
    "SelectionNumbers",
    "replay",
]


def replay(
    completions: str | Path,
    selections: Selections,
    *,
    tokenizer: str | Any = None,
    dataset: str | Path | None = None,
    right_at: float = 0.5,
    steps: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    num_generations: int | None = None,
    show: int = 5,
) -> Comparison:
    """Compare what selections of plugins do with the same saved completions.

    Args:
        completions: A run's output_dir, a folder or a file with token records, TRL's tables of completions, or JSON
            Lines with `prompt` and `completion`.
        selections: Paths of YAML files, or what such files hold; the first is the base. They may hold all of a run's
            settings; those that matter here are read. A mapping gives them names.
        tokenizer: A tokenizer, its path or hub id, for files without tokens. None splits texts into words.
        dataset: A `.jsonl` or `.parquet` file with the columns that rewards need, joined by the prompt.
        right_at: The least value of the base's first reward that counts as right.
        steps: First and last step; None means no bound.
        limit: Most completions, in whole groups.
        num_generations: Completions per prompt, for files that don't say; None is a selection's, or all in a row.
        show: How many completions to list for each pair.

    Raises:
        ConfigurationError: The files or selections cannot be read, or lack what a plugin needs.
        PluginError: A plugin does not load.
        RewardError, PluginOutputError, PluginRunError: A plugin failed; the message names it, and of a reward the
            completion.
    """
    if not selections:
        raise ConfigurationError("There is nothing to replay: give at least one selection, --with a.yaml.")
    notes: list[str] = []
    chosen = [load_selection(name, given) for name, given in named_selections(selections).items()]
    in_a_group = [num_generations, *(one.settings["num_generations"] for one in chosen)]
    loaded = load_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    batches = read_saved(
        completions,
        notes.append,
        steps=steps,
        limit=limit,
        num_generations=next(filter(None, in_a_group), None),
        with_logps=any(reads_log_probabilities(hook) for one in chosen for hook in one.hooks),
        tokenizer=loaded,
    )
    if dataset is not None:
        batches = join_columns(batches, dataset)
    tokens_are = "records" if batches[0].records is not None else "words" if loaded is None else "tokenizer"
    _explain(chosen, batches, tokens_are, notes.append)
    results: dict[str, list[BatchResult]] = {one.name: [] for one in chosen}
    for batch in batches:
        known: dict[str, Any] = {}
        for one in chosen:
            results[one.name].append(run_selection(one, batch, known, loaded))
    return compare(
        chosen,
        batches,
        results,
        right_at=right_at,
        show=show,
        source=str(completions),
        tokens_are=tokens_are,
        notes=tuple(dict.fromkeys(notes)),
    )


def _explain(chosen: Sequence[ReplaySelection], batches: Sequence[SavedBatch], tokens_are: str, note: Say) -> None:
    """Say what the numbers are based on."""
    if tokens_are == "words":
        note("The files have no tokens, so texts are split into words and punctuation. --tokenizer gives tokens.")
    if tokens_are == "records":
        note("Token records may hold only a sample of each generation batch; counts over a batch are over the sample.")
    elif any(batch.truncated is None for batch in batches):
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
            note(f"{one.name}: not replayed: {listed}.")
