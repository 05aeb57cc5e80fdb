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

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from .completions import END, WHOLE, Part, Parts, PartTable, Place, Span, ToolCall, Turn, WrittenTokens, turn_numbers
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
"""Goes up when a field changes its meaning, or when plugins must do more; not when one is added."""

# ------------------------------------------------------------------------------------------------- what a plugin does


@runtime_checkable
class Reward(Protocol):
    """How good is this completion? Exactly TRL's contract, so a reward also works in plain TRL.

    Called once per generation batch with keyword arguments only: `prompts`, `completions`, `completion_ids` and every
    other dataset column, plus TRL's `trainer_state`, `log_extra` and `log_metric`. Take the rest as `**kwargs`.

    Optional methods, which plain TRL does not call: `start_scoring(**columns)` begins to score a batch without waiting,
    for instance by sending requests, before any reward is called; `start_workers()`, which `load_rewards` calls once,
    starts processes that the reward works in.
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

    Optional: `state_dict()` and `load_state_dict(state)`, a mapping of JSON values that must survive a checkpoint, of
    rank 0 for all ranks; `metrics`, numbers on its last batch by name, the same on all ranks, logged as
    `advantage/<hook>/<name>`; with `on_forward` numbers on its last micro-batch, of which the log has the mean.
    """

    def on_rewards(self, rollout: Rollout) -> torch.Tensor:
        """Return what is added to the rewards, `(B,)`, or `(B, T)`, summed over the tokens that count; once per batch.

        With `changes_weights` the weights `(K,)` of the reward functions. `rollout.advantages_B_T` is None.
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
        declares `per_step`.
        """

    def reduce(self, loss_B_T: torch.Tensor, mask_B_T: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Return a scalar of one micro-batch that keeps the graph of `loss_B_T`; for what needs the losses themselves.

        The trainer takes the mean over the step's micro-batches and ranks, so this depends on how the batch is cut,
        unless it divides by `totals.step`, as `token_mean_step` does. `totals.step` exists only if each optimizer step
        lies within one generation batch; other runs refuse an object that needs "step_totals".
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
    weights. Optional methods, which return `{name: (B, T)}`: `on_rollout(rollout)` runs once per generation batch with
    the view of all ranks, after the hooks, and its values travel with the rows to `terms.carried_B_T`; those of
    `measures(terms)` are logged as `token_loss/<token loss>/<name>`, the mean over the tokens that count.
    """

    def loss(self, terms: LossTerms) -> torch.Tensor:
        """Return each token's loss `(B, T)`, computed from `terms.logps_B_T`; values off the mask are ignored."""


class PromptSampler(Protocol):
    """Which prompts next? It runs on rank 0 alone; what it draws goes to all ranks.

    Random choices come from the pool's seed and the round, so that no state of a generator has to be saved. Optional:
    `metrics()` returns numbers by name, logged as `prompts/<name>` once per generation batch.
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


def _unknown(row: int) -> Any:
    what = f"This rollout knows no offsets or turns of its texts (asked for those of row {row})"
    raise PluginOutputError(f'{what}. Declare needs=("offsets",).')


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What every plugin of a batch sees."""

    completion_ids_B_T: torch.Tensor  # completion tokens, padded on the right
    # loss mask, float: 1.0 where a token counts (not a tool's, not removed by `mask_truncated_completions`), else 0.0
    mask_B_T: torch.Tensor
    # the weighted sum over the columns that have a value, after the shapers (so far); NaN where no function gave one
    rewards_B: torch.Tensor
    # log-probabilities under the reference policy; None unless TRL computes them or a plugin needs them
    ref_logps_B_T: torch.Tensor | None = None
    step: int = 0  # optimizer steps done so far
    training: bool = True  # False in evaluation


@dataclass(frozen=True, kw_only=True)
class _Grouped(_Batch):
    """What hooks see of groups."""

    # `rewards_B` before any shaper has added to them: the weighted sum of the reward functions alone
    raw_rewards_B: torch.Tensor = None  # type: ignore[assignment]
    # Mean of `rewards_B` over the group, across ranks, and exactly theirs if they are equal; NaN where none has one
    group_baselines_B: torch.Tensor
    # Concatenates a tensor `(B,)` or `(B, T)` over all ranks to `(N,)` or `(N, T')`, in rank order, padded with zeros
    # to the largest `T`, `T'`. Every rank must call it equally often; otherwise the run stops.
    gather: Callable[[torch.Tensor], torch.Tensor] = _identity

    def __post_init__(self) -> None:
        """By default no shaper has acted."""
        if vars(self)["raw_rewards_B"] is None:
            object.__setattr__(self, "raw_rewards_B", self.rewards_B)


@dataclass(frozen=True, kw_only=True)
class Rollout(_Grouped):
    """One generation batch as this rank sees it: the context of `on_rollout` and of `weights`."""

    prompts: Sequence[Any]  # the `B` prompts as the dataset gives them (strings or lists of messages)
    completions: Sequence[Any]  # the `B` completions as reward functions get them (strings or lists of messages)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # the dataset's other columns, `B` values each
    row_numbers: Sequence[int] | None = None  # each prompt's row in the training data; None where TRL's loader dealt it
    texts: Sequence[str]  # the completions as `B` strings, of messages their contents joined; spans count characters
    prompt_ids_B_P: torch.Tensor  # prompt tokens, padded on the left
    prompt_mask_B_P: torch.Tensor  # 1.0 where there is a prompt token
    completion_mask_B_T: torch.Tensor  # 1.0 at every completion token, whoever wrote it, in the loss or not
    tool_mask_B_T: torch.Tensor | None = None  # 0.0 where a tool or an environment wrote the token; None without tools
    # a token's turn, integer, from 0: answers of tools or an environment separate turns; -1 where no model wrote it
    turns_B_T: torch.Tensor = None  # type: ignore[assignment]
    # Returns a row's turns. Raises if the completion's messages cannot be matched with its tokens.
    turns: Callable[[int], Sequence[Turn]] = _unknown
    # Returns, for a row, the characters `(start, end)` of `texts[row]` that each completion token wrote, none for a
    # special token; tokens may share a character. Raises if tokens and text do not match.
    offsets: Callable[[int], Sequence[tuple[int, int]]] = _unknown
    truncated_B: torch.Tensor  # whether a completion ended at the limit, without an end-of-sequence token
    # each function's, NaN where it returned None; then, per shaper that adds to the rewards, what it added
    rewards_B_K: torch.Tensor
    reward_names: Sequence[str]  # the `K` names
    reward_weights_K: torch.Tensor  # the `K` weights in this batch; 1 for shapers
    token_rewards_B_T: torch.Tensor | None = None  # what shapers added to each token, part of `rewards_B`, if any did
    # the completions' parts, by the reward function that returned `Parts` on any rank; none where it returned others
    parts: Mapping[str, PartTable] = field(default_factory=dict)
    group_ids_B: torch.Tensor  # which group a row belongs to; the same number on every rank for the same group
    # Whether each function's rewards in the completion's group are equal before any shaper, so that it has no signal.
    # None for hooks, and if a hook `makes_signal` before the forward stage.
    uninformative_B: torch.Tensor | None = None
    num_generations: int  # `G`
    totals: Totals  # counts over all ranks
    # log-probabilities under the policy that generated; None unless TRL computes them or a hook needs "old_logps"
    old_logps_B_T: torch.Tensor | None = None
    old_entropies_B_T: torch.Tensor | None = None  # of its next-token distributions, in nats; None unless needed
    # those reported by the sampler (vLLM, a rollout function); NaN where it has none
    sampling_logps_B_T: torch.Tensor | None = None
    teacher_logps_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of each of the hooks' `teachers`
    # The advantages after the rollout stage of the hooks, zero off the mask; None for a hook, whose argument they are
    advantages_B_T: torch.Tensor | None = None
    tokenizer: Any = None  # the tokenizer of the policy
    local_rows: slice = field(default_factory=lambda: slice(None))  # this rank's rows in a gathered tensor

    def __post_init__(self) -> None:
        """By default the masks determine the turns."""
        super().__post_init__()
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
            try:
                row_spans = [(start, end, value) for start, end, value in (() if row_spans is None else row_spans)]
            except (TypeError, ValueError):
                what = "a tensor (B, T), or for each completion a list of spans (start, end, value) or None"
                raise PluginOutputError(f"expected {what}, got {row_spans!r:.80} at row {row}.") from None
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
class Forward(_Grouped):
    """One micro-batch at its loss forward: the context of `on_forward`. All tensors are detached.

    TRL shuffles the generation batch after the rollout stage, so row `i` here is not row `i` of the `Rollout`, and a
    group's rows may be in different micro-batches. The fields carry what is known of each row from the rollout;
    `gather` is over this micro-batch of every rank.
    """

    logps_B_T: torch.Tensor  # log-probabilities under the policy being trained
    entropies_B_T: torch.Tensor  # entropy of the policy's next-token distribution, in nats
    old_logps_B_T: torch.Tensor  # those under the policy that generated; `logps_B_T` where the two are the same
    # whether all scored rewards of the group are equal before any shaper, and its advantages 0 after the rollout stage
    zero_variance_B: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PromptPool:
    """The training prompts, as a prompt sampler gets them at the beginning."""

    rows: Sequence[Mapping[str, Any]]  # the rows of the training data, by number
    seed: int  # the run's seed
    order: Callable[[int], Sequence[int]]  # returns the row numbers of a pass, counted from 0, in TRL's own order

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
    means: Mapping[str, float]  # mean reward of its completions, by function; NaN where it gave none a value
    deviations: Mapping[str, float]  # standard deviation of these rewards (n - 1); 0 for a single value, NaN for none
    reward: float  # mean of the weighted rewards; NaN where no function gave a value
    deviation: float  # standard deviation of the weighted rewards
    length: float  # mean number of tokens of its completions
    verdict: bool | str | None = None  # what the filter of `resample` said of it; None without a filter


@dataclass(frozen=True, kw_only=True)
class LossTerms(_Batch):
    """One micro-batch at its loss forward: the context of a token loss. All tensors but `logps_B_T` are detached.

    Rows are shuffled, as in `Forward`. Off the mask every number `(B, T)` is 0, and no gradient arrives there.
    """

    logps_B_T: torch.Tensor  # log-probabilities under the policy being trained, with their graph
    old_logps_B_T: torch.Tensor  # those under the policy that generated; the same where the two policies are
    advantages_B_T: torch.Tensor  # the advantages that are trained on, after all hooks
    entropies_B_T: torch.Tensor  # entropy of the policy's next-token distribution, in nats
    sampling_logps_B_T: torch.Tensor | None = None  # those reported by the sampler, if any; NaN where it has none
    carried_B_T: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what its own `on_rollout` returned

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
    optimizer_steps: float = 1.0  # in one pass over this generation batch; one half if a step spans two batches
    step: StepTotals | None = None  # counts of the current optimizer step, for `reduce`; None for `weights`


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over one optimizer step: its part of the generation batch, over all ranks and micro-batches."""

    tokens: int  # completion tokens that count in the loss
    sequences: int  # completions, including those with an empty mask
    micro_batches: int = 1  # loss forwards of one rank in this step


# ------------------------------------------------------------------------------------------- what a plugin may declare


NEEDS = ("old_logps", "old_entropies", "ref_logps", "sampling_logps", "offsets", "entropies", "several_updates")
"""What a hook, a filter or an aggregation may list in its `needs`."""

ROLES: Mapping[str, str] = {
    "shaper": "on_rewards",
    "estimator": "on_rollout",
    "transform": "on_rollout",
    "forward": "on_forward",
}
"""The roles of advantage hooks, in the order in which they act, and the method that each requires."""

HOOK_METHODS = tuple(dict.fromkeys(ROLES.values()))  # what an advantage hook may define


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a plugin of any kind may declare: `declares`, an attribute of its class or of the object.

    A value that a field does not take is a `PluginContractError`.
    """

    KNOWN: ClassVar[Mapping[str, Collection[str]]] = {"needs": ()}
    """By field, the names that it takes."""

    needs: tuple[str, ...] = ()  # what the run must provide, of `KNOWN["needs"]`
    takes: tuple[str, ...] = ()  # the constructor's parameters that select plugins of this kind, which it gets loaded
    deterministic: bool = True  # False if it draws random numbers on purpose
    conformance: Mapping[str, Any] = field(default_factory=dict)  # what the conformance kit is to try it with
    contract_version: int | None = None  # the `CONTRACT_VERSION` that it was written for; None fits any

    def __post_init__(self) -> None:
        """Refuse a value that is not of its field's type, or not one of the known names."""
        for one in fields(self):
            value = vars(self)[one.name]
            known = self.KNOWN.get(one.name)
            what, fits = _TYPES[str(one.type)]
            if known is not None:
                what = f"{what}, of {', '.join(map(repr, known)) or 'none'}"
                names = (value,) if isinstance(value, str) else value or ()
            if not fits(value) or (known is not None and not {*names} <= {*known}):
                raise PluginContractError(f"{type(self).__name__}: {one.name} must be {what}, got {value!r:.200}.")
            if isinstance(value, list):
                object.__setattr__(self, one.name, tuple(value))

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
        if (found.contract_version or 0) > CONTRACT_VERSION:
            versions = f"{found.contract_version} of the plugin contract, and this trl-grpo-ext has {CONTRACT_VERSION}"
            raise PluginContractError(f"It was written for version {versions}: upgrade trl-grpo-ext.")
        return found

    def shown(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = type(self)()
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}


@dataclass(frozen=True, kw_only=True)
class RewardDeclaration(Declaration):
    """What a reward may declare."""

    reference_column: str | None = None  # with the right answers, for `trl-grpo-ext audit` and the conformance kit
    per_completion: bool = True  # False if it compares completions on purpose


@dataclass(frozen=True, kw_only=True)
class HookDeclaration(Declaration):
    """What an advantage hook may declare; most need a role alone.

    Without one of the `needs` the trainer is not constructed; log-probabilities that TRL does not compute cost a pass.
    """

    KNOWN = {"needs": NEEDS, "role": ROLES}  # noqa: RUF012

    # "shaper", "estimator", "transform" or "forward", see `AdvantageHook`. Required with `on_rollout`, since an
    # estimator and a transform look alike; otherwise it follows from the method.
    role: str | None = None
    # A promise, which the conformance kit tries: a group's rewards or advantages do not depend on other groups, and no
    # state is kept; in `on_forward`, a completion's do not depend on other completions. `resample` requires it of
    # shapers, and of all hooks if its filter reads advantages; compact updates then move rows.
    independent: bool = False
    # Makes a transform a mask. It acts after the other transforms, and tokens that it sets to 0 stay 0 after the
    # forward stage. To find them before forward hooks it also runs on advantages of 1 and of -1, so it may look at the
    # sign of an advantage but not at its size, nor draw random numbers (with any hooks beside it, so that what is
    # accepted does not hang on them). A forward hook with it acts after the other forward hooks.
    last: bool = False
    # What it gives groups of equal rewards is meant, since it reads more than rewards (steps, turns, a teacher,
    # entropies), and no side effect, such as a KL penalty's. Such groups then have signal where they have an
    # advantage. A forward hook gets them as `Forward.zero_variance_B`.
    makes_signal: bool = False
    # False for an estimator that does not see what is added to rewards, or not its size, since it normalises each
    # column of `rollout.rewards_B_K` by itself: shapers that add are refused
    uses_total_reward: bool = True
    uses_weights: bool = True  # False for an estimator that reads none: shapers that change them are refused
    changes_weights: bool = False  # a shaper that adds nothing: it changes the weights of the reward functions, first
    # names of models whose log-probabilities it reads from `rollout.teacher_logps_B_T`: an id or path, or
    # `teacher_name(model, column)`, the same, "policy" or "reference" after the prompts of another column
    teachers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AggregationDeclaration(Declaration):
    """What a loss aggregation may declare; it needs "step_totals" if `reduce` cannot do without `totals.step`."""

    KNOWN = {"needs": (*NEEDS, "step_totals")}  # noqa: RUF012

    per_step: bool = False  # `Σ w·l` over an optimizer step's tokens is that step's loss as it stands


@dataclass(frozen=True, kw_only=True)
class FilterDeclaration(Declaration):
    """What a group filter may declare.

    It needs "advantages" if it reads `rollout.advantages_B_T`, those after the rollout stage of the hooks, which then
    have to run in each round, all of them independent. Others see None there.
    """

    KNOWN = {"needs": (*NEEDS, "advantages")}  # noqa: RUF012

    teachers: tuple[str, ...] = ()  # as for a hook


@dataclass(frozen=True, kw_only=True)
class TokenLossDeclaration(Declaration):
    """What a token loss may declare. The defaults are safe for any added loss; promises let compact updates do more."""

    INSIDE_TRLS: ClassVar[Sequence[str]] = (
        "importance_sampling_level",
        "top_entropy_quantile",
        "off_policy_mask_threshold",
        "delta",
        "vllm_importance_sampling_correction",
    )
    """Settings that TRL applies inside its policy loss, and which go with it."""
    KNOWN = {  # noqa: RUF012
        "needs": ("old_logps", "ref_logps", "sampling_logps", "several_updates"),
        "does_own": INSIDE_TRLS,
    }

    replaces: bool = False  # it takes the place of TRL's policy loss; otherwise it is added. At most one may.
    independent: bool = False  # a row's losses depend on that row alone: compact updates may put others next to it
    # They are 0, with their gradient, in rows whose advantages are all 0, so compact updates may leave these out.
    # Both promises are tried on made-up numbers before the first step.
    needs_advantage: bool = False
    does_own: tuple[str, ...] = ()  # of `INSIDE_TRLS`, for one that replaces: what it applies itself


@dataclass(frozen=True, kw_only=True)
class SamplerDeclaration(Declaration):
    """What a prompt sampler may declare: what every plugin may."""


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(name, str) and name for name in value)


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("a tuple of names", _is_names),
    "str | None": ("a name", lambda value: value is None or (isinstance(value, str) and bool(value))),
    "int | None": ("a whole number from 1 up", lambda value: value is None or (type(value) is int and value >= 1)),
    "Mapping[str, Any]": ("a mapping", lambda value: isinstance(value, Mapping)),
}
"""By the annotation of a declaration's field: what it takes, in words, and whether a value fits."""


