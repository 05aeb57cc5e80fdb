"""The rules of the conformance kit: what each requires and why, and how one is checked.

Nothing here imports torch, so rules can be listed at once, and a reward without torch is checked without it.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigurationError, PluginContractError, PluginOutputError, TRLGRPOExtError
from ..guard.outcomes import exception_text
from ..plugins.checking import check_contract
from ..plugins.kinds import FACTS, Kind

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """One thing that a plugin of a kind must do.

    `rests_on` has the short names of earlier rules on which its comparisons depend: if one of those is broken, a
    difference would say nothing, and this rule is not checked.
    """

    name: str  # `reward.length` and the like; stable
    kind: Kind
    summary: str  # what it requires, in one line
    why: str  # what goes wrong in training if a plugin breaks it
    rests_on: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The name without its kind: `length`."""
        return self.name.partition(".")[2]


GATES = frozenset({"call", "length", "types", "form", "run", "shape", "determinism"})
"""Rules on which all those after them rest."""

_OF_TENSORS = """
gathers: calls gather equally often on every rank. Why: A rank that gathers under a condition on its own rows leaves the
  others waiting for ever.
inputs: writes to none of the tensors that it is given. Why: The other plugins, the loss and the logs read the same
  tensors.
pickle: pickles. Why: Launchers and workers send the trainer's parts to other processes.
"""
"""The rules of all kinds but rewards, after their own."""

