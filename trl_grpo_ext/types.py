"""Everything a plugin author meets: the two contexts, the totals, and the four protocols, on one page.

Dimensions: `B` completions on this rank, `N` completions of the generation batch on all ranks, `G` completions of one
prompt (a group), `Q` prompts, `K` reward functions, `P` prompt tokens, `T` completion tokens (padded on the right).

All tensors are detached, live on the training device, and must not be written to; a plugin returns new ones.
Importing this module does not import torch.
"""

from __future__ import annotations

import functools
import inspect
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import PluginContractError, PluginOutputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONTRACT_VERSION",
    "NEEDS",
    "ROLES",
    "AdvantageHook",
    "Forward",
    "GroupFilter",
    "LossAggregation",
    "Reward",
    "Rollout",
    "Span",
    "SpanScore",
    "StepTotals",
    "ToolCall",
    "Totals",
    "Turn",
    "TurnScores",
    "acting_order",
    "implements",
    "role_of",
    "span_reward",
]

CONTRACT_VERSION = 2
"""Raised when a field of `Rollout`, `Forward` or `Totals` changes its meaning, or when something more is asked of a
plugin; adding a field does not raise it. Version 2: advantage hooks with `on_rollout` say their `role`, rewards are
those after the shapers, and `Forward.zero_variance_B` asks the advantages."""


Span = tuple[int, int, float]
"""`(start, end, value)`: the characters `text[start:end]` of a completion, and what they are worth."""

TurnSpan = tuple[int, int, int | None, float]
"""`(turn, start, end, value)`: the characters `content[start:end]` of the completion's `turn`-th assistant message,
counted from 0. An `end` of None is the whole turn, its tool calls and special tokens among it, whatever `start` is."""

NEEDS = ("old_logps", "old_entropies", "ref_logps", "sampling_logps", "offsets", "entropies", "several_updates")
"""What a hook may list in its `needs`."""

ROLES: Mapping[str, str] = {
    "shaper": "on_rewards",
    "estimator": "on_rollout",
    "transform": "on_rollout",
    "forward": "on_forward",
}
"""The roles of advantage hooks, in the order in which they act, and the method that each must have."""


