"""The interface for plugin authors: what to write, what it sees, what it may declare, then what few plugins need.

| kind | an object with | it returns |
| --- | --- | --- |
| reward | `__call__(prompts, completions, completion_ids, **columns)` | a number or None for each completion |
| advantage hook | `on_rewards`, `on_rollout` or `on_forward`, by role | rewards to add `(B,)`, or advantages `(B, T)` |
| loss aggregation | `weights(rollout)`, or `reduce(loss_B_T, mask_B_T, totals)` | weights `(B, T)`, or a scalar |
| group filter | `keep(rollout)` | for each completion whether its group is kept |
| token loss | `loss(terms)` | each token's loss `(B, T)` |
| prompt sampler | `draw(count, round_number)` | row numbers of the training data |

What a run must know of a plugin beforehand stands in one object, `declares`:

    class FirstTokens:  # credit only the first tokens of a completion
        declares = HookDeclaration(role="transform")

        def on_rollout(self, advantages_B_T, rollout):
            return advantages_B_T * (torch.arange(advantages_B_T.size(1)) < 16)

Where parameters decide, `__init__` sets `self.declares`.

Dimensions: `B` completions on this rank, `N` completions of the generation batch on all ranks, `G` completions of one
prompt (a group), `Q` prompts, `K` reward functions, `P` prompt tokens, `T` completion tokens (padded on the right). All
tensors are detached, live on the training device, and must not be written to; a plugin returns new ones.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from .errors import PluginContractError, PluginOutputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONTRACT_VERSION",
    "END",
    "NEEDS",
    "ROLES",
    "WHOLE",
    "AdvantageHook",
    "AggregationDeclaration",
    "Declaration",
    "FilterDeclaration",
    "Forward",
    "GroupFilter",
    "HookDeclaration",
    "LossAggregation",
    "LossTerms",
    "Part",
    "PartTable",
    "Parts",
    "Place",
    "PromptOutcome",
    "PromptPool",
    "PromptSampler",
    "Reward",
    "RewardDeclaration",
    "Rollout",
    "SamplerDeclaration",
    "Span",
    "StepTotals",
    "TokenLoss",
    "TokenLossDeclaration",
    "ToolCall",
    "Totals",
    "Turn",
    "acting_order",
    "implements",
    "role_of",
]

CONTRACT_VERSION = 1
"""Goes up when a field of `Rollout`, `Forward` or `Totals` changes its meaning, or when plugins must do more; not when
a field is added (docs/compatibility.md)."""

# ------------------------------------------------------------------------------------------------- what a plugin does


@runtime_checkable
class Reward(Protocol):
    """How good is this completion? Exactly TRL's contract, so a reward also works in plain TRL.

    Called once per generation batch with keyword arguments only: `prompts`, `completions`, `completion_ids` and every
    other dataset column, plus TRL's `trainer_state`, `log_extra` and `log_metric`. Take the rest as `**kwargs`.

    Optional methods:

    - `start_scoring(**columns)`: begin to score a batch without waiting, for instance by sending requests. It gets the
      batch's columns, without `trainer_state` and the loggers, before any reward is called. Plain TRL does not call it.
    - `start_workers()`: start processes that the reward works in. `load_rewards` calls it once.
    """

    def __call__(self, **columns: Any) -> Sequence[float | None]:
        """Return `B` numbers; None where the reward does not apply."""


class AdvantageHook(Protocol):
    """Which tokens deserve the credit? An object that declares a role and has that role's method.

    | role | method | what it does |
    | --- | --- | --- |
    | `"shaper"` | `on_rewards` | changes rewards before any baseline is taken; any number of them |
    | `"estimator"` | `on_rollout` | makes advantages out of rewards, whatever advantages come in; at most one |
    | `"transform"` | `on_rollout` | changes the advantages that come in; any number of them |
    | `"forward"` | `on_forward` | changes them at each loss forward; any number of them |

    Hooks act in this order; hooks of one role act in the order selected. Without an estimator, TRL's own advantages
    stand, made from the shaped rewards if there is a shaper. A hook with only `on_rewards` is a shaper and one with
    only `on_forward` a forward hook; these need not declare it. Estimators and transforms may have `on_forward` too.

    `state_dict()` and `load_state_dict(state)`, if it has them, are what must survive a checkpoint, as a mapping of
    JSON values. `metrics`, if it has it, are numbers on its last batch by name, the same on all ranks; they are logged
    as `advantage/<hook>/<name>`.
    """

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        """Return what is added to the rewards, `(B,)`, or `(B, T)`, summed over the tokens that count.

        Runs once per generation batch, with `rollout.advantages_B_T` None.
        """

    def on_rollout(self, advantages_B_T: torch.Tensor, rollout: Rollout) -> torch.Tensor | Sequence[Any]:
        """Return the new advantages `(B, T)`, whose values off the mask are ignored, or spans; once per batch.

        Spans are for each completion a list of `(start, end, value)`, or None. Their values are added to the incoming
        advantages of the tokens that wrote those characters (an estimator starts from 0).
        """

    def on_forward(self, advantages_B_T: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return the new advantages `(B, T)` at a loss forward; values off the mask are ignored."""