_TEXT: Mapping[Kind, str] = {
    "reward": """
call: can be called as TRL calls it: prompts, completions, completion_ids, every column, trainer_state, log_extra and
  log_metric, by keyword. Why: TRL passes every column of the dataset to every reward. One that names only the columns
  it knows fails on the first other dataset: take the rest as **columns.
run: scores ordinary completions without raising, exiting or hanging. Why: What fails here fails in the first training
  step.
length: returns one value per completion, for one completion and for many. Why: TRL stops the run where the number of
  rewards is not the number of completions.
types: each value is a finite number that fits float32, or None. Why: TRL makes a float32 tensor of the values. NaN
  silently means None there, infinity spoils the advantages of the whole group, and a string stops the run.
determinism: the same call gives the same scores, also after other calls, unless it declares `deterministic=False`. Why:
  A reward that remembers texts scores by the order of sampling, and undeclared randomness is noise in every advantage.
neighbours: a completion's score does not depend on the others in the batch or their columns, nor on its place among
  them, unless it declares `per_completion=False`. Why: Which completions meet in a call depends on batch size and
  ranks, and one that reads the first row's reference compares every prompt's completions with one answer.
inputs: does not change its arguments. Why: The other rewards, the loss and the logs get the same lists.
formats: a completion as a string and as a list of one message gets the same score. Why: TRL passes lists of messages if
  the prompts are conversations. A reward that reads only strings then scores the list's brackets.
none (rests on neighbours): a column's value may be None in one row, which then costs no other row anything. Why:
  Datasets merged from several sources have None in the columns that one of them lacks.
hostile_text: no text that a model can write makes it raise or break its contract. Why: A policy writes every text
  sooner or later: none at all, control characters, lone surrogates, ten thousand digits, brackets that never close.
parts: the parts of `Parts` stand within the completion's text, also within hostile text, and have names that come again
  in other completions. Why: A place outside the text stops the run, and parts are compared with those of the same name:
  a name that stands for one completion alone is never paid.
outcomes (rests on none): an unreadable reference does not score like a wrong answer. Why: A broken reference that reads
  as 0 teaches the policy that right answers are wrong. Say None.
pickle: pickles, and scores the same afterwards. Why: Guards run a reward in worker processes, and launchers send it to
  other ranks. Lambdas, open files and locks don't travel.
threads: gives the same scores off the main thread, and to two threads at once. Why: A reward may be called from any
  thread. signal.alarm does not work there, and what one call leaves for the next gets mixed up.
global_state: leaves random generators, working directory, environment, signal handlers, locale and torch's settings as
  they were. Why: random.seed(0) in a reward makes every rank sample alike from then on.
""",
    "advantage_hook": """
form: has a role and its method, on_rewards, on_rollout or on_forward, with their parameters, and no misspelt
  declaration. Why: The chain is built by roles, the trainer calls these methods and no other, and what nobody reads has
  no effect.
run: runs on an ordinary generation batch and on an ordinary micro-batch. Why: What fails here fails in the first
  training step.
needs: declares in `needs` what it reads. Why: Log-probabilities that nobody needs are not computed, so the hook finds
  None in the first step of a run whose configuration was checked.
shape: returns one advantage per token, (B, T), or spans from on_rollout; a shaper one reward per completion, (B,), or
  per token, (B, T). Why: The loss takes (B, T). A result that only broadcasts would pay the wrong tokens.
determinism: the same batch gives the same advantages, unless it declares `deterministic=False`. Why: Each rank would
  draw its own, and runs cannot be repeated.
role: an estimator ignores the incoming advantages, a transform uses them, and a mask (`last=True`) sets tokens to 0
  by sign or position, not by the size of the advantage. Why: The chain puts hooks in the order of their roles: a
  transform that overwrites discards what came before, and zeros that depend on the size cannot be kept after the
  forward stage.
equal_rewards (rests on role): an estimator gives groups of equal rewards exactly 0, or something that is clearly not
  rounding. Why: What has an advantage has signal: a group with 3e-8 is trained on and counts in denominators.
dtype: keeps the dtype and the device of the incoming advantages, float32 and float64, and takes log-probabilities in
  bfloat16 and float16. Why: A float64 result makes the loss float64, one on the CPU stops a run on a GPU, and numpy,
  for one, does not know bfloat16.
finite: gives finite advantages where rewards are all equal, missing or negative, and for empty and one-token
  completions. Why: Division by a spread of zero gives NaN, and one NaN in the loss spoils every weight.
padding: neither more padding nor what stands off the mask changes anything. Why: A batch is as wide as its longest
  completion, and padding holds whatever the model computes there: both change with the neighbours.
long (rests on finite, padding): gives finite advantages that float32 can hold for completions of 64 to 4,096 tokens,
  and the same in float64. Why: Sums over tokens grow with the length: exponentials of them overflow, powers of it
  vanish.
order: neither the order of a group's completions nor that of the groups matters. Why: Both are accidents of sampling;
  group ids are names, not numbers to calculate with.
split (rests on order): on_rollout gives the same on one rank as on two and three, also where groups are spread over
  ranks. Why: Statistics over the rank's own rows change with the number of GPUs, and of a group on two ranks each sees
  a half. Gather first.
micro_batches (rests on order): with `independent=True`, on_forward gives each completion the same next to any
  others. Why: Compact updates rely on it to put other completions next to it.
state: what it remembers goes through JSON and back: state_dict and load_state_dict, both or neither. Why: A run that
  resumes from a checkpoint must go on as if it had not stopped.
evaluation: evaluation does not change what it remembers. Why: Evaluating more often must not change the training.
"""
    + _OF_TENSORS,
    "loss_aggregation": """
form: has exactly one of weights and reduce, with their parameters, and no misspelt declaration. Why: The trainer must
  know which of the two is meant, and what nobody reads has no effect.
run: runs on an ordinary batch. Why: What fails here fails in the first training step.
shape: weights returns a floating point tensor (B, T), reduce a scalar tensor. Why: A weight per completion would
  broadcast, or not, with the batch that happens to come.
determinism: the same batch gives the same weights, unless it declares `deterministic=False`. Why: Each rank would
  draw its own, and runs cannot be repeated.
finite: gives finite numbers, and reduce a finite gradient, also where completions have no live token or the whole batch
  has none. Why: Truncated
  completions are masked whole. Dividing by their length of zero gives NaN, which spoils every weight of the model.
non_negative: no weight is negative. Why: A negative weight flips the token's advantage: the policy unlearns what was
  right.
mask: weights are zero off the mask; so is the gradient of reduce. Why: Padding and what a tool wrote would be trained
  on.
live: a batch with live tokens has some weight. Why: A loss of zero trains nothing, and nothing says so.
padding (rests on mask): neither more padding nor what stands off the mask changes anything. Why: A batch is as wide as
  its longest completion, and padding holds whatever the model computes there: both change with the neighbours.
long (rests on finite, padding): gives finite weights that float32 can hold for completions of 64 to 4,096 tokens, and
  the same in float64. Why: What is right for ten tokens overflows or vanishes at four thousand.
dtype: also takes masks, advantages, losses and log-probabilities in bfloat16 and float16. Why: numpy, for one, does not
  know bfloat16.
micro_batches: the loss does not depend on how a rank's rows are cut into micro-batches. Why: Memory decides the cut,
  and would decide the gradient. A reduce is checked only if it needs "step_totals".
order: the order of the completions does not matter. Why: Their order is an accident of sampling.
ranks (rests on order): the loss is the same on one rank as on two and three, also where groups are spread over ranks.
  Why: Counting the rank's own rows makes the gradient depend on the number of GPUs. Divide by rollout.totals.
totals (rests on ranks, order): counts by rollout.totals: completions that are in no total change nothing. Why:
  `skip_zero_variance: true` takes groups without signal out of the mask and out of the totals. Counting rows in any
  other way brings them back.
gradient: reduce keeps the graph of the losses. Why: A detached loss trains nothing, and nothing says so.
step_totals: reduce works where totals.step is None, or it declares that it needs them. Why: In runs whose
  optimizer steps don't lie within one generation batch these counts don't exist.
"""
    + _OF_TENSORS,
    "group_filter": """
form: has keep, with its parameter, and no misspelt declaration. Why: The trainer asks by this method, and what nobody
  reads has no effect.
run: runs on an ordinary batch. Why: What fails here fails in the first training step.
shape: keep returns (B,), bool; or for each completion True, False or a short reason. Why: Reasons are names of metrics;
  anything else has no meaning to a run.
determinism: the same batch gives the same answer, unless it declares `deterministic=False`. Why: Ranks that disagree
  on a group cannot put one batch together.
odd_batches: answers on batches with equal rewards, missing rewards, empty completions, or no token that counts. Why:
  Filters are made for these: late in a run there are many.
groups: gives all completions of a group the same answer. Why: A group is trained on whole or not at all.
padding: the answer depends neither on how far rows are padded nor on what stands there. Why: Each round is padded by
  itself.
ranks (rests on groups): gives the same answer on one rank as on two and three, also if groups are spread over ranks.
  Why: Ranks that disagree on a group cannot put one batch together. Gather what decides.
"""
    + _OF_TENSORS,
    "token_loss": """
form: has loss, with its parameter, and no misspelt declaration. Why: The trainer asks by this method, and what nobody
  reads has no effect.
run: runs on an ordinary batch. Why: What fails here fails in the first training step.
needs: declares in `needs` what it reads. Why: Log-probabilities that nobody needs are not computed, so it finds None in
  the first step of a run whose configuration was checked.
shape: loss returns a floating point tensor (B, T); on_rollout and measures return such tensors by name. Why: A loss per
  completion would broadcast, or not, with the batch that happens to come.
determinism: the same batch gives the same losses, unless it declares `deterministic=False`. Why: Each rank would draw
  its own, and runs cannot be repeated.
gradient: keeps the graph of the log-probabilities. Why: A detached loss trains nothing, and nothing says so.
finite: losses and their gradient are finite, also where the policy is the one that sampled, and where completions are
  empty or rewards equal or missing. Why: One NaN in the gradient spoils every weight of the model.
padding: neither more padding nor what stands off the mask changes anything. Why: A batch is as wide as its longest
  completion, and padding holds whatever the model computes there: both change with the neighbours.
long (rests on finite, padding): gives losses that float32 can hold for completions of 64 to 4,096 tokens, and the same
  in float64. Why: Products of ratios over a completion overflow or vanish with its length.
dtype: also takes log-probabilities in bfloat16 and float16. Why: numpy, for one, does not know bfloat16.
independent: with `independent=True`, a completion's losses are the same next to any others. Why: Compact updates rely
  on it to put other completions next to it. Compute what is common to a batch in on_rollout.
needs_advantage: with `needs_advantage=True`, losses and gradient are 0 where a completion has no advantage. Why:
  Compact updates leave such completions out.
split (rests on independent): what on_rollout carries along is the same on one rank as on two and three. Why: Statistics
  over the rank's own rows change with the number of GPUs. Gather first.
"""
    + _OF_TENSORS,
    "prompt_sampler": """
form: has start, draw, observe, state_dict and load_state_dict, with their parameters, and no misspelt declaration. Why:
  The trainer calls these methods and no other, and what nobody reads has no effect.
run: draws and observes several rounds without raising. Why: What fails here fails in the first training step.
shape: draw returns as many different row numbers of the pool as it was asked for, or None. Why: All ranks share what
  is drawn, and a prompt that is drawn twice in a round counts twice in it.
determinism: the same pool and outcomes give the same draws, unless it declares `deterministic=False`. Why: No state of
  a generator is saved, so a resumed run would get other prompts. Draw from the pool's seed and the round.
exhausted: draw returns None only where the prompts are exhausted: never at first, and from then on always. Why: None
  ends the training.
odd_pools: goes on with as many rows as a draw has, where no completion has a reward, and where a column is None; it
  remembers no NaN. Why: Tests have few rows, and late in a run few prompts are left. A mean that once was NaN stays it.
state: what it remembers goes through JSON and back, and a run resumed before any round draws what the uninterrupted one
  does. Why: A run that resumes from a checkpoint must go on as if it had not stopped.
start: forgets at start what an earlier training left. Why: A second call of train begins a new training.
metrics: gives finite numbers by name, if it has metrics, also before the first draw. Why: They are logged as they are.
pickle: pickles before it is started. Why: Launchers send the trainer's parts to other processes.
""",
}
"""By kind, in the order in which they are checked: `name (rests on other, rules): summary. Why: reason`."""