class SpanScore(float):
    """A completion's reward that also says which characters earned it. To plain TRL it is the number that it is.

    Args:
        value: The reward.
        spans: `(start, end, value)` each, in characters of the completion's text; of a list of messages, in characters
            of the last assistant message that has any. Or `(turn, start, end, value)`, in characters of the
            `turn`-th assistant message, counted from 0; with None for `end` it is that whole turn. The spans' values
            need not sum to the reward; what they are used for is the hook's affair (`span_credit`, `process_rewards`).
    """

    spans: tuple[Span | TurnSpan, ...]

    def __new__(cls, value: float, spans: Sequence[Span | TurnSpan] = ()) -> SpanScore:
        """Make the number, and keep the spans beside it."""
        score = super().__new__(cls, value)
        score.spans = tuple(_checked_span(*span) for span in spans)
        return score

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the spans."""
        return SpanScore, (float(self), self.spans)


def _checked_span(*span: Any) -> Span | TurnSpan:
    *turn, start, end, value = span
    if turn:
        (number,) = turn
        return int(number), int(start), None if end is None else int(end), float(value)
    return int(start), int(end), float(value)


class TurnScores(SpanScore):
    """A completion's reward that has a value for each of its turns. To plain TRL it is the number that it is.

    Args:
        turns: The values, that of the first assistant message first. Turns after the last of them have 0.
        value: The reward; by default the sum of the values.
    """

    def __new__(cls, turns: Sequence[float], value: float | None = None) -> TurnScores:
        """Make the number, and keep the values beside it, as spans that are whole turns."""
        spans: list[TurnSpan] = [(number, 0, None, worth) for number, worth in enumerate(turns)]
        score = super().__new__(cls, math.fsum(turns) if value is None else value, spans)
        assert isinstance(score, TurnScores)
        return score

    @property
    def turns(self) -> tuple[float, ...]:
        """The values."""
        return tuple(span[-1] for span in self.spans)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of a turn.

    Attributes:
        name: Of the tool; empty where it cannot be read.
        arguments: As they were parsed; None where they cannot be.
        outcome: "returned", "raised" (the tool raised, or there is none of that name), "unparsed" (what the model wrote
            is no call that can be read), "not_run" (the completion ended before, or another call of the turn could not
            be read), or "unknown" (of several calls of one asynchronous tool, some raised, and which cannot be known).
        result: What came back, as text; None where nothing did or it is not known what.
        tokens: `(first, end)`, the completion's tokens that are the call, its markers among them. The whole turn where
            the tokenizer has no `response_template` to find it by.
    """

    name: str
    arguments: Any = None
    outcome: str = "returned"
    result: str | None = None
    tokens: tuple[int, int] = (0, 0)

    @property
    def failed(self) -> bool:
        """Whether it could not be parsed, or raised."""
        return self.outcome in ("unparsed", "raised")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model wrote from one answer of a tool, an environment or the user to the next.

    Attributes:
        number: Of the turn, from 0: its tokens have it in `Rollout.turns_B_T`.
        tokens: `(first, end)` in the completion; the turn has all from the first on and none from `end` on.
        text: Their text, without special tokens.
        characters: `(start, end)` of it in the completion's text.
        content: `(start, end)` of the message's content in the completion's text; None where there is no message of
            the turn, as of a rollout function, or its content has no place of its own in the text.
        calls: The tool calls that it made.
        observation: The text of what came after it, up to the next turn, as the chat template has written it, without
            special tokens; empty where nothing did.
    """

    number: int
    tokens: tuple[int, int]
    text: str
    characters: tuple[int, int]
    content: tuple[int, int] | None = None
    calls: Sequence[ToolCall] = ()
    observation: str = ""

    @property
    def failed(self) -> bool:
        """Whether one of its calls failed."""
        return any(call.failed for call in self.calls)


def span_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a reward function of one that returns spans: a completion's reward is the sum of its spans' values.

    Args:
        function: Takes what a reward function takes and returns, for each completion, a list of
            spans as `SpanScore` takes them, or None where it has nothing to say. It may be async.

    Returns:
        A reward function, async if `function` is, of `SpanScore`s, which plain TRL takes as the numbers that they are.
    """

    def scores(rows: Sequence[Sequence[Span | TurnSpan] | None]) -> list[SpanScore | None]:
        return [None if row is None else SpanScore(math.fsum(value for *_, value in row), row) for row in rows]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def reward_async(*arguments: Any, **columns: Any) -> list[SpanScore | None]:
            return scores(await function(*arguments, **columns))

        return reward_async

    @functools.wraps(function)
    def reward(*arguments: Any, **columns: Any) -> list[SpanScore | None]:
        return scores(function(*arguments, **columns))

    return reward


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over one optimizer step: its part of the generation batch, on all ranks and micro-batches.

    Attributes:
        tokens: Completion tokens that count in the loss.
        sequences: Completions; those whose mask is empty count too.
        micro_batches: Loss forwards of one rank in this step.
    """

    tokens: int
    sequences: int
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over one generation batch on all ranks: what an aggregation may divide by, however the batch is cut.

    Attributes:
        tokens: Completion tokens that count in the loss (on the loss mask), over all ranks.
        sequences: Completions over all ranks, `N`. Completions whose mask is empty count here too, as in TRL.
        prompts: Groups over all ranks, `Q = N / G`.
        max_completion_length: The generation limit, in tokens.
        processes: Number of ranks.
        micro_batches: Loss forwards that one rank cuts this generation batch into.
        optimizer_steps: Optimizer steps that one pass over this generation batch makes,
            `steps_per_generation / gradient_accumulation_steps`. A half where a step takes two generation batches.
        step: Counts of the optimizer step at hand, for `reduce`. None for `weights`, which runs before TRL shuffles the
            batch and deals its rows to the steps.
    """

    tokens: int
    sequences: int
    prompts: int
    max_completion_length: int
    processes: int = 1
    micro_batches: int = 1
    optimizer_steps: float = 1.0
    step: StepTotals | None = None


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _no_offsets(row: int) -> Sequence[tuple[int, int]]:
    raise PluginOutputError(f"This rollout has no text offsets (asked for those of row {row}).")


