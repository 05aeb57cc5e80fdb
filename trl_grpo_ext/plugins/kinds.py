"""The kinds of plugin in one table; a row is all that loading, listing and the commands know of a kind."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from .. import types
from ..errors import ConfigurationError

Kind = Literal["reward", "advantage_hook", "loss_aggregation", "group_filter", "token_loss", "prompt_sampler"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class KindFacts:
    """One kind of plugin."""

    kind: Kind
    word: str  # in one word, for a command line
    methods: tuple[str, ...]  # an object has exactly one of these, but a hook those of its role
    protocol: type  # has these methods with their parameters
    declaration: type[types.Declaration]  # what a plugin may declare
    required: str  # what an entry point must be, in words
    several: bool = False  # whether a run selects a list of them, in the order in which they act
    switches: tuple[str, ...] = ()  # boolean keys that any selection of the kind may have

    @property
    def label(self) -> str:
        return self.kind.replace("_", " ")

    @property
    def group(self) -> str:
        """The group of its entry points; aliases are in `<group>.aliases`."""
        return f"trl_grpo_ext.{_plural(self.kind)}"

    @property
    def setting(self) -> tuple[str, ...]:
        """Where a run selects it, as a path of keys."""
        if self.kind == "group_filter":
            return ("resample", "filter")
        return (_plural(self.kind) if self.several else self.kind,)


def _plural(word: str) -> str:
    return f"{word}es" if word.endswith("s") else f"{word}s"


_ROWS = (
    KindFacts(
        "reward",
        "reward",
        several=True,
        methods=("__call__",),
        protocol=types.Reward,
        declaration=types.RewardDeclaration,
        required="a function f(prompts, completions, completion_ids, **columns) -> list of floats or None, or a class "
        "whose instances are such callables",
    ),
    KindFacts(
        "advantage_hook",
        "hook",
        several=True,
        methods=types.HOOK_METHODS,
        protocol=types.AdvantageHook,
        declaration=types.HookDeclaration,
        required="a class with a role, whose instances have the method of that role: on_rewards(rollout) of a shaper, "
        "on_rollout(advantages_B_T, rollout) of an estimator or a transform, on_forward(advantages_B_T, forward) of a "
        "forward hook",
    ),
    KindFacts(
        "loss_aggregation",
        "aggregation",
        methods=("weights", "reduce"),
        protocol=types.LossAggregation,
        declaration=types.AggregationDeclaration,
        required="a class whose instances have exactly one of weights(rollout) and reduce(loss_B_T, mask_B_T, totals)",
        switches=("skip_zero_variance",),
    ),
    KindFacts(
        "group_filter",
        "filter",
        methods=("keep",),
        protocol=types.GroupFilter,
        declaration=types.FilterDeclaration,
        required="a class whose instances have keep(rollout) -> (B,), whether each completion's group is kept",
    ),
    KindFacts(
        "token_loss",
        "token-loss",
        several=True,
        methods=("loss",),
        protocol=types.TokenLoss,
        declaration=types.TokenLossDeclaration,
        required="a class whose instances have loss(terms) -> (B, T), each token's loss",
    ),
    KindFacts(
        "prompt_sampler",
        "sampler",
        methods=("draw",),
        protocol=types.PromptSampler,
        declaration=types.SamplerDeclaration,
        required="a class whose instances have start(pool), draw(count, round_number) -> row numbers or None, "
        "observe(outcomes), state_dict() and load_state_dict(state)",
    ),
)
FACTS: dict[Kind, KindFacts] = {facts.kind: facts for facts in _ROWS}
LABELS: dict[Kind, str] = {kind: facts.label for kind, facts in FACTS.items()}
PLURALS: dict[Kind, str] = {kind: _plural(label) for kind, label in LABELS.items()}
GROUPS: dict[Kind, str] = {kind: facts.group for kind, facts in FACTS.items()}
WORDS: dict[str, Kind] = {facts.word: kind for kind, facts in FACTS.items()}

_READ: dict[str, Kind] = {
    f"{word}{ending}": facts.kind
    for facts in _ROWS
    for word in (facts.kind, facts.word.replace("-", "_"))
    for ending in ("", "s", "es")
}


def kind_of(word: str) -> Kind:
    """Read a kind: `advantage_hook`, `hook`, `advantage-hooks`, `Token Loss`, ...; a `ConfigurationError` if none."""
    folded = re.sub("[- ]", "_", str(word).strip().lower())
    if folded in _READ:
        return _READ[folded]
    known = ", ".join(f"{facts.word} ({kind})" if facts.word != kind else kind for kind, facts in FACTS.items())
    raise ConfigurationError(f"{word!r} is not a kind of plugin; the kinds are {known}.")


def with_article(kind: Kind) -> str:
    return f"an {LABELS[kind]}" if LABELS[kind][0] in "aeiou" else f"a {LABELS[kind]}"