class LossAggregation(Protocol):
    """How much does each token's loss count? An object with exactly one of these two methods."""

    def weights(self, rollout: Rollout) -> torch.Tensor:
        """Return non-negative weights `(B, T)`, zero off the mask; once per generation batch. The common form.

        The batch's loss is `Σ w·l` over all ranks and micro-batches, so it does not depend on how the batch is cut. If
        the batch feeds several optimizer steps, each step's part is scaled up to the size of the whole, unless it
        declares `per_step`: then `Σ w·l` over a step's tokens is that step's loss, as for a sum without a divisor.
        """

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return a scalar of one micro-batch that keeps the graph of `loss_B_T`; for what needs the losses themselves.

        The trainer takes the mean over the step's micro-batches and ranks, so this depends on how the batch is cut,
        unless it divides by `totals.step`, as `token_mean_step` does. `totals.step` exists only if each optimizer step
        lies within one generation batch; other runs refuse an object that needs "step_totals" at construction.
        """


class GroupFilter(Protocol):
    """Which groups are worth training on? For `resample`, which samples further prompts in place of dropped groups."""

    def keep(self, rollout: Rollout) -> torch.Tensor | Sequence[bool | str]:
        """Decide for each completion of one round whether to keep its group: `(B,)`, bool, or a list of `B` values.

        True keeps a group, False drops it, and a few words drop it and say why (`groups/dropped/<words>`).
        """


class TokenLoss(Protocol):
    """What else does each token pay? An object with `loss`, added to TRL's policy loss or put in its place.

    Its values go through the run's aggregation with the other terms of the loss; without one they take TRL's own
    weights. Optional methods:

    - `on_rollout(rollout)` runs once per generation batch with the view of all ranks, after the hooks, and returns
      `{name: (B, T)}`: values that travel with the rows to `terms.carried_B_T`.
    - `measures(terms)` returns `{name: (B, T)}`: values whose mean over the tokens that count is logged as
      `token_loss/<token loss>/<name>`.
    """

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`, computed from `terms.logps_B_T`; values off the mask are ignored."""


class PromptSampler(Protocol):
    """Which prompts next? It runs on rank 0 alone; what it draws goes to all ranks.

    Random choices come from the pool's seed and the round, so that no state of a generator has to be saved.
    `metrics()`, if it has it, returns numbers by name, logged as `prompts/<name>` once per generation batch.
    """

    def start(self, pool: PromptPool) -> None:
        """Take the prompts, once at the beginning of a training."""

    def draw(self, count: int, round_number: int) -> Sequence[int] | None:
        """Return `count` different row numbers of a pool that has at least so many; None ends the training.

        `round_number` counts the draws of the run from 0, also over a resumption.
        """

    def observe(self, outcomes: Sequence[PromptOutcome]) -> None:
        """Learn what came of the prompts of the last draw."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what must survive a checkpoint, as a mapping of JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; `start` has been called."""


# ------------------------------------------------------------------------------------------------- what a plugin sees


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _no_offsets(row: int) -> Sequence[tuple[int, int]]:
    raise PluginOutputError(f"This rollout has no text offsets (asked for those of row {row}).")