_RULE = re.compile(r"^(\w+)(?: \(rests on ([^)]+)\))?: (.+?)\. Why: (.+)$")


def _read(kind: Kind, text: str) -> Iterator[Rule]:
    for entry in re.split(r"\n+(?! )", text.strip()):
        found = _RULE.match(" ".join(entry.split()))
        assert found, entry
        name, rests_on, summary, why = found.groups(default="")
        yield Rule(f"{FACTS[kind].word}.{name}", kind, summary, why, tuple(rests_on.split(", ")) if rests_on else ())


RULES: tuple[Rule, ...] = tuple(rule for kind, text in _TEXT.items() for rule in _read(kind, text))
"""All rules, in the order in which they are checked."""


def rules_of(kind: Kind, names: Iterable[str] | None = None) -> tuple[Rule, ...]:
    """The rules of a kind, or those with the given names; a `ConfigurationError` if there is none of such a name."""
    of_kind = {rule.name: rule for rule in RULES if rule.kind == kind}
    if names is None:
        return tuple(of_kind.values())
    wanted = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in wanted if name not in of_kind]:
        known = ", ".join(of_kind)
        raise ConfigurationError(f"There is no rule {unknown[0]!r} for this kind of plugin; there are {known}.")
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
    """Leave a rule out, for this reason, unless it applies."""
    if not applies:
        raise NotChecked(reason)