def _no_turns(row: int) -> Sequence[Turn]:
    raise PluginOutputError(f"This rollout has no texts of turns (asked for those of row {row}).")


def turn_numbers(wrote_B_T: torch.Tensor) -> torch.Tensor:
    """Number the runs of tokens that the model wrote, from 0 in each row; -1 elsewhere, integer.

    Args:
        wrote_B_T: Whether the model wrote a token, bool.
    """
    begins_B_T = wrote_B_T.clone()
    begins_B_T[:, 1:] &= ~wrote_B_T[:, :-1]
    return (begins_B_T.cumsum(dim=1) - 1).masked_fill(~wrote_B_T, -1)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One generation batch as this rank sees it: the context of `on_rollout` and of `weights`.

    Attributes:
        prompts: The `B` prompts as the dataset gives them (strings or lists of messages).
        completions: The `B` completions as reward functions get them (strings or lists of messages).
        columns: The dataset's other columns, each a list of `B` values.
        texts: The completions' texts, `B` strings: what a reward function sees, or, of a list of messages, the content
            of all of them, one after the other. Spans count its characters.
        prompt_ids_B_P: Prompt tokens, padded on the left.
        prompt_mask_B_P: 1.0 where there is a prompt token.
        completion_ids_B_T: Completion tokens, padded on the right.
        mask_B_T: Loss mask as a float tensor, 1.0 where a token counts (completion, not written by a tool, not cut
            away by `mask_truncated_completions`) and 0.0 elsewhere.
        completion_mask_B_T: 1.0 where there is a completion token, whoever wrote it and whether it counts or not.
        tool_mask_B_T: 1.0 where the model wrote the token and 0.0 where a tool or an environment did; None without
            tools.
        turns_B_T: The number of the turn that wrote a token, from 0, and -1 where the model did not write it, integer.
            A turn is what the model wrote between two answers of a tool or an environment; without these, the whole
            completion is turn 0.
        turns: For a row, its turns with their texts, tool calls and results. Raises where the completion's messages and
            its tokens cannot be matched.
        truncated_B: Whether a completion ended at the limit, without an end-of-sequence token.
        rewards_B_K: Each function's reward; NaN where the function returned None. Each shaper has a column of its own
            after the functions', with what it added; NaN where no function gave a value.
        reward_names: The `K` names.
        reward_weights_K: The `K` weights; 1 for shapers.
        rewards_B: Weighted sum over the columns that have a value, so the reward after the shapers; NaN where no
            function gave one. For a shaper, the reward after the shapers before it.
        raw_rewards_B: Weighted sum of the reward functions alone: `rewards_B` before any shaper.
        token_rewards_B_T: What shapers added token by token, zero off the mask; its sums over the tokens are in
            `rewards_B`. None where no shaper gave tokens their own.
        reward_spans: By name of a reward function that returned `SpanScore`s, on whichever rank, each completion's
            spans; None where the function had nothing to say, empty where it gave a plain number. Functions that return
            plain numbers only are not in here. Reading one raises where a completion's text cannot be found in its
            tokens.
        reward_turns: By name of a reward function that returned `TurnScores`, on whichever rank, each completion's
            values, one for each of its turns; None where the function gave a plain number, or None. The functions in
            here are in `reward_spans` too, their turns as spans.
        group_ids_B: Which group a row belongs to; the same number on every rank for the same group.
        group_baselines_B: Mean of `rewards_B` over the completion's group, whichever ranks its members are on; NaN
            where none of them has a reward. The mean of equal rewards is that very number.
        num_generations: `G`.
        totals: Counts over all ranks.
        old_logps_B_T: Log-probabilities under the policy that generated, where TRL has computed them, or where a hook
            has "old_logps" among its `needs`.
        old_entropies_B_T: Entropies of the next-token distributions of the policy that generated, in nats, where a hook
            has "old_entropies" among its `needs`.
        ref_logps_B_T: Log-probabilities under the reference policy, where TRL has computed them, or where a hook has
            "ref_logps" among its `needs`.
        sampling_logps_B_T: Log-probabilities that the sampler (vLLM, a rollout function) reported.
        teacher_logps_B_T: By the name in a hook's `teachers`, log-probabilities under that model.
        advantages_B_T: For an aggregation, the advantages after the rollout stage of the hooks, zero off the mask. None
            for a hook, which is handed them as its argument.
        step: Optimizer steps done so far.
        training: False in evaluation.
        tokenizer: The tokenizer of the policy.
        gather: Concatenates a tensor `(B,)` or `(B, T)` over all ranks to `(N,)` or `(N, T')`, in rank order; `T'` is
            the largest `T` of all ranks and what is added is zero. Every rank must call it equally often: the run
            stops with an error, and does not hang, where they don't.
        local_rows: Where this rank's rows stand in a gathered tensor.
        offsets: For a row, the characters `(start, end)` of `texts[row]` that each of its completion tokens wrote.
            A character whose bytes are cut over several tokens belongs to all of them; a token that wrote no character
            (a special token) has an empty range. Raises where the tokens cannot be matched with the text.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    texts: Sequence[str]
    prompt_ids_B_P: torch.Tensor
    prompt_mask_B_P: torch.Tensor
    completion_ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor
    tool_mask_B_T: torch.Tensor | None = None
    turns_B_T: torch.Tensor = None  # type: ignore[assignment]
    turns: Callable[[int], Sequence[Turn]] = _no_turns
    truncated_B: torch.Tensor
    rewards_B_K: torch.Tensor
    reward_names: Sequence[str]
    reward_weights_K: torch.Tensor
    rewards_B: torch.Tensor
    raw_rewards_B: torch.Tensor = None  # type: ignore[assignment]
    token_rewards_B_T: torch.Tensor | None = None
    reward_spans: Mapping[str, Sequence[Sequence[Span] | None]] = field(default_factory=dict)
    reward_turns: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)
    group_ids_B: torch.Tensor
    group_baselines_B: torch.Tensor
    num_generations: int
    totals: Totals
    old_logps_B_T: torch.Tensor | None = None
    old_entropies_B_T: torch.Tensor | None = None
    ref_logps_B_T: torch.Tensor | None = None
    sampling_logps_B_T: torch.Tensor | None = None
    teacher_logps_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)
    advantages_B_T: torch.Tensor | None = None
    step: int = 0
    training: bool = True
    tokenizer: Any = None
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity
    local_rows: slice = field(default_factory=lambda: slice(None))
    offsets: Callable[[int], Sequence[tuple[int, int]]] = _no_offsets

    def __post_init__(self) -> None:
        """Where nothing else is said, no shaper has acted, and the turns are those of the masks."""
        if vars(self)["raw_rewards_B"] is None:
            object.__setattr__(self, "raw_rewards_B", self.rewards_B)
        if vars(self)["turns_B_T"] is None:
            wrote_B_T = self.completion_mask_B_T > 0
            if self.tool_mask_B_T is not None:
                wrote_B_T = wrote_B_T & (self.tool_mask_B_T > 0)
            object.__setattr__(self, "turns_B_T", turn_numbers(wrote_B_T))

    @property
    def lengths_B(self) -> torch.Tensor:
        """Number of tokens that count, per completion, `(B,)`, as a float tensor."""
        return self.mask_B_T.sum(dim=1)

    def span_values(self, spans: Sequence[Sequence[Span] | None]) -> torch.Tensor:
        """Map characters to tokens: every token that wrote a character of a span gets the span's value.

        Args:
            spans: For each of the `B` completions, its spans `(start, end, value)`; None is no span. Where spans
                overlap their values add up.

        Returns:
            `(B, T)`, zero where no span is.

        Raises:
            PluginOutputError: There is not one list per completion, a span is outside its text, or its value is not
                finite.
        """
        if len(spans) != len(self.texts):
            raise PluginOutputError(f"expected spans for {len(self.texts)} completions, got {len(spans)}.")
        values_B_T = self.mask_B_T.new_zeros(self.mask_B_T.shape)
        for row, row_spans in enumerate(spans):
            if not row_spans:
                continue
            wrote = [(token, *characters) for token, characters in enumerate(self.offsets(row))]
            wrote = [(token, start, end) for token, start, end in wrote if end > start]
            starts, ends = [start for _, start, _ in wrote], [end for *_, end in wrote]
            values = [0.0] * values_B_T.size(1)  # set in one go: token by token would be slow on a GPU
            for start, end, value in row_spans:
                if not 0 <= start <= end <= len(self.texts[row]) or not math.isfinite(value):
                    raise PluginOutputError(
                        f"the span {(start, end, value)} at row {row} must lie within the completion's "
                        f"{len(self.texts[row])} characters and have a finite value."
                    )
                first, last = bisect_right(ends, start), bisect_left(starts, end)
                for token, *_ in wrote[first:last] if end > start else ():
                    values[token] += value
            values_B_T[row] = values_B_T.new_tensor(values)
        return values_B_T


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One micro-batch at its loss forward: the context of `on_forward`. All tensors are detached.

    TRL shuffles the generation batch after the rollout stage, so a row here is not that row of the `Rollout`, and the
    rows of one group may be in different micro-batches. What is known of a row from the rollout comes along.

    Attributes:
        logps_B_T: Log-probabilities under the policy being trained.
        entropies_B_T: Entropy of the policy's next-token distribution, in nats.
        old_logps_B_T: Log-probabilities under the policy that generated; `logps_B_T` itself when TRL has none, which
            means that the two policies are the same.
        ref_logps_B_T: Log-probabilities under the reference policy, where there is one.
        mask_B_T: Loss mask as a float tensor.
        completion_ids_B_T: Completion tokens, padded on the right.
        rewards_B: As in `Rollout`.
        raw_rewards_B: As in `Rollout`.
        group_baselines_B: As in `Rollout`.
        zero_variance_B: Whether the completion's group is without signal: every advantage of every completion in it was
            exactly 0 after the rollout stage of the hooks, as where all rewards of the group are equal.
        step: Optimizer steps done so far.
        training: False in evaluation.
        gather: As in `Rollout`, over this micro-batch of every rank.
    """

    logps_B_T: torch.Tensor
    entropies_B_T: torch.Tensor
    old_logps_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    ref_logps_B_T: torch.Tensor | None = None
    completion_ids_B_T: torch.Tensor
    rewards_B: torch.Tensor
    raw_rewards_B: torch.Tensor = None  # type: ignore[assignment]
    group_baselines_B: torch.Tensor
    zero_variance_B: torch.Tensor
    step: int = 0
    training: bool = True
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity

    def __post_init__(self) -> None:
        """Where nothing else is said, no shaper has acted."""
        if vars(self)["raw_rewards_B"] is None:
            object.__setattr__(self, "raw_rewards_B", self.rewards_B)


@runtime_checkable
class Reward(Protocol):
    """How good is this completion? Exactly TRL's contract, so a reward also works in plain TRL.

    Called once per generation batch with keyword arguments only: `prompts`, `completions`, `completion_ids` and every
    other dataset column, plus TRL's `trainer_state`, `log_extra` and `log_metric`; take the rest as `**kwargs`.
    Returns one number per completion, or None where this reward has nothing to say.
    """

    def __call__(self, **columns: Any) -> Sequence[float | None]:
        """Return `B` rewards."""
        ...


class AdvantageHook(Protocol):
    """Which tokens deserve the credit? An object with a `role`, a string, and the method that the role asks for.

    | `role` | method | what it does |
    | --- | --- | --- |
    | `"shaper"` | `on_rewards` | changes rewards before any baseline is taken; any number of them |
    | `"estimator"` | `on_rollout` | makes advantages out of rewards, whatever advantages come in; at most one |
    | `"transform"` | `on_rollout` | changes the advantages that come in; any number of them |
    | `"forward"` | `on_forward` | changes them at each loss forward; any number of them |

    Hooks act in this order, those of one role in the order selected. Without an estimator TRL's own advantages stand;
    with a shaper they are those that TRL makes of the shaped rewards. `role` is an attribute of the class, or of the
    object where a parameter decides it. A hook that has `on_rewards` alone is a shaper and one that has `on_forward`
    alone a forward hook, without saying so. Estimators and transforms may have `on_forward` too.

    `on_rewards` and `on_rollout` run once per generation batch, `on_forward` at each loss forward, after all of these.
    `on_rewards` returns what is added to each completion's reward, `(B,)`, or `(B, T)` to be summed over the tokens
    that count; it sees `rollout.advantages_B_T` as None. The others take and return advantages `(B, T)`; values off the
    mask are ignored. `on_rollout` may also return spans, for each completion a list of `(start, end, value)` or None:
    their values are then added to the advantages of the tokens that wrote those characters, or, of an estimator, to 0.

    Further attributes are read where a hook has them:

    - `last = True`, of a transform: it is a mask. It acts after the other transforms, and the tokens that it gives 0
      have 0 after the forward stage too. To know these it is run on advantages of 1 and of -1 as well, so it may look
      at the sign of an advantage, but not at its size. Of a forward hook: it acts after the other forward hooks.
    - `makes_signal = True`, of a forward hook: it gives groups without signal (`Forward.zero_variance_B`) advantages.
    - `signal_everywhere = True`, of a hook before the forward stage: it gives every completion an advantage, so that
      hooks with `makes_signal` are refused.
    - `masks_zero_variance = True`, of a mask: it masks the groups without signal, so that these are refused too.
    - `uses_total_reward = False`, of an estimator: it does not read `rollout.rewards_B`, so that shapers are refused.
    - `needs`: names out of `NEEDS`. The run is refused at construction where one of them cannot be had;
      log-probabilities that TRL does not compute are computed once more.
    - `teachers`: ids or paths of causal language models whose log-probabilities the hook reads from
      `rollout.teacher_logps_B_T`.
    - `per_group = True`: `on_rewards` and `on_rollout` look at each group by itself and remember nothing, so that a
      group has the same advantages whatever else is in the batch. `resample` asks for it of shapers, and of all hooks
      where its filter reads their advantages.
    - `per_completion = True`: `on_forward` looks at each completion by itself, so that compact updates may put other
      completions beside it.
    - `state_dict()` and `load_state_dict(state)`: what must survive a checkpoint, as a mapping of JSON values.
    """

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        """Return what is added to the rewards, `(B,)` or `(B, T)`."""
        ...

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor | Sequence[Any]:
        """Return the new advantages `(B, T)`, or spans to add to them."""
        ...

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)`."""
        ...


