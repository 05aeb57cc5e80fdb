"""The rules of the conformance kit: what each requires and why, how they run, and the report.

Nothing here imports torch, so rules can be listed at once, and a reward without torch is checked without it.
"""

from __future__ import annotations

import copy
import linecache
import pickle
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import ConfigurationError, PluginOutputError, TRLGRPOExtError
from ..guard.outcomes import exception_text, shown
from ..plugins.kinds import LABELS, Kind

T = TypeVar("T")

_TRIES, _SECONDS = 300, 3.0
"""Seconds spent on shrinking an input that breaks a rule."""


@dataclass(frozen=True)
class Rule:
    """One thing that a plugin of a kind must do.

    Attributes:
        name: `reward.length` and the like; stable.
        kind: One of `KINDS`.
        summary: What it requires, in one line.
        why: What goes wrong in training if a plugin breaks it.
        rests_on: Short names of the rules on which its comparisons depend: if one of those is broken, a difference that
            this rule finds follows from it.
    """

    name: str
    kind: Kind
    summary: str
    why: str
    rests_on: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The name without its kind: `length`."""
        return self.name.partition(".")[2]


GATES = frozenset({"call", "length", "types", "form", "run", "shape"})
"""Rules without which the others make no sense: where one is broken, those after it are not checked."""

Level = Literal["none", "bronze", "silver", "gold"]
LEVELS: tuple[Level, ...] = ("none", "bronze", "silver", "gold")
"""How much of what is asked of a plugin it has been shown to keep, from nothing to everything; `Report.level`."""

_CONTRACT = GATES | {"inputs", "gradient", "finite", "non_negative", "mask", "groups"}
"""Bronze: what a run stops for when it meets it."""

_ELSEWHERE = frozenset(
    {"determinism", "neighbours", "pickle", "split", "micro_batches", "ranks", "gathers", "state", "evaluation"}
)
"""Gold: what makes a run on several processes, or one that was resumed, the same run. None may be declared away."""

_UNKNOWN = re.compile(r" is broken$|^its process had to be ended")
_DECLARED = re.compile(r"\bdeclares?\b")
"""Reasons for which a rule was not checked: another one is broken; the plugin's own declaration, or the lack of one.
Any other reason is that it does not apply."""

_COLOURS: Mapping[Level, str] = {"none": "c0392b", "bronze": "cd7f32", "silver": "a8a9ad", "gold": "d4af37"}

_RESTS_ON: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
    "reward": {
        "rows": ("determinism",),
        "neighbours": ("determinism", "rows"),
        "order": ("determinism", "rows", "neighbours"),
        "formats": ("determinism",),
        "none": ("determinism", "rows", "neighbours"),
        "outcomes": ("determinism", "none"),
        "pickle": ("determinism",),
        "threads": ("determinism",),
        "global_state": ("determinism",),
    },
    "advantage_hook": {
        "role": ("determinism",),
        "equal_rewards": ("determinism", "role"),
        "long": ("finite", "determinism", "padding"),
        "mask": ("determinism",),
        "padding": ("determinism", "mask"),
        "row_permutation": ("determinism",),
        "group_permutation": ("determinism", "row_permutation"),
        "split": ("determinism", "row_permutation", "group_permutation"),
        "micro_batches": ("determinism", "row_permutation"),
        "state": ("determinism",),
        "evaluation": ("determinism",),
        "pickle": ("determinism",),
    },
    "loss_aggregation": {
        "long": ("finite", "determinism", "padding"),
        "micro_batches": ("determinism",),
        "row_permutation": ("determinism",),
        "ranks": ("determinism", "row_permutation"),
        "totals": ("determinism", "ranks", "row_permutation"),
        "masked_values": ("determinism", "mask"),
        "padding": ("determinism", "masked_values"),
        "pickle": ("determinism",),
    },
    "group_filter": {
        "groups": ("determinism",),
        "padding": ("determinism", "masked_values"),
        "masked_values": ("determinism",),
        "ranks": ("determinism", "groups"),
        "pickle": ("determinism",),
    },
}


def _rules(kind: Kind, prefix: str, *rows: tuple[str, str, str]) -> tuple[Rule, ...]:
    rests_on = _RESTS_ON[kind]
    return tuple(Rule(f"{prefix}.{name}", kind, summary, why, rests_on.get(name, ())) for name, summary, why in rows)


RULES: tuple[Rule, ...] = (
    *_rules(
        "reward",
        "reward",
        (
            "call",
            "can be called as TRL calls it: prompts, completions, completion_ids, every column, trainer_state, "
            "log_extra and log_metric, by keyword",
            "TRL passes every column of the dataset to every reward. One that names only the columns it knows fails on "
            "the first other dataset: take the rest as **columns.",
        ),
        (
            "run",
            "scores ordinary completions without raising, exiting or hanging",
            "What fails here fails in the first training step.",
        ),
        (
            "length",
            "returns one value per completion, for one completion and for many",
            "TRL stops the run where the number of rewards is not the number of completions.",
        ),
        (
            "types",
            "each value is a finite number that fits float32, or None",
            "TRL makes a float32 tensor of the values. NaN silently means None there, infinity spoils the advantages "
            "of the whole group, and a string stops the run.",
        ),
        (
            "determinism",
            "the same call gives the same scores, also of a fresh build and after other calls, unless it declares "
            "`deterministic = False`",
            "A reward that remembers texts scores by the order of sampling. Undeclared randomness is noise in "
            "every advantage, makes runs impossible to repeat, and hides in the randomness of sampling.",
        ),
        (
            "rows",
            "each completion is scored with its own row's columns",
            "TRL passes columns as lists, one value per completion. A reward that reads the first row's reference "
            "compares every prompt's completions with one answer.",
        ),
        (
            "neighbours",
            "a completion's score does not depend on the others in the batch, unless it declares "
            "`per_completion = False`",
            "Which completions meet in a call depends on batch size and ranks, so the reward would change with the "
            "number of GPUs.",
        ),
        (
            "order",
            "the order of the completions does not matter",
            "TRL's order is an accident of sampling. A reward that counts positions pays the first completion of a "
            "batch for being first.",
        ),
        (
            "inputs",
            "does not change its arguments",
            "The other rewards, the loss and the logs get the same lists. A popped message is gone for all of them.",
        ),
        (
            "formats",
            "a completion as a string and as a list of one message gets the same score",
            "TRL passes lists of messages if the prompts are conversations. A reward that reads only strings then "
            "scores the text of a list, brackets included.",
        ),
        (
            "none",
            "a column's value may be None in one row, which then costs no other row anything",
            "Datasets merged from several sources have None in the columns that one of them lacks.",
        ),
        (
            "empty",
            "an empty completion, a conversation without messages and a message without text are scored like others",
            "A policy that ends at once writes the empty string, and one that only calls a tool writes a message whose "
            "content is None. Indexing [-1] raises there.",
        ),
        (
            "hostile_text",
            "no text that a model can write makes it raise or break its contract",
            "A policy writes every text sooner or later: control characters, lone surrogates, ten thousand digits, "
            "brackets that never close. One of them must not end a run of days.",
        ),
        (
            "outcomes",
            "an unreadable reference does not score like a wrong answer",
            "A broken reference that reads as 0 teaches the policy that right answers are wrong. Say None.",
        ),
        (
            "pickle",
            "pickles, and scores the same afterwards",
            "Guards run a reward in worker processes, and launchers send it to other ranks. Lambdas, open files and "
            "locks don't travel.",
        ),
        (
            "threads",
            "gives the same scores off the main thread, and to two threads at once",
            "A reward may be called from any thread, where signal.alarm does not work, and state that one call leaves "
            "for the next gets mixed up.",
        ),
        (
            "leftovers",
            "no call leaves more threads or child processes running",
            "One thread per call is ten thousand after a day. A pool that is made once and kept is fine.",
        ),
        (
            "collectives",
            "with torch.distributed, calls collectives equally often on every rank",
            "A rank that gathers under a condition on its own completions leaves the others waiting for ever.",
        ),
        (
            "global_state",
            "leaves random generators, working directory, environment, signal handlers, locale and torch's settings "
            "as they were",
            "random.seed(0) in a reward makes every rank sample alike from then on, and nothing says so.",
        ),
        (
            "time",
            "takes less than a second per completion",
            "The GPUs wait for the reward. Guard what is slow, or make it async; a limit of your own can be declared.",
        ),
    ),
    *_rules(
        "advantage_hook",
        "hook",
        (
            "form",
            "has a role and its method: on_rewards, on_rollout or on_forward",
            "The chain is built by roles, and the trainer calls these methods and no other.",
        ),
        (
            "run",
            "runs on an ordinary generation batch and on an ordinary micro-batch",
            "What fails here fails in the first training step.",
        ),
        (
            "needs",
            "lists what it reads in `needs`, by known names, and `teachers` as ids",
            "Log-probabilities that nobody lists are not computed, so the hook finds None in the first step of a run "
            "whose configuration was checked. A name that does not exist is refused at construction.",
        ),
        (
            "shape",
            "returns one advantage per token, (B, T), or spans from on_rollout; a shaper one reward per completion, "
            "(B,), or per token, (B, T)",
            "The loss takes (B, T). A result that only broadcasts would pay the wrong tokens.",
        ),
        (
            "determinism",
            "the same batch gives the same advantages, unless it declares `deterministic = False`",
            "Each rank would draw its own, and runs cannot be repeated.",
        ),
        (
            "role",
            "an estimator ignores the incoming advantages, a transform uses them, and a mask (`last = True`) sets "
            "tokens to 0 by sign or position, not by the size of the advantage",
            "The chain puts hooks in the order of their roles. A transform that overwrites discards the work of the "
            "hooks before it, and zeros that depend on the size cannot be kept after the forward stage.",
        ),
        (
            "equal_rewards",
            "an estimator gives groups of equal rewards exactly 0, or something that is clearly not rounding",
            "What has an advantage has signal: a group with 3e-8 runs forward and backward, counts in denominators, "
            "and no other hook may learn from it.",
        ),
        (
            "dtype",
            "keeps the dtype and the device of the incoming advantages, float32 and float64, and takes "
            "log-probabilities in bfloat16 and float16",
            "A float64 result makes the loss float64, and one on the CPU stops a run on a GPU. In runs with bf16 the "
            "log-probabilities are of that type, which numpy, for one, does not know.",
        ),
        (
            "mask",
            "values off the mask reach no live token",
            "Padding holds whatever the model computes there. It changes with the batch, so a mean that includes it "
            "is a mean of noise.",
        ),
        (
            "finite",
            "gives finite advantages where rewards are all equal, missing or negative, and for empty and one-token "
            "completions",
            "Division by a spread of zero gives NaN, and one NaN in the loss makes every weight of the model NaN.",
        ),
        (
            "long",
            "gives finite advantages that float32 can hold for completions of 64 to 4,096 tokens, and the same in "
            "float64",
            "Sums over tokens grow with the length: exponentials of them overflow, powers of it vanish, and nobody has "
            "tried more than ten tokens.",
        ),
        (
            "gradient",
            "its result does not require grad",
            "Advantages are constants of the loss. A gradient through them makes a different algorithm.",
        ),
        (
            "inputs",
            "writes to none of the tensors that it is given",
            "The other hooks, the loss and the logs read the same tensors.",
        ),
        (
            "row_permutation",
            "the order of a group's completions does not matter",
            "The order in a group is an accident of sampling.",
        ),
        (
            "group_permutation",
            "the order of the groups does not matter",
            "Which prompt comes first in a batch is chance; group ids are names, not numbers to calculate with.",
        ),
        (
            "padding",
            "more padding changes nothing",
            "A batch is as wide as its longest completion. Dividing by the width pays a completion for its neighbours' "
            "length.",
        ),
        (
            "split",
            "on_rollout gives the same on one rank as on two and three, also where groups are spread over ranks",
            "Statistics over the rank's own rows change with the number of GPUs, and of a group on two ranks each "
            "sees a half. Gather first.",
        ),
        (
            "gathers",
            "calls gather equally often on every rank",
            "A rank that gathers under a condition on its own rows leaves the others waiting for ever.",
        ),
        (
            "micro_batches",
            "with `per_completion = True`, on_forward gives each completion the same next to any others",
            "Compact updates rely on it to put other completions next to it.",
        ),
        (
            "composition",
            "takes advantages that differ from token to token, and its own result",
            "Any transform may come before another, so the incoming advantages are whatever the hook before it made.",
        ),
        (
            "state",
            "what it remembers goes through JSON and back: state_dict and load_state_dict, both or neither",
            "A run that resumes from a checkpoint must go on as if it had not stopped.",
        ),
        (
            "evaluation",
            "evaluation does not change what it remembers",
            "Evaluating more often must not change the training.",
        ),
        ("pickle", "pickles", "Launchers and workers send the trainer's parts to other processes."),
    ),
    *_rules(
        "loss_aggregation",
        "aggregation",
        ("form", "has exactly one of weights and reduce", "The trainer must know which of the two is meant."),
        (
            "run",
            "runs on an ordinary batch",
            "What fails here fails in the first training step.",
        ),
        (
            "shape",
            "weights returns a floating point tensor (B, T), reduce a scalar tensor",
            "A weight per completion would broadcast, or not, with the batch that happens to come.",
        ),
        (
            "determinism",
            "the same batch gives the same weights, unless it declares `deterministic = False`",
            "Each rank would draw its own, and runs cannot be repeated.",
        ),
        (
            "finite",
            "gives finite numbers on ordinary batches",
            "One NaN in the loss makes every weight of the model NaN.",
        ),
        (
            "non_negative",
            "no weight is negative",
            "A negative weight flips the token's advantage: the policy unlearns what was right.",
        ),
        (
            "mask",
            "weights are zero off the mask; so is the gradient of reduce",
            "Padding and what a tool wrote would be trained on.",
        ),
        (
            "live",
            "a batch with live tokens has some weight",
            "A loss of zero trains nothing, and nothing says so.",
        ),
        (
            "empty_rows",
            "completions without a live token, or with all tokens masked, leave the others finite weights",
            "Truncated completions are masked whole. Dividing by their length of zero gives NaN.",
        ),
        (
            "nothing_live",
            "a batch without any live token gives zeros",
            "Early in a run every completion may be cut off and masked.",
        ),
        (
            "long",
            "gives finite weights that float32 can hold for completions of 64 to 4,096 tokens, and the same in float64",
            "What is right for ten tokens overflows or vanishes at four thousand.",
        ),
        (
            "dtype",
            "also takes masks, advantages, losses and log-probabilities in bfloat16 and float16",
            "In runs with bf16 the log-probabilities are of that type, which numpy, for one, does not know.",
        ),
        (
            "micro_batches",
            "the loss does not depend on how a rank's rows are cut into micro-batches",
            "Memory decides the cut, and would decide the gradient. A reduce is checked only if it declares "
            "`needs_step_totals = True`.",
        ),
        (
            "ranks",
            "the loss is the same on one rank as on two and three, also where groups are spread over ranks",
            "Counting the rank's own rows makes the gradient depend on the number of GPUs. Divide by rollout.totals.",
        ),
        (
            "gathers",
            "calls gather equally often on every rank",
            "A rank that gathers under a condition on its own rows leaves the others waiting for ever.",
        ),
        (
            "totals",
            "counts by rollout.totals: completions that are in no total change nothing",
            "`skip_zero_variance: true` takes groups without signal out of the mask and out of the totals. Counting "
            "rows in any other way brings them back.",
        ),
        (
            "padding",
            "more padding changes nothing",
            "A batch is as wide as its longest completion, so the width depends on the neighbours.",
        ),
        (
            "row_permutation",
            "the order of the completions does not matter",
            "Their order is an accident of sampling.",
        ),
        (
            "masked_values",
            "values off the mask do not matter",
            "Padding holds whatever the model computes there, and it changes with the batch.",
        ),
        (
            "gradient",
            "reduce keeps the graph of the losses, and its gradient is finite",
            "A detached loss trains nothing, and one NaN in the gradient ends the run.",
        ),
        (
            "homogeneous",
            "reduce of losses twice as large is twice as large, unless it declares `homogeneous = False`",
            "The scale of the advantages is a learning rate in disguise; here it would change which tokens count.",
        ),
        (
            "step_totals",
            "reduce works where totals.step is None, or declares `needs_step_totals = True`",
            "In runs whose optimizer steps don't lie within one generation batch these counts don't exist.",
        ),
        ("inputs", "writes to none of the tensors that it is given", "The loss and the logs read the same tensors."),
        ("pickle", "pickles", "Launchers and workers send the trainer's parts to other processes."),
    ),
    *_rules(
        "group_filter",
        "filter",
        ("form", "has keep", "The trainer asks by this method."),
        ("run", "runs on an ordinary batch", "What fails here fails in the first training step."),
        (
            "shape",
            "keep returns (B,), bool; or for each completion True, False or a short reason",
            "Reasons are names of metrics; anything else has no meaning to a run.",
        ),
        (
            "determinism",
            "the same batch gives the same answer, unless it declares `deterministic = False`",
            "Ranks that disagree on a group cannot put one batch together.",
        ),
        (
            "odd_batches",
            "answers on batches with equal rewards, missing rewards, empty completions, or no token that counts",
            "Filters are made for these: late in a run there are many.",
        ),
        (
            "groups",
            "gives all completions of a group the same answer",
            "A group is trained on whole or not at all.",
        ),
        ("padding", "the answer does not depend on how far rows are padded", "Each round is padded by itself."),
        (
            "masked_values",
            "values off the mask have no influence",
            "Padding holds whatever the computation left there.",
        ),
        (
            "ranks",
            "gives the same answer on one rank as on two and three, also if groups are spread over ranks",
            "Ranks that disagree on a group cannot put one batch together. Gather what decides.",
        ),
        ("gathers", "calls rollout.gather equally often on every rank", "Otherwise ranks wait for each other."),
        ("inputs", "does not write to its arguments", "The kept groups are trained on as they are there."),
        ("pickle", "pickles", "Launchers and workers send the trainer's parts to other processes."),
    ),
)
"""All rules, in the order in which they are checked."""


def rules_of(kind: Kind, names: Iterable[str] | None = None) -> tuple[Rule, ...]:
    """The rules of a kind, or those with the given names.

    Raises:
        ConfigurationError: A name is not a rule of this kind.
    """
    of_kind = tuple(rule for rule in RULES if rule.kind == kind)
    if names is None:
        return of_kind
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in {rule.name for rule in of_kind}]
    if unknown:
        known = ", ".join(rule.name for rule in of_kind)
        raise ConfigurationError(f"There is no rule {unknown[0]!r} for this kind of plugin; there are {known}.")
    return tuple(rule for rule in of_kind if rule.name in wanted)


# ---------------------------------------------------------------------------------------------- reports


class ConformanceError(AssertionError, TRLGRPOExtError):
    """A plugin breaks a rule of its kind; the message is the report."""


@dataclass(frozen=True)
class Violation:
    """A rule that a plugin breaks.

    Attributes:
        rule: The rule.
        message: What was wrong, with the values.
        example: The smallest input found on which it breaks the rule, as printable text.
        cause: An exception and its line, or a part of the contract; empty if two results differ.
        follows: The name of the broken rule that causes this one, if any.
    """

    rule: Rule
    message: str
    example: str
    cause: str = ""
    follows: str = ""

    def __str__(self) -> str:
        lines = [f"broken: {self.rule.name}: {self.rule.summary}", *_indented(self.message)]
        if self.example:
            lines += _indented(f"smallest example: {self.example}")
        return "\n".join([*lines, *_indented(f"why: {self.rule.why}")])


@dataclass(frozen=True)
class Report:
    """The kit's report on one plugin.

    Attributes:
        subject: The plugin's name.
        kind: Its kind.
        passed: The rules that it keeps.
        violations: The rules that it breaks, in the order of the rules.
        skipped: The rules that were not checked, with the reason.
        measured: Measurements, such as `seconds_per_completion`.
        unshown: Why the checks do not show that the plugin does anything (all texts got one score, say); else empty.
        printed: What the plugin printed (untrusted text), and the total number of lines.
        documentation: Where its distribution documents it: a URL, its README, or docs/plugins.md of this project; empty
            where it does not.
    """

    subject: str
    kind: Kind
    passed: tuple[Rule, ...] = ()
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[Rule, str], ...] = ()
    measured: Mapping[str, float | str] = field(default_factory=dict)
    unshown: str = ""
    printed: tuple[tuple[str, ...], int] = ((), 0)
    documentation: str = ""

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    @property
    def roots(self) -> tuple[Violation, ...]:
        """The broken rules that do not follow from another one."""
        return tuple(broken for broken in self.violations if not broken.follows)

    def following(self, root: Violation) -> tuple[Violation, ...]:
        """The broken rules that follow from this one."""
        return tuple(broken for broken in self.violations if broken.follows == root.rule.name)

    @property
    def level(self) -> Level | None:
        """One of `LEVELS`; None where only some of the rules were asked for."""
        return None if self._short_of is None else self._short_of[0]

    @property
    def missing(self) -> str:
        """What the next level needs, in words; empty at the highest."""
        return "" if self._short_of is None else self._short_of[1]

    @property
    def _short_of(self) -> tuple[Level, str] | None:
        """The level, and what keeps the plugin from the next one."""
        if len(self.passed) + len(self.violations) + len(self.skipped) < len(rules_of(self.kind)):
            return None
        broken = [one.rule.name for one in self.violations]
        contract = [one.rule.name for one in self.violations if one.rule.short in _CONTRACT]
        contract += [rule.name for rule, why in self.skipped if rule.short in _CONTRACT and _UNKNOWN.search(why)]
        if contract:
            return "none", f"keep {_listed(contract)}"
        if broken:
            return "bronze", f"keep {_listed(broken)}"
        if self.unshown:
            return "bronze", "show that it works, see above"
        away = [rule.name for rule, why in self.skipped if rule.short in _ELSEWHERE and _DECLARED.search(why)]
        if away:
            return "silver", f"{_listed(away)} checked; its declarations exempt it"
        if not self.documentation:
            return "silver", "a Documentation URL in its distribution's metadata, or a README that names it"
        return "gold", ""

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "subject": self.subject,
            "kind": self.kind,
            "ok": self.ok,
            "level": self.level,
            "missing": self.missing or None,
            "badge": None if self.level is None else badge(self.level),
            "passed": [rule.name for rule in self.passed],
            "violations": [
                {
                    "rule": broken.rule.name,
                    "summary": broken.rule.summary,
                    "message": broken.message,
                    "example": broken.example,
                    "why": broken.rule.why,
                    "follows": broken.follows or None,
                }
                for broken in self.violations
            ],
            "skipped": [{"rule": rule.name, "reason": reason} for rule, reason in self.skipped],
            "measured": dict(self.measured),
            "unshown": self.unshown or None,
            "printed": list(self.printed[0]),
        }

    def counts(self) -> str:
        """How many rules are kept, broken and not checked."""
        kept = f"{len(self.passed)} rule{'s' * (len(self.passed) != 1)} kept"
        return f"{kept}, {len(self.violations)} broken, {len(self.skipped)} not checked"

    def not_checked(self) -> str:
        """The rules that were not checked, by reason, in one line; empty where there are none."""
        reasons: dict[str, list[str]] = {}
        for rule, reason in self.skipped:
            reasons.setdefault(reason, []).append(rule.short)
        parts = [f"{reason} ({_listed(names)})" for reason, names in reasons.items()]
        return "; ".join(parts)

    def __str__(self) -> str:
        lines = [f"{LABELS[self.kind]} {self.subject}: {self.counts()}"]
        for root in self.roots:
            lines += _indented(str(root))
            if followers := self.following(root):
                names = ", ".join(broken.rule.name for broken in followers)
                lines.append(f"    {following(len(followers))}: {names}")
        lines += [f"  not checked: {self.not_checked()}"] if self.skipped else []
        lines += [f"  not shown to work: {self.unshown}"] if self.unshown else []
        lines += [f"  measured: {name}: {_shown(value)}" for name, value in self.measured.items()]
        lines += [f"  {self.standing()}"] if self.level else []
        return "\n".join(lines)

    def standing(self) -> str:
        """The level and what the next one needs, in a line."""
        following = LEVELS[LEVELS.index(self.level) + 1] if self.level and self.missing else ""
        return f"level: {self.level}" + (f"; for {following}: {self.missing}" if following else "")


def lowest(levels: Iterable[Level]) -> Level:
    """The level of several plugins, such as those of a distribution; "none" where there are none."""
    return min(levels, key=LEVELS.index, default="none")


def badge(level: Level) -> str:
    """A level as an image in Markdown, for a README. Nothing is fetched here; whoever shows the README does."""
    return f"![trl-grpo-ext: {level}](https://img.shields.io/badge/trl--grpo--ext-{level}-{_COLOURS[level]})"


def following(count: int) -> str:
    """How many rules break as a consequence, in words."""
    return f"and {count} that follow{'s' * (count == 1)} from it"


_LISTED = 6


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]


def _shown(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def with_roots(violations: Sequence[Violation]) -> tuple[Violation, ...]:
    """Set for each violation which other one it follows from.

    A violation follows from an earlier one of the same cause (the same exception at the same line, the same part of the
    contract). A difference between two results also follows from any broken rule that its own rests on, directly or
    indirectly.
    """
    broken = {violation.rule.short: violation for violation in violations}
    first_of: dict[str, Violation] = {}
    found: dict[str, str] = {}

    def root(violation: Violation, seen: frozenset[str] = frozenset()) -> str:
        """The rule at the root of it; empty if that is its own."""
        name = violation.rule.short
        if name in found:
            return found[name]
        above = [broken[one] for one in violation.rule.rests_on if one in broken and one not in seen]
        if violation.cause:
            earlier = first_of[violation.cause]
            above = [] if earlier is violation else [earlier]
        found[name] = (root(above[0], seen | {name}) or above[0].rule.name) if above else ""
        return found[name]

    for violation in violations:
        if violation.cause:
            first_of.setdefault(violation.cause, violation)
    return tuple(replace(violation, follows=root(violation)) for violation in violations)


# ---------------------------------------------------------------------------------------------- running


class Broken(Exception):  # noqa: N818
    """A rule is broken.

    Args:
        message: What was wrong, with the values.
        example: The input, as text.
        cause: As `Violation` has it.
    """

    def __init__(self, message: str, example: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.message, self.example, self.cause = message, example, cause


class NotChecked(Exception):  # noqa: N818
    """A rule does not apply to this plugin; the message is the reason."""


class Checks:
    """The checks of one plugin. The method `shape` checks the rule `hook.shape`: it returns, or raises `Broken` or
    `NotChecked`.

    Attributes:
        trying: Called with each input, as text, before the plugin is tried on it, to know it if the plugin hangs.
        timeout: Seconds per rule that the plugin declares, or None.
    """

    timeout: float | None = None

    def __init__(self) -> None:
        self.trying: Callable[[str], None] = _ignore

    def measured(self) -> dict[str, float | str]:
        """Measurements made during the checks."""
        return {}

    def unshown(self) -> str:
        """Why the checks do not show that the plugin does anything; empty if they do."""
        return ""

    def check(self, rule: Rule) -> dict[str, str]:
        """Check one rule.

        Returns:
            `{}` if it is kept; `skipped` and the reason if it does not apply; else the fields of `Broken`.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a plugin's warnings are for its users
                getattr(self, rule.short)()
        except NotChecked as reason:
            return {"skipped": str(reason)}
        except Broken as broken:
            return {"message": broken.message, "example": broken.example, "cause": broken.cause}
        return {}

    def over(self, items: Iterable[T], judge: Callable[[T], None], smaller: Callable[[T], Iterable[T]]) -> None:
        """Judge inputs; shrink the first that breaks the rule to the smallest that still does, and raise that.

        Args:
            items: Inputs, in the order in which they are tried.
            judge: Returns if all is well, else raises `Broken`. It must catch the plugin's exceptions itself.
            smaller: The next smaller versions of an input, the greatest steps first.
        """

        def tried(item: T) -> Broken | None:
            self.trying(str(item))
            try:
                judge(item)
            except Broken as broken:
                return broken
            return None

        for item in items:
            broken = tried(item)
            if broken is not None:
                raise shrink(item, broken, tried, smaller)