def _no_turns(row: int) -> Sequence[Turn]:
    raise PluginOutputError(f"This rollout has no texts of turns (asked for those of row {row}).")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One generation batch as this rank sees it: the context of `on_rollout` and of `weights`."""

    prompts: Sequence[Any]  # the `B` prompts as the dataset gives them (strings or lists of messages)
    completions: Sequence[Any]  # the `B` completions as reward functions get them (strings or lists of messages)
    # the dataset's other columns, each a list of `B` values
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # each prompt's row in the training data; None where TRL's own loader dealt the prompts
    row_numbers: Sequence[int] | None = None
    # The completions as `B` strings, of messages their contents joined. Spans count its characters.
    texts: Sequence[str]
    prompt_ids_B_P: torch.Tensor  # prompt tokens, padded on the left
    prompt_mask_B_P: torch.Tensor  # 1.0 where there is a prompt token
    completion_ids_B_T: torch.Tensor  # completion tokens, padded on the right
    # loss mask as a float tensor: 1.0 where a token counts (part of the completion, not written by a tool, not
    # removed by `mask_truncated_completions`), else 0.0
    mask_B_T: torch.Tensor
    completion_mask_B_T: torch.Tensor  # 1.0 at every completion token, whoever wrote it, in the loss or not
    # 0.0 where a tool or an environment wrote the token, else 1.0; None without tools
    tool_mask_B_T: torch.Tensor | None = None
    # The number of a token's turn, from 0; -1 where the model did not write the token. Integer. Answers of a tool or
    # an environment separate turns; without them the whole completion is turn 0.
    turns_B_T: torch.Tensor = None  # type: ignore[assignment]
    # Returns a row's turns. Raises if the completion's messages cannot be matched with its tokens.
    turns: Callable[[int], Sequence[Turn]] = _no_turns
    truncated_B: torch.Tensor  # whether a completion ended at the limit, without an end-of-sequence token
    # Each function's reward; NaN where the function returned None. After them, a column per shaper with what it
    # added; NaN where no function gave a value.
    rewards_B_K: torch.Tensor
    reward_names: Sequence[str]  # the `K` names
    reward_weights_K: torch.Tensor  # the `K` weights; 1 for shapers
    # The reward after the shapers: the weighted sum over the columns that have a value; NaN where no function gave
    # one. A shaper sees the reward after the shapers before it.
    rewards_B: torch.Tensor
    # `rewards_B` before any shaper: the weighted sum of the reward functions alone
    raw_rewards_B: torch.Tensor = None  # type: ignore[assignment]
    # what shapers added to each token, zero off the mask, part of `rewards_B`; None if none did
    token_rewards_B_T: torch.Tensor | None = None
    # The completions' parts, by the reward function that returned `Parts` on any rank. A completion for which it
    # returned a plain number or None has none.
    parts: Mapping[str, PartTable] = field(default_factory=dict)
    group_ids_B: torch.Tensor  # which group a row belongs to; the same number on every rank for the same group
    # Mean of `rewards_B` over the completion's group, across ranks; NaN where no member has a reward. The mean of
    # equal rewards is exactly that number.
    group_baselines_B: torch.Tensor
    # Whether each function's rewards in the completion's group are equal before any shaper, so that it has no signal.
    # None for hooks, and if a hook `makes_signal` before the forward stage.
    uninformative_B: torch.Tensor | None = None
    num_generations: int  # `G`
    totals: Totals  # counts over all ranks
    # log-probabilities under the policy that generated; None unless TRL computes them or a hook needs "old_logps"
    old_logps_B_T: torch.Tensor | None = None
    # entropies of that policy's next-token distributions, in nats; None unless a hook needs them
    old_entropies_B_T: torch.Tensor | None = None
    # log-probabilities under the reference policy; None unless TRL computes them or a hook needs them
    ref_logps_B_T: torch.Tensor | None = None
    # log-probabilities reported by the sampler (vLLM, a rollout function)
    sampling_logps_B_T: torch.Tensor | None = None
    # log-probabilities under each of the hooks' `teachers`, by its name there
    teacher_logps_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # The advantages after the rollout stage of the hooks, zero off the mask. None for a hook, which gets them as its
    # argument.
    advantages_B_T: torch.Tensor | None = None
    step: int = 0  # optimizer steps done so far
    training: bool = True  # False in evaluation
    tokenizer: Any = None  # the tokenizer of the policy
    # Concatenates a tensor `(B,)` or `(B, T)` over all ranks to `(N,)` or `(N, T')`, in rank order, padded with zeros
    # to the largest `T`, `T'`. Every rank must call it equally often; otherwise the run stops.
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity
    local_rows: slice = field(default_factory=lambda: slice(None))  # this rank's rows in a gathered tensor
    # Returns, for a row, the characters `(start, end)` of `texts[row]` that each completion token wrote: none for a
    # special token, and a character split over several tokens for all of them. Raises if the tokens cannot be matched
    # with the text.
    offsets: Callable[[int], Sequence[tuple[int, int]]] = _no_offsets

    def __post_init__(self) -> None:
        """By default no shaper has acted, and the masks determine the turns."""
        if vars(self)["raw_rewards_B"] is None:
            object.__setattr__(self, "raw_rewards_B", self.rewards_B)
        if vars(self)["turns_B_T"] is None:
            by_model_B_T = self.completion_mask_B_T > 0
            if self.tool_mask_B_T is not None:
                by_model_B_T = by_model_B_T & (self.tool_mask_B_T > 0)
            object.__setattr__(self, "turns_B_T", turn_numbers(by_model_B_T))

    @property
    def lengths_B(self) -> torch.Tensor:
        """Number of tokens in the loss per completion, `(B,)`, as a float tensor."""
        return self.mask_B_T.sum(dim=1)

    def span_values(self, spans: Sequence[Sequence[Span] | None]) -> torch.Tensor:
        """Map characters to tokens, `(B, T)`: every token that wrote a character of a span gets the span's value.

        `spans` has for each of the `B` completions its spans `(start, end, value)`, or None. Values of overlapping
        spans add up. A span outside its text, or a value that is not finite, is a `PluginOutputError`.
        """
        if len(spans) != len(self.texts):
            raise PluginOutputError(f"expected spans for {len(self.texts)} completions, got {len(spans)}.")
        values_B_T = self.mask_B_T.new_zeros(self.mask_B_T.shape)
        for row, row_spans in enumerate(spans):
            if not row_spans:
                continue
            size = len(self.texts[row])
            written = WrittenTokens(self.offsets(row))
            values = [0.0] * values_B_T.size(1)  # set in one go: token by token would be slow on a GPU
            for start, end, value in row_spans:
                if not 0 <= start <= end <= size or not math.isfinite(value):
                    raise PluginOutputError(
                        f"the span {(start, end, value)} at row {row} must lie within the completion's {size} "
                        "characters and have a finite value."
                    )
                for token in written.of(start, end):
                    values[token] += value
            values_B_T[row] = values_B_T.new_tensor(values)
        return values_B_T


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One micro-batch at its loss forward: the context of `on_forward`. All tensors are detached.

    TRL shuffles the generation batch after the rollout stage, so row `i` here is not row `i` of the `Rollout`, and a
    group's rows may be in different micro-batches. The fields carry what is known of each row from the rollout.
    """

    logps_B_T: torch.Tensor  # log-probabilities under the policy being trained
    entropies_B_T: torch.Tensor  # entropy of the policy's next-token distribution, in nats
    # log-probabilities under the policy that generated; `logps_B_T` itself when TRL has none, because the two
    # policies are the same
    old_logps_B_T: torch.Tensor
    mask_B_T: torch.Tensor  # loss mask as a float tensor
    ref_logps_B_T: torch.Tensor | None = None  # log-probabilities under the reference policy, if there is one
    completion_ids_B_T: torch.Tensor  # completion tokens, padded on the right
    rewards_B: torch.Tensor  # as in `Rollout`
    # as in `Rollout`
    raw_rewards_B: torch.Tensor = None  # type: ignore[assignment]
    group_baselines_B: torch.Tensor  # as in `Rollout`
    # whether all scored rewards of the completion's group are equal before any shaper, and all its advantages were
    # exactly 0 after the rollout stage of the hooks
    zero_variance_B: torch.Tensor
    step: int = 0  # optimizer steps done so far
    training: bool = True  # False in evaluation
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity  # as in `Rollout`, over this micro-batch of every rank

    def __post_init__(self) -> None:
        """By default no shaper has acted."""
        if vars(self)["raw_rewards_B"] is None:
            object.__setattr__(self, "raw_rewards_B", self.rewards_B)