# ------------------------------------------------------------------------------------- what few plugins need: teachers


POLICY = "policy"
REFERENCE = "reference"
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
    """Whether a plugin has a method of its own; a stub inherited from one of the protocols above is none."""
    found = getattr(plugin, method, None)
    return callable(found) and getattr(found, "__module__", None) != __name__


def role_of(hook: Any, subject: str | None = None) -> str:
    """The role of an advantage hook: the one that it declares, or the only one that fits its methods.

    A role that is missing or not that of its methods is a `PluginContractError`; `subject` is what it calls the hook.
    """
    declared = HookDeclaration.of(hook)
    has = [method for method in HOOK_METHODS if implements(hook, method)]
    only = {"shaper": ["on_rewards"], "forward": ["on_forward"]}
    role = declared.role or next((role for role, methods in only.items() if has == methods), None)
    own = only.get(str(role), ["on_rollout", "on_forward"])
    listed = " and ".join(has) or "no hook method"
    if role is None:
        problem = (
            f'has {listed} and no role. Write declares = HookDeclaration(role="estimator") in its class if it computes '
            'advantages from the rewards, or role="transform" if it changes the incoming ones'
        )
    elif ROLES[role] not in has or not {*has} <= {*own}:
        problem = f"has the role {role!r}, which needs {ROLES[role]} and only runs {' and '.join(own)}; it has {listed}"
    elif declared.last and role not in ("transform", "forward"):
        problem = f"declares last and the role {role!r}: `last` is for transforms and forward hooks"
    elif declared.last and role == "transform" and not declared.deterministic:
        problem = "declares last and deterministic=False: a mask must do the same if tried again. Leave out `last`"
    elif declared.changes_weights and role != "shaper":
        problem = f"declares changes_weights and the role {role!r}: that is for shapers"
    else:
        return role
    name = getattr(hook, "__name__", type(hook).__name__)
    raise PluginContractError(f"{subject or f'The advantage hook {name!r}'} {problem}.")


def acting_order(hook: Any) -> tuple[int, bool]:
    """The sort key for an advantage hook: by role; within it what changes weights comes first, and `last` last."""
    return list(ROLES).index(role_of(hook)), HookDeclaration.of(hook).last or adds_rewards(hook)


def adds_rewards(hook: Any) -> bool:
    """Whether a hook is a shaper that adds to the rewards."""
    return role_of(hook) == "shaper" and not HookDeclaration.of(hook).changes_weights
