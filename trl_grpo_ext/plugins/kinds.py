"""The kinds of plugin in one table; a row is all that loading, listing and the commands know of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigurationError
from ..types import (
    HOOK_METHODS,
    AdvantageHook,
    AggregationDeclaration,
    Declaration,
    FilterDeclaration,
    GroupFilter,
    HookDeclaration,
    LossAggregation,
    PromptSampler,
    Reward,
    RewardDeclaration,
    SamplerDeclaration,
    TokenLoss,
    TokenLossDeclaration,
)

Kind = Literal["reward", "advantage_hook", "loss_aggregation", "group_filter", "token_loss", "prompt_sampler"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class KindFacts:
    """One kind of plugin."""

    label: str  # the kind in words
    word: str  # in one word, for a command line
    group: str  # of entry points; aliases are in `<group>.aliases`
    setting: tuple[str, ...]  # where a run selects it, as a path of keys
    several: bool  # whether a run selects a list of them, in the order in which they act
    methods: tuple[str, ...]  # an object has exactly one of these, but a hook those of its role
    required: str  # what an entry point must be, in words
    protocol: type  # has these methods with their parameters
    declaration: type[Declaration]  # what a plugin may declare
    switches: tuple[str, ...] = ()  # boolean keys that any selection of the kind may have


FACTS: dict[Kind, KindFacts] = {
    "reward": KindFacts(
        label="reward",
        word="reward",
        group="trl_grpo_ext.rewards",
        setting=("rewards",),
        several=True,
        methods=("__call__",),
        required="a function f(prompts, completions, completion_ids, **columns) -> list of floats or None, or a class "
        "whose instances are such callables",
        protocol=Reward,
        declaration=RewardDeclaration,
    ),
    "advantage_hook": KindFacts(
        label="advantage hook",
        word="hook",
        group="trl_grpo_ext.advantage_hooks",
        setting=("advantage_hooks",),
        several=True,
        methods=HOOK_METHODS,
        required="a class with a role, whose instances have the method of that role: on_rewards(rollout) of a shaper, "
        "on_rollout(advantages_B_T, rollout) of an estimator or a transform, on_forward(advantages_B_T, forward) of a "
        "forward hook",
        protocol=AdvantageHook,
        declaration=HookDeclaration,
    ),
    "loss_aggregation": KindFacts(
        label="loss aggregation",
        word="aggregation",
        group="trl_grpo_ext.loss_aggregations",
        setting=("loss_aggregation",),
        several=False,
        methods=("weights", "reduce"),
        required="a class whose instances have exactly one of weights(rollout) and reduce(loss_B_T, mask_B_T, totals)",
        protocol=LossAggregation,
        declaration=AggregationDeclaration,
        switches=("skip_zero_variance",),
    ),
    "group_filter": KindFacts(
        label="group filter",
        word="filter",
        group="trl_grpo_ext.group_filters",
        setting=("resample", "filter"),
        several=False,
        methods=("keep",),
        required="a class whose instances have keep(rollout) -> (B,), whether each completion's group is kept",
        protocol=GroupFilter,
        declaration=FilterDeclaration,
    ),
    "token_loss": KindFacts(
        label="token loss",
        word="token-loss",
        group="trl_grpo_ext.token_losses",
        setting=("token_losses",),
        several=True,
        methods=("loss",),
        required="a class whose instances have loss(terms) -> (B, T), each token's loss",
        protocol=TokenLoss,
        declaration=TokenLossDeclaration,
    ),
    "prompt_sampler": KindFacts(
        label="prompt sampler",
        word="sampler",
        group="trl_grpo_ext.prompt_samplers",
        setting=("prompt_sampler",),
        several=False,
        methods=("draw",),
        required="a class whose instances have start(pool), draw(count, round_number) -> row numbers or None, "
        "observe(outcomes), state_dict() and load_state_dict(state)",
        protocol=PromptSampler,
        declaration=SamplerDeclaration,
    ),
}
LABELS: dict[Kind, str] = {kind: facts.label for kind, facts in FACTS.items()}
PLURALS: dict[Kind, str] = {
    kind: f"{label}es" if label.endswith("s") else f"{label}s" for kind, label in LABELS.items()
}
GROUPS: dict[Kind, str] = {kind: facts.group for kind, facts in FACTS.items()}
WORDS: dict[str, Kind] = {facts.word: kind for kind, facts in FACTS.items()}


def check_kind(kind: str) -> None:
    """Refuse what is no kind."""
    if kind not in KINDS:
        raise ConfigurationError(f"{kind!r} is not a kind of plugin; the kinds are {', '.join(KINDS)}.")


def kind_words(last: str = "or") -> str:
    """The kinds' words, as a list for a sentence."""
    *first, end = WORDS
    return f"{', '.join(first)} {last} {end}"


def with_article(kind: Kind) -> str:
    """The kind in words, with its article."""
    return f"an {LABELS[kind]}" if LABELS[kind][0] in "aeiou" else f"a {LABELS[kind]}"