@dataclass(frozen=True, kw_only=True)
class PromptPool:
    """The training prompts, as a prompt sampler gets them at the beginning."""

    rows: Sequence[Mapping[str, Any]]  # the rows of the training data, by number
    seed: int  # the run's seed
    # returns the row numbers of a pass over the data, counted from 0, in the order of TRL's own sampler
    order: Callable[[int], Sequence[int]]

    def column(self, name: str) -> list[Any]:
        """A column's values by row number; None where a row lacks it."""
        names = getattr(self.rows, "column_names", None)
        if names is not None:  # a Dataset's: no other column is decoded
            return list(self.rows[name]) if name in names else [None] * len(self.rows)  # type: ignore[call-overload]
        return [row.get(name) for row in (self.rows[number] for number in range(len(self.rows)))]


@dataclass(frozen=True, kw_only=True)
class PromptOutcome:
    """What came of one prompt in one round."""

    row: int  # its number in the training data
    # mean reward of its completions, by reward function; NaN where the function gave none a value
    means: Mapping[str, float]
    deviations: Mapping[str, float]  # standard deviation of these rewards (n - 1); 0 for a single value, NaN for none
    reward: float  # mean of the weighted rewards; NaN where no function gave a value
    deviation: float  # standard deviation of the weighted rewards
    length: float  # mean number of tokens of its completions
    # what the filter of `resample` said of it: True, False or a reason; None without a filter
    verdict: bool | str | None = None


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """One micro-batch at its loss forward: the context of a token loss. All tensors but `logps_B_T` are detached.

    Rows are shuffled, as in `Forward`. Off the mask every number `(B, T)` is 0, and no gradient arrives there.
    """

    logps_B_T: torch.Tensor  # log-probabilities under the policy being trained, with their graph
    # those under the policy that generated; the same numbers where the two policies are the same
    old_logps_B_T: torch.Tensor
    advantages_B_T: torch.Tensor  # the advantages that are trained on, after all hooks
    mask_B_T: torch.Tensor  # loss mask as a float tensor
    entropies_B_T: torch.Tensor  # entropy of the policy's next-token distribution, in nats
    ref_logps_B_T: torch.Tensor | None = None  # log-probabilities under the reference policy, if there is one
    # those reported by the sampler (vLLM, a rollout function), if it reports any
    sampling_logps_B_T: torch.Tensor | None = None
    completion_ids_B_T: torch.Tensor  # completion tokens, padded on the right
    rewards_B: torch.Tensor  # as in `Rollout`
    # what the token loss's own `on_rollout` returned, for the rows of this micro-batch
    carried_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0  # optimizer steps done so far
    training: bool = True  # False in evaluation

    @property
    def ratio_B_T(self) -> torch.Tensor:
        """The importance ratio of each token, π/π_old, with its graph; 1 off the mask."""
        return (self.logps_B_T - self.old_logps_B_T).exp()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over one generation batch on all ranks: denominators that do not depend on how the batch is cut."""

    tokens: int  # completion tokens that count in the loss (on the loss mask), over all ranks
    sequences: int  # completions over all ranks, `N`, including those with an empty mask, as in TRL
    prompts: int  # groups over all ranks, `Q = N / G`
    max_completion_length: int  # the generation limit, in tokens
    processes: int = 1  # number of ranks
    micro_batches: int = 1  # loss forwards of one rank in this generation batch
    # optimizer steps in one pass over this generation batch; one half if a step spans two batches
    optimizer_steps: float = 1.0
    # Counts of the current optimizer step, for `reduce`. None for `weights`, which runs before TRL shuffles the batch
    # and distributes its rows over the steps.
    step: StepTotals | None = None


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over one optimizer step: its part of the generation batch, over all ranks and micro-batches."""

    tokens: int  # completion tokens that count in the loss
    sequences: int  # completions, including those with an empty mask
    micro_batches: int = 1  # loss forwards of one rank in this step


# ------------------------------------------------------------------------------------------- what a plugin may declare


NEEDS = ("old_logps", "old_entropies", "ref_logps", "sampling_logps", "offsets", "entropies", "several_updates")
"""What a hook may list in its `needs`."""

ROLES: Mapping[str, str] = {
    "shaper": "on_rewards",
    "estimator": "on_rollout",
    "transform": "on_rollout",
    "forward": "on_forward",
}
"""The roles of advantage hooks, in the order in which they act, and the method that each requires."""

