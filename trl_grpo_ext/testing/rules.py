"""The rules of the conformance kit: what each requires and why, and how one is checked.

Nothing here imports torch, so rules can be listed at once, and a reward without torch is checked without it.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..errors import ConfigurationError, PluginOutputError, PluginRunError, TRLGRPOExtError
from ..guard.outcomes import exception_text, source_line
from ..plugins.kinds import FACTS, Kind

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """One thing that a plugin of a kind must do."""

    name: str  # `reward.neighbours` and the like; stable
    kind: Kind
    summary: str  # what it requires, in one line
    why: str  # what goes wrong in training if a plugin breaks it

    @property
    def short(self) -> str:
        return self.name.partition(".")[2]


GATES = ("run", "determinism", "odd_batches")  # if one is broken, a difference after it would say nothing

_SHARED = """
determinism: the same input gives the same result, unless it declares `deterministic=False`. Why: Ranks would differ,
  and runs could not be repeated.
odd_batches: goes on where rewards are equal or missing, and completions empty, masked or of one token, and gives
  finite numbers. Why: Divided by a spread or a length of 0, one NaN spoils every weight of the model.
padding: neither more padding nor what stands off the mask changes anything. Why: Both change with the neighbours.
long: completions of 64 to 4,096 tokens give finite numbers, the same in float32 as in float64. Why: Exponentials of
  sums over tokens overflow, and powers of lengths vanish.
dtype: takes log-probabilities in bfloat16 and float16. Why: numpy, for one, does not know bfloat16.
order: the order of the completions does not matter. Why: It is an accident of sampling, and group ids are mere names.
ranks: gives the same on one rank as on two and three, also where groups are spread over ranks, and calls gather
  equally often on each. Why: Statistics over a rank's own rows change with the number of GPUs.
"""
"""Rules of several kinds."""

_TEXT: Mapping[Kind, str] = {
    "reward": """
run: takes what TRL passes and returns for each completion a finite float32 number or None. Why: TRL passes every
  column of the dataset to every reward (take the rest as **columns), reads NaN as None, and stops at what is no
  number.
determinism
neighbours: a completion's score depends neither on the others in the batch or their columns nor on its place, unless
  it declares `per_completion=False`. Why: Batch size and ranks decide which completions meet in a call.
inputs: does not change its arguments. Why: The other rewards, the loss and the logs get the same lists.
formats: a completion as a string and as a list of one message gets the same score. Why: If prompts are conversations,
  TRL passes messages, and a reward for strings then scores the list's brackets.
hostile_text: no text that a model can write makes it raise or break its contract. Why: A policy writes every text
  sooner or later: none at all, lone surrogates, ten thousand digits, brackets that never close.
parts: the names of its `Parts` come again in other completions. Why: Parts are compared with those of the same name: a
  name that stands for one completion alone is never paid.
outcomes: a reference of None does not score like a wrong answer, and costs no other row anything. Why: It would teach
  the policy that right answers are wrong. Say None.
threads: gives the same scores off the main thread, and to two threads at once. Why: signal.alarm does not work there,
  and what one call leaves for the next gets mixed up.
global_state: leaves random generators, directory, environment, signal handlers and torch's settings alone. Why:
  random.seed(0) in a reward makes every rank sample alike from then on.
""",
    "advantage_hook": """
run: runs with what it declares in `needs`, changes no input, and returns one advantage per token, (B, T), or spans; a
  shaper rewards, (B,) or (B, T); no metric of its own has the name of a run's
determinism
odd_batches
role: an estimator ignores the incoming advantages, a transform uses them, and a mask (`last=True`) sets tokens to 0 by
  sign or position, not by size. Why: The chain orders hooks by role; a transform that overwrites discards what came
  before.
equal_rewards: an estimator gives groups of equal rewards exactly 0, or something that is clearly not rounding. Why: A
  group with 3e-8 is trained on and counts in denominators.
dtype: keeps dtype and device of the advantages, and takes log-probabilities in bfloat16 and float16. Why: A float64
  result makes the loss float64, and one on the CPU stops a run on a GPU.
padding
long
order
ranks
micro_batches: with `independent=True`, on_forward gives a completion the same next to any. Why: Compact updates do so.
state: what it remembers goes through JSON and back: state_dict and load_state_dict, both or neither. Why: A run that
  resumes from a checkpoint must go on as if it had not stopped.
evaluation: evaluation does not change what it remembers. Why: Evaluating more often must not change the training.
""",
    "loss_aggregation": """
run: runs, changes no input, and returns weights (B, T), none negative, zero off the mask; or a scalar that keeps the
  losses' graph
determinism
odd_batches
live: a batch with live tokens has some weight. Why: A loss of zero trains nothing, and nothing says so.
padding
long
dtype
micro_batches: the loss does not depend on how a rank's rows are cut into micro-batches. Why: Memory decides the cut,
  and would decide the gradient. A reduce is checked only if it needs "step_totals".
order
ranks
totals: counts by rollout.totals: completions that are in no total change nothing. Why: `skip_zero_variance: true`
  takes groups without signal out of mask and totals, and counting rows brings them back.
""",
    "group_filter": """
run: runs, changes no input, and says the same of all completions of a group: True, False or a short reason
determinism
odd_batches
padding
ranks
""",
    "token_loss": """
run: runs with what it declares in `needs`, changes no input, and returns (B, T) with the log-probabilities' graph
determinism
odd_batches
padding
long
dtype
ranks
""",
    "prompt_sampler": """
run: draws as many different row numbers of the pool as it is asked for, and observes, for several rounds
determinism
exhausted: draw returns None only where no prompts are left: not at first, then always. Why: None ends the training.
odd_pools: goes on with as many rows as a draw has, without any reward, and where a column is None; it remembers no
  NaN. Why: Late in a run few prompts are left, and a mean that once was NaN stays it.
