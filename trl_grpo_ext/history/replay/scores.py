"""The rewards of a saved batch: saved ones, or those of functions, each called once for all selections."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ConfigurationError, PluginOutputError, PluginRunError, RewardError
from ...guard.calls import NOT_COLUMNS, call
from ...guard.outcomes import OUTCOME_SUFFIX
from ...guard.reward_watch import RewardWatch
from ...types import Span
from .saved import SavedBatch, text_of_message
from .selections import ReplaySelection, RewardSource
from .tokens import Tokens

"""How the columns end under which rewards log the outcome of each completion."""


@dataclass(frozen=True)
class SavedState:
    """What reward functions get as `trainer_state`: of a finished run only the step is known."""

    global_step: int


@dataclass(frozen=True)
class OneReward:
    """What one reward gave a batch.

    Attributes:
        values: `B` numbers or Nones.
        spans: Where it gave spans, those of each completion, in characters of `SavedBatch.texts`.
        outcomes: How many completions had which outcome, where the reward tells.
    """

    values: Sequence[float | None]
    spans: Sequence[Sequence[Span] | None] | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """All rewards of a batch under one selection."""

    names: Sequence[str]
    weights_K: torch.Tensor
    rewards_B_K: torch.Tensor
    spans: Mapping[str, Sequence[Sequence[Span] | None]]
    outcomes: Mapping[str, Mapping[str, int]]
    saved_sum_B: torch.Tensor | None = None
    """The weighted sum as it was saved, where the saved rewards are taken with whatever weights they had."""


class Scorer:
    """Scores batches, and remembers what a reward gave the batch at hand for the next selection that has it too.

    Args:
        joined: Whether columns were joined from a dataset, for messages.
    """

    def __init__(self, joined: bool = False) -> None:
        self._joined = joined
        self._batch: SavedBatch | None = None
        self._known: dict[str, OneReward] = {}

    def scores(self, selection: ReplaySelection, batch: SavedBatch, tokens: Tokens) -> Scores:
        """The rewards of a batch under a selection.

        Raises:
            ConfigurationError: A saved reward or a column is not there.
            RewardError, PluginOutputError, PluginRunError: A reward failed; the message names the completion.
        """
        if batch is not self._batch:
            self._batch, self._known = batch, {}
        sources = _saved_sources(selection, batch) if selection.rewards is None else selection.rewards
        found = {source.name: self._one(source, selection, batch, tokens) for source in sources}
        columns = [[math.nan if value is None else float(value) for value in one.values] for one in found.values()]
        as_saved = selection.rewards is None and selection.settings["reward_weights"] is None
        return Scores(
            names=list(found),
            weights_K=torch.tensor([source.weight for source in sources], dtype=torch.float32),
            rewards_B_K=torch.tensor(columns, dtype=torch.float32).T.contiguous(),
            spans={name: one.spans for name, one in found.items() if one.spans is not None},
            outcomes={name: one.outcomes for name, one in found.items() if one.outcomes},
            saved_sum_B=_numbers(batch.reward) if as_saved and batch.reward is not None else None,
        )

    def _one(self, source: RewardSource, selection: ReplaySelection, batch: SavedBatch, tokens: Tokens) -> OneReward:
        if source.saved is not None:
            if source.saved not in batch.rewards:
                raise ConfigurationError(
                    f"{selection.name}: {batch.where} has no saved reward {source.saved!r}; it has "
                    f"{', '.join(batch.rewards) or 'none'}."
                )
            return OneReward(batch.rewards[source.saved])
        if source.key not in self._known:
            self._known[source.key] = self._called(source, selection, batch, tokens)
        return self._known[source.key]

    def _called(self, source: RewardSource, selection: ReplaySelection, batch: SavedBatch, tokens: Tokens) -> OneReward:
        if isinstance(source.function, torch.nn.Module):
            raise ConfigurationError(
                f"{selection.name}: the reward {source.name!r} is a model, and a replay runs none."
            )
        lacking = _missing(source.function, batch)
        if lacking:
            raise ConfigurationError(
                f"{selection.name}: the reward {source.name!r} takes {lacking[0]!r}. {self._advice(batch)}"
            )
        outcomes: Counter[str] = Counter()

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if column.endswith(OUTCOME_SUFFIX):
                outcomes.update(str(value) for value in values)

        watch = RewardWatch()
        try:
            returned = call(
                watch.around(source.function, source.name),
                {
                    **{name: list(values) for name, values in batch.columns.items()},
                    "prompts": list(batch.prompts),
                    "completions": list(batch.completions),
                    "completion_ids": [list(row) for row in tokens.id_rows],
                    "trainer_state": SavedState(batch.step),
                    "log_extra": log_extra,
                    "log_metric": _nothing,
                },
            )
        except (PluginOutputError, PluginRunError) as error:
            raise type(error)(f"{selection.name}, {batch.where}: {error}") from error
        except RewardError as error:
            advice = f" {self._advice(batch)}" if "column" in str(error) else ""
            raise RewardError(f"{selection.name}, {batch.where}: {error}{advice}") from error
        spans = watch.spans.get(source.name)
        return OneReward(returned, None if spans is None else _placed(spans, batch), dict(outcomes))

    def _advice(self, batch: SavedBatch) -> str:
        has = f"The columns there are: {', '.join(sorted(batch.columns)) or 'none'}"
        if self._joined:
            return f"{has}, those of --dataset among them."
        return (
            f"{has}; files of completions have few. Name the training data with --dataset FILE, and they are joined by "
            "the prompt. Or write saved:NAME for a reward whose values were saved."
        )


def _saved_sources(selection: ReplaySelection, batch: SavedBatch) -> list[RewardSource]:
    names = batch.reward_names
    if not names:
        raise ConfigurationError(
            f"{selection.name} lists no rewards, and {batch.where} has none either. Add `rewards:` to the selection."
        )
    weights = selection.settings["reward_weights"]
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names):
        raise ConfigurationError(
            f"{selection.name}: {len(weights)} reward_weights for the {len(names)} saved rewards {', '.join(names)}."
        )
    return [RewardSource(name, float(weight), saved=name) for name, weight in zip(names, weights, strict=True)]


def _missing(function: Any, batch: SavedBatch) -> list[str]:
    """Parameters without a default that are no column."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code has none
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return [name for name in required if name not in NOT_COLUMNS - {"environments"} and name not in batch.columns]


def _placed(spans: Sequence[Sequence[Span] | None], batch: SavedBatch) -> list[Sequence[Span] | None]:
    """Spans count characters of the last assistant message with text; make them count those of the whole text."""
    placed: list[Sequence[Span] | None] = []
    for row, completion in zip(spans, batch.completions, strict=True):
        shift = 0 if isinstance(completion, str) or not row else _start_of_last(completion)
        placed.append(row and [(start + shift, end + shift, value) for start, end, value in row])
    return placed


def _start_of_last(messages: Sequence[Any]) -> int:
    start = place = 0
    for message in messages:
        text = text_of_message(message)
        if text.strip() and message.get("role", "assistant") == "assistant":
            start = place
        place += len(text)
    return start


def _numbers(values: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)


def _nothing(name: str, value: float) -> None:
    """A metric of a batch, which a comparison over all of them has no use for."""