HOOK_METHODS = tuple(dict.fromkeys(ROLES.values()))
"""What an advantage hook may define."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a plugin of any kind may declare: `declares`, an attribute of its class or of the object.

    A name that it does not have, or a value that it does not take, is a `PluginContractError`.
    """

    NEEDS: ClassVar[Sequence[str]] = ()
    KNOWN: ClassVar[Mapping[str, Collection[str]]] = {}
    """The names that other fields take."""
    GUESSES: ClassVar[Mapping[str, str]] = {}
    """Further names that authors may take for a declaration, and what to write instead."""

    needs: tuple[str, ...] = ()  # what the run must provide, by the names in `NEEDS` of the declaration's class
    # the constructor's parameters that select other plugins of this kind; the plugin gets these loaded
    takes: tuple[str, ...] = ()
    deterministic: bool = True  # False if it draws random numbers on purpose
    # what the conformance kit is to try it with (docs/writing_plugins.md)
    conformance: Mapping[str, Any] = field(default_factory=dict)
    contract_version: int | None = None  # the `CONTRACT_VERSION` that it was written for; None fits any

    def __new__(cls, **given: Any) -> Self:
        """Refuse names that it does not have."""
        names = [one.name for one in fields(cls)]
        for name in given:
            if name not in names:
                _check_version(given.get("contract_version"))
                hint = cls.GUESSES.get(name) or _near(name, names) or f"it has {', '.join(names)}"
                raise PluginContractError(f"{cls.__name__} has no {name!r}: {hint}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse a value that is not of its field's type, or not one of the known names."""
        for one in fields(self):
            value = vars(self)[one.name]
            what, fits = _TYPES[str(one.type)]
            if not fits(value):
                raise PluginContractError(f"{type(self).__name__}: {one.name} must be {what}, got {value!r:.200}.")
            if isinstance(value, list):
                object.__setattr__(self, one.name, tuple(value))
        for attribute, known in {"needs": self.NEEDS, **self.KNOWN}.items():
            given = vars(self)[attribute] or ()
            for name in (given,) if isinstance(given, str) else given:
                if name not in known:
                    hint = _near(name, known) or f"it may be {', '.join(map(repr, known)) or 'nothing'}"
                    raise PluginContractError(f"{type(self).__name__}: {attribute} has no {name!r}: {hint}.")

    @classmethod
    def of(cls, plugin: object) -> Self:
        """What a plugin, or its class, declares; the defaults if it declares nothing, or its parameters decide.

        A declaration of another class, or for a newer contract, is a `PluginContractError`.
        """
        found = getattr(plugin, "declares", None)
        if found is None or (isinstance(plugin, type) and isinstance(found, property)):
            return cls()
        if not isinstance(found, cls):
            name = plugin.__qualname__ if isinstance(plugin, type) else type(plugin).__qualname__
            raise PluginContractError(f"`declares` of {name} is {found!r:.200}; write declares = {cls.__name__}(...).")
        _check_version(found.contract_version)
        return found

    def shown(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = type(self)()
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}


@dataclass(frozen=True, kw_only=True)
class RewardDeclaration(Declaration):
    """What a reward may declare."""

    # the column with the right answers, for `trl-grpo-ext audit` and the conformance kit
    reference_column: str | None = None
    per_completion: bool = True  # False if it compares completions on purpose


@dataclass(frozen=True, kw_only=True)
class HookDeclaration(Declaration):
    """What an advantage hook may declare; most need a role alone.

    Without one of the `needs` the trainer is not constructed; log-probabilities that TRL does not compute cost a pass.
    """

    NEEDS = NEEDS
    KNOWN: ClassVar[Mapping[str, Collection[str]]] = {"role": ROLES}
    GUESSES = dict.fromkeys(("per_group", "per_completion"), "write independent = True")

    # "shaper", "estimator", "transform" or "forward", see `AdvantageHook`. Required with `on_rollout`, since an
    # estimator and a transform look alike; otherwise it follows from the method.
    role: str | None = None
    # A promise, which the conformance kit tries: a group's rewards or advantages do not depend on other groups, and no
    # state is kept; in `on_forward`, a completion's do not depend on other completions. `resample` requires it of
    # shapers, and of all hooks if its filter reads advantages; compact updates then move rows.
    independent: bool = False
    # Makes a transform a mask. It acts after the other transforms, and tokens that it sets to 0 stay 0 after the
    # forward stage. To find them it also runs on advantages of 1 and of -1, so it may look at the sign of an
    # advantage but not at its size. A forward hook with it acts after the other forward hooks.
    last: bool = False
    # What it gives groups of equal rewards is meant, since it reads more than rewards (steps, turns, a teacher,
    # entropies), and no side effect, such as a KL penalty's. Such groups then have signal where they have an
    # advantage. A forward hook gets them as `Forward.zero_variance_B`.
    makes_signal: bool = False
    uses_total_reward: bool = True  # False for an estimator that does not read `rollout.rewards_B`: shapers are refused
    # names of models whose log-probabilities it reads from `rollout.teacher_logps_B_T`: an id or path, or
    # `teacher_name(model, column)`, the same, "policy" or "reference" after the prompts of another column
    teachers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AggregationDeclaration(Declaration):
    """What a loss aggregation may declare; it needs "step_totals" if `reduce` cannot do without `totals.step`."""

    NEEDS = ("step_totals",)

    per_step: bool = False  # `Σ w·l` over an optimizer step's tokens is that step's loss as it stands


@dataclass(frozen=True, kw_only=True)
class FilterDeclaration(Declaration):
    """What a group filter may declare.

    It needs "advantages" if it reads `rollout.advantages_B_T`, those after the rollout stage of the hooks, which then
    have to run in each round, all of them independent. Others see None there.
    """

    NEEDS = (*NEEDS, "advantages")

    teachers: tuple[str, ...] = ()  # as for a hook


@dataclass(frozen=True, kw_only=True)
class TokenLossDeclaration(Declaration):
    """What a token loss may declare. What is not declared holds for any loss, and costs speed alone."""

    NEEDS = ("old_logps", "ref_logps", "sampling_logps", "several_updates")
    GUESSES: ClassVar[Mapping[str, str]] = {"mode": "write replaces=True for a loss in place of TRL's"}
    INSIDE_TRLS: ClassVar[Sequence[str]] = (
        "importance_sampling_level",
        "top_entropy_quantile",
        "off_policy_mask_threshold",
        "delta",
        "vllm_importance_sampling_correction",
    )
    """Settings that TRL applies inside its policy loss, and which go with it."""
    KNOWN: ClassVar[Mapping[str, Collection[str]]] = {"does_own": INSIDE_TRLS}

    replaces: bool = False  # it takes the place of TRL's policy loss; otherwise it is added. At most one may.
    # A row's losses depend on that row alone, so compact updates may put other rows next to it
    independent: bool = False
    # They are 0, with their gradient, in rows whose advantages are all 0, so compact updates may leave these out.
    # Both promises are tried on made-up numbers before the first step.
    needs_advantage: bool = False
    # for one that replaces: settings of TRL which it applies itself (`terms` has what is needed), so that they need
    # not be refused beside it: of `INSIDE_TRLS`
    does_own: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SamplerDeclaration(Declaration):
    """What a prompt sampler may declare: what every plugin may."""


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(name, str) and name for name in value)


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("a tuple of names", _is_names),
    "str | None": ("a name", lambda value: value is None or (isinstance(value, str) and bool(value))),
    "int | None": (
        "a whole number from 1 up",
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
    ),
    "Mapping[str, Any]": ("a mapping", lambda value: isinstance(value, Mapping)),
}
"""By the annotation of a declaration's field: what it takes, in words, and whether a value fits."""