def _ignore(example: str) -> None:
    """Listen to nothing."""


def shrink(item: T, broken: Broken, tried: Callable[[T], Broken | None], smaller: Callable[[T], Iterable[T]]) -> Broken:
    """Greedily take smaller inputs that break for the same cause, until there is none. Deterministic."""
    until, tries, cause = time.monotonic() + _SECONDS, 0, broken.cause
    going = True
    while going:
        going = False
        for candidate in smaller(item):
            tries += 1
            if tries > _TRIES or time.monotonic() > until:
                return broken
            again = tried(candidate)
            if again is not None and again.cause == cause:
                item, broken, going = candidate, again, True
                break
    return broken


def describe_exception(error: BaseException) -> str:
    """Describe a plugin's exception in words; errors of this package keep their own message."""
    text = exception_text(error)
    if isinstance(error, TRLGRPOExtError):
        return f"{text}{_place(error)}"
    return (
        f"it raised {type(error).__name__}: {text}{_place(error)}"
        if text
        else (f"it raised {type(error).__name__}{_place(error)}")
    )


def cause_of(error: BaseException) -> str:
    """A key that exceptions from the same mistake share."""
    if isinstance(error, PluginOutputError):
        return f"contract: {error.breaks}"
    frame = _frame(error)
    origin = error.__cause__ if isinstance(error, TRLGRPOExtError) and error.__cause__ is not None else error
    return f"{type(origin).__name__} at {frame.filename}:{frame.lineno}" if frame else type(origin).__name__