class LossAggregation(Protocol):
    """How much does each token's loss count? An object with exactly one of these two methods.

    `weights` is the common form. It runs once per generation batch and returns non-negative weights, zero off the
    mask. The batch's loss is `Σ w·l` over all ranks and micro-batches, so it does not depend on how the batch is cut.
    Where the batch feeds several optimizer steps, each step's part is multiplied to the size of the whole. With
    `per_step = True` it is not: `Σ w·l` over a step's tokens is that step's loss, as a sum without a divisor wants it.

    `reduce` is for what needs the losses themselves. It runs at each loss forward on one micro-batch and returns a
    scalar; the trainer takes the mean over the step's micro-batches and ranks. So it depends on how the batch is cut,
    unless it divides by `totals.step`, as `token_mean_step` does. An object with `needs_step_totals = True` is refused
    at construction in runs whose optimizer steps don't lie within one generation batch, where these don't exist.
    """

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return weights `(B, T)`."""
        ...

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return a scalar that keeps the graph of `loss_B_T`."""
        ...


class GroupFilter(Protocol):
    """Which groups are worth training on? An object with `keep`, for `resample`.

    It sees what was sampled in one round, and decides for each group whether it is trained on. Groups that are not
    kept make way for others, sampled from further prompts.

    Further attributes are read where a filter has them:

    - `reads_advantages = True`: it sees `rollout.advantages_B_T`, as they are after the rollout stage of the hooks; for
      others these are None. The hooks then run in each round, so every one of them must look at each group by itself
      (`per_group`).
    - `needs`: as of a hook.
    """

    def keep(self, rollout: Rollout) -> torch.Tensor | Sequence[bool | str]:
        """Say of each completion whether its group is kept: the same for all of a group, on whichever rank.

        Returns:
            `(B,)`, bool; or a list of `B` values, each True to keep, False to drop, or a few words to drop and say why:
            these are counted under `groups/dropped/<words>`.
        """
        ...