def _check_version(version: object) -> None:
    if isinstance(version, int) and version > CONTRACT_VERSION:
        raise PluginContractError(
            f"It was written for version {version} of the plugin contract, and this trl-grpo-ext has version "
            f"{CONTRACT_VERSION}: upgrade trl-grpo-ext, or install a version of the plugin for that."
        )


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}" if close else ""


# ------------------------------------------------------------------------ what few plugins need: spans, turns, teachers


Span = tuple[int, int, float]
"""`(start, end, value)`: the value of the characters `text[start:end]` of a completion, for hooks that return spans."""


class Place(NamedTuple):
    """Where a completion says something; the tokens that wrote it get the credit.

    | place | what it is |
    | --- | --- |
    | `Place(start, end)` | characters of the completion's text (of messages: of the last one with content) |
    | `Place(start, end, turn)` | characters of the content of the `turn`-th assistant message, counted from 0 |
    | `Place(turn=k)` | a whole turn, with its tool calls and special tokens |
    | `Place(turn=k, call=n)` | the `n`-th tool call of that turn |
    | `END` | the last token: the one that ends the sequence, or the last before the limit |
    | `WHOLE` | all of the completion |
    """

    start: int | None = 0
    end: int | None = None
    turn: int | None = None
    call: int | None = None


WHOLE, END = Place(), Place(None)


class Part(NamedTuple):
    """One thing that a completion is judged by."""

    name: str  # the same for the same thing in all completions: parts of one name are compared
    score: float | None  # its score; None if it does not apply here
    weight: float = 1.0  # its weight among the parts, not negative
    # Where it stands: a `Place` or a pair `(start, end)` of characters, or several of them. Empty or None if it
    # stands nowhere, that is, the completion lacks it. In `Parts` it is a tuple of `Place`s.
    places: Any = WHOLE