_OURS = Path(__file__).parents[1]


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest frame of the plugin's own code, or None."""
    origin = error.__cause__ if isinstance(error, TRLGRPOExtError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(origin.__traceback__)
    rooms = tuple(str(_OURS / room) for room in ("testing", "guard", "credit", "types.py"))
    installed = ("site-packages", "dist-packages", f"{Path(traceback.__file__).parent}")
    own = [one for one in frames if not one.filename.startswith(rooms)]
    theirs = [one for one in own if not any(part in one.filename for part in installed)]
    chosen = theirs or own
    return chosen[-1] if chosen else None


def _place(error: BaseException) -> str:
    frame = _frame(error)
    if frame is None or isinstance(error, PluginOutputError):
        return ""
    line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    name = Path(frame.filename).name
    text = f" ({name}, line {frame.lineno}{f': {line}' if line else ''})"
    return text if text.isprintable() and len(text) < 200 else f" ({shown(name)}, line {frame.lineno})"


def pickle_round_trip(plugin: Any) -> Any:
    """Pickle and unpickle a plugin.

    Raises:
        Broken: It does not pickle.
    """
    try:
        return pickle.loads(pickle.dumps(plugin))
    except Exception as error:  # pickle raises whatever the object's own methods raise
        hint = ". Define functions and classes at the top of a module, and open files, locks and models on first use."
        raise Broken(f"when it was pickled {describe_exception(error)}{hint}", cause="pickle") from error


def fresh_copy(plugin: Any) -> Any:
    """A deep copy with the plugin's state; the plugin itself if it cannot be copied."""
    try:
        return copy.deepcopy(plugin)
    except Exception:  # whatever a plugin's own __deepcopy__ or __reduce__ raises
        return plugin