state: what it remembers goes through JSON, and a resumed run draws what the uninterrupted one does. Why: As for hooks.
start: forgets what an earlier training left. Why: A second call of train begins a new training.
""",
}
"""By kind, in the order in which they are checked: `name: summary. Why: reason`, or a name in `_SHARED`."""


def _read(kind: Kind, text: str, shared: Mapping[str, Rule]) -> Iterator[Rule]:
    for entry in re.split(r"\n+(?! )", text.strip()):
        name, _, words = " ".join(entry.split()).partition(": ")
        summary, _, why = words.partition(". Why: ")
        why = why or "What fails here fails in the first training step."
        if name in shared and not words:
            summary = shared[name].summary
            why = shared[name].why
        yield Rule(f"{FACTS[kind].word}.{name}", kind, summary, why)


_BY_NAME = {rule.short: rule for rule in _read("reward", _SHARED, {})}
RULES: tuple[Rule, ...] = tuple(rule for kind, text in _TEXT.items() for rule in _read(kind, text, _BY_NAME))
"""All rules, in the order in which they are checked."""


def rules_of(kind: Kind, names: Iterable[str] | None = None) -> tuple[Rule, ...]:
    """The rules of a kind, or those with the given names; a `ConfigurationError` if there is none of such a name."""
    of_kind = {rule.name: rule for rule in RULES if rule.kind == kind}
    wanted = of_kind if names is None else [names] if isinstance(names, str) else [*names]
    for name in wanted:
        if name not in of_kind:
            raise ConfigurationError(f"There is no rule {name!r} for this kind; there are {', '.join(of_kind)}.")
    return tuple(rule for name, rule in of_kind.items() if name in wanted)


class Broken(BaseException):
    """A rule is broken: what was wrong, with the values, and the input. No plugin's `except Exception` gets it."""

    def __init__(self, message: str, example: object = "") -> None:
        super().__init__(message)
        self.message = message
        self.example = str(example)


class NotChecked(Exception):  # noqa: N818
    """A rule does not apply to this plugin; the message is the reason."""


def only_if(applies: object, reason: str) -> None:
    if not applies:
        raise NotChecked(reason)


Finding = Broken | NotChecked | None  # what came of checking one rule; None if the plugin keeps it


class Checks:
    """The checks of one plugin: its method `padding` checks `hook.padding`, and raises `Broken` or `NotChecked`."""

    name = ""  # of the plugin, in reports
    timeout = 0.0  # seconds per rule
    example = ""  # the input that the plugin is being tried on, as text
    deterministic = True
    plugin: Any

    def no_effect(self) -> str:
        """Why the checks do not show that the plugin does anything; empty if they do."""
        return ""

    def check(self, rule: Rule) -> Finding:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a plugin's warnings are for its users
                getattr(self, rule.short)()
        except (Broken, NotChecked) as finding:
            return finding.with_traceback(None)
        return None

    def _over(self, inputs: Iterable[T], judge: Callable[[T], Any], where: str = "") -> None:
        """Judge inputs one after the other; `where` says in which of the rule's trials that was."""
        for tried in inputs:
            self.example = str(tried)
            with plugin_code(tried, after=f" ({where})" if where else ""):
                judge(tried)

    def _comparable_only(self) -> None:
        """Leave a rule out that compares two results, where they may differ for another reason."""
        only_if(self.deterministic, "it declares deterministic=False")
        only_if(self._is_copyable(), "it cannot be copied, so its results are not compared")

    def _copy(self) -> Any:
        """A copy with the state of now; the plugin itself if it cannot be copied, and then no results are compared."""
        with suppress(Exception):  # whatever a plugin's own methods raise
            return copy.deepcopy(self.plugin)
        return self.plugin

    def _is_copyable(self) -> bool:
        return self._copy() is not self.plugin


def over(inputs: str, *, compares: bool = False) -> Callable[[Callable[[Any, Any], Any]], Callable[[Any], None]]:
    """Make a rule of a method that judges one of `inputs`, and that may compare two results."""

    def rule_of(judge: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
        def rule(checks: Checks) -> None:
            if compares:
                checks._comparable_only()
            checks._over(getattr(checks, inputs), partial(judge, checks))

        return rule

    return rule_of


@contextmanager
def plugin_code(example: object, before: str = "", after: str = "") -> Iterator[None]:
    """What a plugin raises in this block, `SystemExit` too, is `Broken`; the texts say when it was raised."""
    try:
        yield
    except (Broken, NotChecked, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error.__cause__, Broken):  # the time limit, as the flow passes it on
            raise error.__cause__ from None
        raise Broken(f"{before}{describe_exception(error)}{after}", example) from error


def describe_exception(error: BaseException) -> str:
    """Describe a plugin's exception in words; errors of this package keep their own message."""
    text = exception_text(error)
    if not isinstance(error, TRLGRPOExtError):
        text = f"it raised {type(error).__name__}{f': {text}' if text else ''}"
    if isinstance(error, PluginOutputError | PluginRunError):  # which says it already
        return text
    return text + source_line(error.__cause__ or error if isinstance(error, TRLGRPOExtError) else error)


def through_json(state: Any) -> Mapping[str, Any]:
    """What a plugin remembers, as a checkpoint gives it back; `Broken` if it is no mapping of JSON values."""
    try:
        travelled = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise Broken(f"state_dict() is not a mapping of JSON values: {error}", f"{state!r:.200}") from error
    if not isinstance(travelled, Mapping):
        raise Broken(f"state_dict() must be a mapping, and is {type(state).__name__}", f"{state!r:.200}")
    return travelled