Finding = Broken | NotChecked | None
"""What came of checking one rule; None if the plugin keeps it."""


class Checks:
    """The checks of one plugin: the method `shape` checks the rule `hook.shape`; it raises `Broken` or `NotChecked`."""

    name = ""  # of the plugin, in reports
    timeout: float | None = None  # seconds per rule, if the plugin declares them
    example = ""  # the input that the plugin is being tried on, as text
    deterministic = True

    def no_effect(self) -> str:
        """Why the checks do not show that the plugin does anything; empty if they do."""
        return ""

    def check(self, rule: Rule) -> Finding:
        """Check one rule."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a plugin's warnings are for its users
                getattr(self, rule.short)()
        except (Broken, NotChecked) as finding:
            return finding.with_traceback(None)
        return None

    def _contract(self, kind: Kind, plugin: Any) -> None:
        """What loading refuses of a plugin's form."""
        try:
            check_contract(kind, plugin, "it")
        except PluginContractError as error:
            raise Broken(str(error)) from error

    def _over(self, inputs: Sequence[T], judge: Callable[[T], Any], where: str = "", breaks: str = "") -> None:
        """Judge inputs one after the other; what the plugin raises is `Broken`, if this rule reports it.

        `where` says in which of the rule's trials that was; `breaks` is the part of the contract that the rule is for.
        """
        left_out: list[str] = []
        for tried in inputs:
            self.example = str(tried)
            try:
                judge(tried)
            except (Broken, NotChecked, KeyboardInterrupt):
                raise
            except BaseException as error:  # the plugin's own, whatever it is; SystemExit too
                if isinstance(error.__cause__, Broken):  # the time limit, as the flow passes it on
                    raise error.__cause__ from None
                other = self._reported_by(error, tried, breaks)
                if other is None:
                    after = f" ({where})" if where else ""
                    raise Broken(f"{describe_exception(error)}{after}", tried) from error
                left_out.append(other)
        if left_out and all(left_out) and len(left_out) == len(inputs):  # nothing was checked
            raise NotChecked(f"{left_out[0]} is broken")

    def _reported_by(self, error: BaseException, tried: Any, breaks: str) -> str | None:
        """None if the rule that is being checked reports this error; else the rule that does, empty if it kept its own.

        Here every rule reports all.
        """
        return None

    def _deterministic_only(self) -> None:
        only_if(self.deterministic, "it declares deterministic=False")