def implements(plugin: object, method: str) -> bool:
    """Whether a plugin really has a method: a stub inherited from one of the protocols above does not count."""
    try:
        found = getattr(plugin, method, None)
    except Exception:  # a property that raises is no method
        return False
    return callable(found) and getattr(found, "__module__", None) != __name__


HOOK_METHODS = tuple(dict.fromkeys(ROLES.values()))
"""What an advantage hook may define."""


def role_of(hook: Any, subject: str | None = None) -> str:
    """The role of an advantage hook: what its `role` says, or the one that its only method can have.

    Args:
        hook: An advantage hook.
        subject: What messages call it.

    Raises:
        PluginContractError: It says none and may have several, says one that there is not, or lacks the method of its
            role; or `last` is set where it means nothing. The message says what to write.
    """
    subject = subject or f"The advantage hook {getattr(hook, '__name__', type(hook).__name__)!r}"
    has = [method for method in HOOK_METHODS if implements(hook, method)]
    role = getattr(hook, "role", None)
    if role is None:
        only = {"on_rewards": "shaper", "on_forward": "forward"}
        if len(has) == 1 and has[0] in only:
            role = only[has[0]]
        else:
            raise PluginContractError(
                f"{subject} has {' and '.join(has) or 'no method of a hook'} and no role, which version 2 of the "
                'contract asks for. Write role = "estimator" in its class if it makes advantages out of the rewards '
                'and does not look at those that come in, or role = "transform" if it changes those.'
            )
    if not isinstance(role, str) or role not in ROLES:
        raise PluginContractError(f"{subject} has role = {role!r}; it must be one of {', '.join(map(repr, ROLES))}.")
    if ROLES[role] not in has:
        raise PluginContractError(
            f"{subject} has role = {role!r} and no {ROLES[role]}, which is the method of that role; it has "
            f"{' and '.join(has) or 'none of a hook'}. Define it, or change the role."
        )
    allowed = {"shaper": ("on_rewards",), "forward": ("on_forward",)}.get(role, ("on_rollout", "on_forward"))
    if others := [method for method in has if method not in allowed]:
        fits = " or ".join(repr(name) for name, method in ROLES.items() if method == others[0])
        raise PluginContractError(
            f"{subject} has role = {role!r} and {others[0]} as well, which would never run. Take it out, offer it as a "
            f"hook of its own, or make the role {fits}."
        )
    if getattr(hook, "last", False) and role not in ("transform", "forward"):
        raise PluginContractError(
            f"{subject} has last = {hook.last!r} and role = {role!r}: only transforms and forward hooks are ordered. "
            "Take `last` out."
        )
    return role


def acting_order(hook: Any) -> tuple[int, bool]:
    """Where an advantage hook acts, to sort by: by role, the `last` ones of a role after the others.

    Raises:
        PluginContractError: As `role_of`.
    """
    return list(ROLES).index(role_of(hook)), bool(getattr(hook, "last", False))