class Parts(float):
    """A completion's reward, and the parts that it consists of. Plain TRL sees an ordinary float.

        found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
        return Parts({name: (float(bool(match)), match and match.span()) for name, match in found.items()})

    Args:
        parts: `Part`s; or by name a score, for what has no place of its own, or a pair `(score, places)`. A second part
            of the same name gets `_2` after its name, and so on.
        value: The reward; by default the weighted mean of the parts that have a score, NaN (which TRL reads as None)
            if none has.

    Raises:
        PluginOutputError: A score, weight or place is not one.
    """

    parts: tuple[Part, ...]

    def __new__(cls, parts: Sequence[Part] | Mapping[str, Any] = (), value: float | None = None) -> Parts:
        """Check the parts and make the number."""
        if isinstance(parts, Mapping):
            pairs = [(name, of if isinstance(of, tuple) else (of, WHOLE)) for name, of in parts.items()]
            made = [_checked_part(name, score, 1.0, places) for name, (score, places) in pairs]
        else:
            made = [_checked_part(*part) for part in parts]
            if len({part.name for part in made}) < len(made):
                made = _renamed(made)
        if value is None:
            scored = [(part.score, part.weight) for part in made if part.score is not None]
            weight = math.fsum(weight for _, weight in scored)
            value = math.fsum(score * weight for score, weight in scored) / weight if weight else math.nan
        score = super().__new__(cls, value)
        score.parts = tuple(made)
        return score

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the parts."""
        return Parts, (self.parts, float(self))


def _checked_part(name: Any, score: Any, weight: Any = 1.0, places: Any = WHOLE) -> Part:
    where = None
    try:
        number = None if score is None or score != score else float(score)
        factor = float(weight)
        if type(name) is str and name and 0 <= factor < math.inf and (number is None or abs(number) < math.inf):
            where = _checked_places(places)
    except (TypeError, ValueError, OverflowError):
        pass
    if where is None:
        raise PluginOutputError(
            "A part must have a name, a finite score or None, a weight of at least 0, and as places pairs (start, end) "
            f"of characters or `Place`s, got {(name, score, weight, places)!r:.200}.",
            "types",
        )
    return Part(name, number, factor, where)


def _checked_places(given: Any) -> tuple[Place, ...] | None:
    """The places as a tuple of `Place`s; None if one of them is none."""
    if given is None or given is WHOLE:
        return () if given is None else (WHOLE,)
    if type(given) is tuple and len(given) == 2 and type(given[0]) is type(given[1]) is int:  # most are
        start, end = given
        return (Place(start, end),) if 0 <= start <= end else None
    if isinstance(given, Place) or (len(given) == 2 and not isinstance(given[0], Sequence)):
        given = (given,)
    places = []
    for place in given:
        start, end, turn, call = place if len(place) == 4 else (*map(operator.index, place), None, None)
        if start is None:
            known = end is None and turn is None
        elif end is None:  # all of the completion, of a turn, or of a call
            known = start == 0 and (call is None or (turn is not None and call >= 0))
        else:
            known = 0 <= start <= end and call is None
        if not known or (turn is not None and turn < 0):
            return None
        places.append(place if type(place) is Place else Place(start, end, turn, call))
    return tuple(places)


def _renamed(parts: Sequence[Part]) -> list[Part]:
    """The parts under names that are all different."""
    taken, numbers = {part.name for part in parts}, dict[str, int]()
    new = []
    for part in parts:
        name = part.name
        while name in taken and part.name in numbers:
            numbers[part.name] += 1
            name = f"{part.name}_{numbers[part.name]}"
        numbers.setdefault(part.name, 1)
        taken.add(name)
        new.append(part._replace(name=name))
    return new


@dataclass(frozen=True, kw_only=True)
class PartTable:
    """The parts of one reward function in the completions of this rank; `M` names, the same on all ranks."""

    names: tuple[str, ...]  # the `M` names, in the order in which they were first seen
    scores_B_M: torch.Tensor  # their scores; NaN where a part does not apply
    weights_B_M: torch.Tensor  # their weights; 0 where a part does not apply
    present_B_M: torch.Tensor  # which have a place
    whole_B_M: torch.Tensor  # which have the whole completion as their place
    turns_B_M: torch.Tensor  # the turn that a part's place was given by (the last of several); -1 for others. Integer.
    width: int  # `T`
    # Finds the tokens of all places that are not the whole completion, `(R, 4)`, integer: row, part, first token,
    # end. Raises if a text cannot be matched with its tokens, so it is called only by who needs it.
    read_ranges: Callable[[], torch.Tensor]

    @functools.cached_property
    def ranges_R_4(self) -> torch.Tensor:
        """Where the parts stand in the completions: row, part, first token, end."""
        return self.read_ranges()

    def tokens(self, part: int) -> torch.Tensor:
        """The tokens that wrote a part, `(B, T)`, bool; none where it has no place, or the whole completion."""
        row, _, first, end = self.ranges_R_4[self.ranges_R_4[:, 1] == part].unbind(dim=1)
        edges_B_T = self.ranges_R_4.new_zeros(len(self.scores_B_M), self.width + 1)
        one = edges_B_T.new_ones(())
        edges_B_T.index_put_((row, first), one, accumulate=True)
        edges_B_T.index_put_((row, end), -one, accumulate=True)
        return edges_B_T.cumsum(dim=1)[:, : self.width] > 0

    def rows(self, rows: slice) -> PartTable:
        """The table of some of the completions."""
        first, last, _ = rows.indices(len(self.scores_B_M))

        def ranges() -> torch.Tensor:
            row_R = self.ranges_R_4[:, 0]
            found = self.ranges_R_4[(row_R >= first) & (row_R < last)].clone()
            found[:, 0] -= first
            return found

        names = ("scores_B_M", "weights_B_M", "present_B_M", "whole_B_M", "turns_B_M")
        return replace(self, read_ranges=ranges, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of a turn."""

    name: str  # the tool's name; empty if it cannot be read
    arguments: Any = None  # the parsed arguments; None if they cannot be parsed
    # "returned", "raised" (or no tool has that name), "unparsed" (it cannot be read as a call), "not_run" (another
    # call of the turn could not be read), "unanswered" (no more calls were allowed, or TRL took its result back,
    # which did not fit), or "unknown" (some of several calls of one asynchronous tool raised)
    outcome: str = "returned"
    result: str | None = None  # the tool's answer as text; None if there is none or it is not known
    # `(first, end)`, the completion's tokens that make up the call, markers included; the whole turn if the tokenizer
    # has no `response_template`
    tokens: tuple[int, int] = (0, 0)

    @property
    def failed(self) -> bool:
        """Whether it could not be parsed, or raised."""
        return self.outcome in ("unparsed", "raised")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model wrote between two answers of a tool, an environment or the user."""

    number: int  # the turn's number, from 0, as in `Rollout.turns_B_T`
    tokens: tuple[int, int]  # `(first, end)` in the completion; `end` is not part of the turn
    text: str  # their text, without special tokens
    characters: tuple[int, int]  # `(start, end)` of that text in the completion's text
    # `(start, end)` of the message's content in the completion's text; None if it cannot be located there
    content: tuple[int, int] | None = None
    calls: Sequence[ToolCall] = ()  # the turn's tool calls
    observation: str = ""  # the text between this turn and the next, without special tokens; empty if there is none

    @property
    def failed(self) -> bool:
        """Whether any of its calls failed."""
        return any(call.failed for call in self.calls)


class WrittenTokens:
    """The tokens of a completion that wrote something, in order, to be found by what they wrote."""

    def __init__(self, offsets: Sequence[tuple[int, int]]) -> None:
        self._tokens = [token for token, (start, end) in enumerate(offsets) if end > start]
        self._starts = [offsets[token][0] for token in self._tokens]
        self._ends = [offsets[token][1] for token in self._tokens]

    def of(self, start: int, end: int) -> Sequence[int]:
        """The tokens that wrote some of the characters `start` to `end`: they end after the one, and begin before the
        other."""
        return self._tokens[bisect_right(self._ends, start) : bisect_left(self._starts, end)] if end > start else ()


def turn_numbers(by_model_B_T: torch.Tensor) -> torch.Tensor:
    """Number each row's runs of tokens that the model wrote from 0; -1 elsewhere, integer."""
    begins_B_T = by_model_B_T.clone()
    begins_B_T[:, 1:] &= ~by_model_B_T[:, :-1]
    return (begins_B_T.cumsum(dim=1) - 1).masked_fill(~by_model_B_T, -1)