@contextmanager
def plugin_code(example: object, before: str = "", after: str = "") -> Iterator[None]:
    """What a plugin raises in this block, `SystemExit` too, is `Broken`; the texts say when it was raised."""
    try:
        yield
    except (Broken, NotChecked, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Broken(f"{before}{describe_exception(error)}{after}", example) from error


def describe_exception(error: BaseException) -> str:
    """Describe a plugin's exception in words; errors of this package keep their own message."""
    text = exception_text(error)
    if not isinstance(error, TRLGRPOExtError):
        text = f"it raised {type(error).__name__}{f': {text}' if text else ''}"
    return text if isinstance(error, PluginOutputError) else f"{text}{_source_line(error)}"


_OURS = Path(__file__).parents[1]
_ROOMS = tuple(str(_OURS / room) for room in ("testing", "guard", "credit", "types.py"))
_INSTALLED = ("site-packages", "dist-packages", str(Path(traceback.__file__).parent))


def _source_line(error: BaseException) -> str:
    """The deepest line of the plugin's own code."""
    origin = error.__cause__ if isinstance(error, TRLGRPOExtError) and error.__cause__ is not None else error
    own = [one for one in traceback.extract_tb(origin.__traceback__) if not one.filename.startswith(_ROOMS)]
    theirs = [one for one in own if not any(part in one.filename for part in _INSTALLED)]
    if not own:
        return ""
    frame = (theirs or own)[-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    line = frame.line or ""
    return f" ({place}: {line})" if 0 < len(line) < 160 and line.isprintable() else f" ({place})"


def pickle_round_trip(plugin: Any) -> Any:
    """Pickle and unpickle a plugin; `Broken` if it cannot be."""
    try:
        return pickle.loads(pickle.dumps(plugin))
    except Exception as error:  # pickle raises whatever the object's own methods raise
        hint = ". Define functions and classes at the top of a module, and open files, locks and models on first use."
        raise Broken(f"when it was pickled {describe_exception(error)}{hint}") from error


def fresh_copy(plugin: Any) -> Any | None:
    """A copy with the plugin's state; None if it cannot be copied."""
    with suppress(Exception):  # whatever a plugin's own methods raise
        return copy.deepcopy(plugin)
    return None


def through_json(state: Any) -> Mapping[str, Any]:
    """What a plugin remembers, as a checkpoint gives it back; `Broken` if it is no mapping of JSON values."""
    try:
        travelled = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise Broken(f"state_dict() is not a mapping of JSON values: {error}", f"{state!r:.200}") from error
    if not isinstance(travelled, Mapping):
        raise Broken(f"state_dict() must be a mapping, and is {type(state).__name__}", f"{state!r:.200}")
    return travelled