POLICY, REFERENCE = "policy", "reference"
"""Teachers that are no other model: the policy as it generated, and the one that TRL keeps as the reference."""
_GIVEN = " given "


def teacher_name(model: str, column: str | None = None) -> str:
    """The name in `teachers` of a model that sees the prompts of a column of the data set, or the usual ones."""
    return model if column is None else f"{model}{_GIVEN}{column}"


def split_teacher(name: str) -> tuple[str, str]:
    """The model and the column of a name that `teacher_name` made; the column is empty for the usual prompts."""
    model, _, column = name.partition(_GIVEN)
    return model, column


# ----------------------------------------------------------------------------------------- reading what a plugin says


def implements(plugin: object, method: str) -> bool:
    """Whether a plugin has a method of its own; a stub inherited from one of the protocols above does not count."""
    try:
        found = getattr(plugin, method, None)
    except Exception as error:
        raise PluginContractError(
            f"{method} of {type(plugin).__qualname__} raised {type(error).__name__}: {error}. Make it a method."
        ) from error
    return callable(found) and getattr(found, "__module__", None) != __name__


def role_of(hook: Any, subject: str | None = None) -> str:
    """The role of an advantage hook: the one that it declares, or the only one that fits its methods.

    A role that is missing or not that of its methods is a `PluginContractError`; `subject` is what it calls the hook.
    """
    declared = HookDeclaration.of(hook)
    has = [method for method in HOOK_METHODS if implements(hook, method)]
    listed = " and ".join(has) or "no hook method"
    role = declared.role
    if role is None and len(has) == 1:
        role = {"on_rewards": "shaper", "on_forward": "forward"}.get(has[0])
    own = {"shaper": ("on_rewards",), "forward": ("on_forward",)}.get(str(role), ("on_rollout", "on_forward"))
    others = [method for method in has if method not in own]
    if role is None:
        problem = (
            f'has {listed} and no role. Write declares = HookDeclaration(role="estimator") in its class if it computes '
            'advantages from the rewards, or role="transform" if it changes the incoming ones'
        )
    elif ROLES[role] not in has:
        problem = f"has the role {role!r} but not that role's method, {ROLES[role]}; it has {listed}"
    elif others:
        fits = " or ".join(repr(name) for name, method in ROLES.items() if method == others[0])
        problem = (
            f"has the role {role!r} and {others[0]} as well, which would never run. Remove it, or make the role {fits}"
        )
    elif declared.last and role not in ("transform", "forward"):
        problem = f"declares last and the role {role!r}: `last` is for transforms and forward hooks"
    else:
        return role
    name = getattr(hook, "__name__", type(hook).__name__)
    raise PluginContractError(f"{subject or f'The advantage hook {name!r}'} {problem}.")


def acting_order(hook: Any) -> tuple[int, bool]:
    """The sort key for an advantage hook: by role, and within a role the `last` ones after the others."""
    return list(ROLES).index(role_of(hook)), HookDeclaration.of(hook).last
