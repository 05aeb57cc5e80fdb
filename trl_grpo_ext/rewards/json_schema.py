"""Does the completion hold JSON that a schema accepts?"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, shown
from ..guard.parameters import choice, number, optional_module, seconds, text, whole
from ..guard.parameters import column as checked_column
from ..guard.workers import Done, WorkerPool
from ..types import Part, Parts, RewardDeclaration
from ._judged import ABOUT_A_REFERENCE, IN_A_WORKER, Judged
from ._text.json_text import EXTRACTS, AmbiguousError, RefusedError, depth_of, find_short_json, read_json, read_located

_DEEPEST = 50  # to which jsonschema can follow any schema that does not apply itself without end


class JSONSchema(Judged, kw_only=False):
    """Score 1.0 where the completion's JSON is valid under a schema, `partial` where it only parses, 0.0 elsewhere.

    Parsing and validation run in worker processes that are killed after `timeout` seconds of CPU time. JSON is read
    strictly: `NaN` is invalid, and so is an object with a repeated key. The package jsonschema validates, by the draft
    that `$schema` names, else 2020-12, but `multipleOf` is about decimals: 19.99 is a multiple of 0.01. `format` is an
    annotation. `$ref` points into the schema: nothing is fetched.

    Args:
        schema: The schema, or the path of its file. Without it, each row has its own in the column `column`.
        column: The dataset's column of schemas, as JSON text.
        extract: Where the JSON is. "fence": inside the last closed fence marked `json`, or else the last unmarked one,
            after the thinking (`</think>`) if a fence follows it.
            "whole": the whole completion. "last": the last closed object that is not part of another value.
        partial: The score of JSON that parses but is not valid; `outcomes: {wrong: ...}` overrides it. If it is not 0,
            each of the schema's own `properties` is a part, 1 if its value is valid, else 0; its place is the value.
            One that is missing scores 0 if it is required, else it does not apply.
        max_characters: Longer JSON is refused, and so is a completion more than ten times as long.
        max_depth: JSON with deeper nesting is refused.
        timeout: CPU seconds that one completion may take.
        outcomes: Values of the outcomes `right`, `wrong`, `no_answer` (no JSON), `unparseable_reference` (the schema is
            none, refers to what it does not hold, or applies itself without end), `refused`, `timeout`, `died` and
            `error`.
    """

    __name__ = "json_schema"
    can = (*ABOUT_A_REFERENCE, *IN_A_WORKER)
    reads = "the schema"
    declares = RewardDeclaration(
        conformance={
            "parameters": {"schema": {"properties": {"answer": {}}, "required": ["answer"]}, "partial": 0.2},
            "completions": ['```json\n{"answer": 18}\n```', '```json\n{"unit": "eggs"}\n```', '{"answer": 18}', "18"],
        }
    )

    schema: Mapping[str, Any] | bool | str | Path | None = None
    _: KW_ONLY
    column: str = text("schema")
    extract: str = choice(*EXTRACTS)
    partial: float = number(0.0, "a finite number")
    max_characters: int = whole(100_000, lowest=1)
    max_depth: int = whole(50, lowest=1)
    timeout: float = seconds(2.0)

    def __post_init__(self) -> None:
        self.schema = None if self.schema is None else _checked_schema(self.schema)
        optional_module("json_schema", "jsonschema")
        self.usual = {Outcome.WRONG: self.partial}  # type: ignore[misc]
        super().__post_init__()
        task = functools.partial(verdict, self.extract, self.max_characters, self.max_depth, self.partial != 0)
        self._pool = WorkerPool(task, name="json_schema")

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        if self.schema is None:
            advice = "Give json_schema a schema, or name the column that has each row's."
            column = checked_column("json_schema", self.column, columns, len(completions), advice)
            schemas = [given if isinstance(given, str) else f"{given!r:.60}, not text" for given in column]
        else:
            schemas = [json.dumps(self.schema)] * len(completions)
        jobs = list(zip(schemas, map(completion_text, completions), strict=True))
        judged = {job: Judgement(Outcome.UNPARSEABLE, why) for job in dict.fromkeys(jobs) if (why := _problem(job[0]))}
        waiting = [job for job in dict.fromkeys(jobs) if job not in judged]
        done = self._pool.run(waiting, allowance=self.timeout)
        judged |= {job: self._judged(job[0], one) for job, one in zip(waiting, done, strict=True)}
        return [judged[job] for job in jobs]

    def _judged(self, schema: str, done: Done) -> Judgement:
        name, detail, found = done.value if done.status == "done" else (done.status, done.detail, {})
        properties, required = _properties(schema) if self.partial else ([], set())
        parts = []
        for each in properties:
            score, place = found.get(each, (0.0 if each in required else None, None))
            parts.append(Part(each, score, 1.0, place))
        return Judgement(Outcome(name), detail, Parts(parts, 0.0) if parts else None)


@functools.lru_cache(maxsize=1024)
def _problem(schema: str) -> str:
    try:
        loaded = json.loads(schema)
        if not isinstance(loaded, dict | bool):  # a path, say
            return f"{shown(schema[:60])} is no schema"
        _checked_schema(loaded)
    except (ConfigurationError, ValueError, RecursionError) as error:
        return f"{shown(schema[:60])}: {str(error)[:200]}"
    return ""


@functools.lru_cache(maxsize=1024)
def _properties(schema: str) -> tuple[list[str], set[str]]:
    loaded = json.loads(schema)
    own = loaded if isinstance(loaded, dict) else {}
    required = own.get("required")
    return [name for name in own.get("properties", {}) if name], set(required if isinstance(required, list) else ())


# An outcome, why, and the schema's properties that are there: 1 where it is valid, and where its value stands.
_Verdict = tuple[str, str, dict[str, tuple[float, tuple[int, int]]]]


def verdict(extract: str, max_characters: int, max_depth: int, by_property: bool, job: tuple[str, str]) -> _Verdict:
    """The outcome of one completion under one schema. Runs in a worker."""
    schema, completion = job
    try:
        where = find_short_json(completion, extract, max_characters)
        if where is None:
            return Outcome.NO_ANSWER.value, "no JSON", {}
        text = completion[slice(*where)]
        instance = read_json(text, max_depth)
    except AmbiguousError as error:
        return Outcome.WRONG.value, str(error), {}
    except RefusedError as error:
        return Outcome.REFUSED.value, str(error), {}
    except ValueError as error:
        return Outcome.NO_ANSWER.value, f"no JSON: {shown(str(error))}", {}
    names = set(_properties(schema)[0]) if by_property and isinstance(instance, dict) else set()
    broken = set()
    try:
        errors = _validator(schema).iter_errors(instance)
        problem = next(errors, None)
        if names and problem is not None:
            broken = {error.path[0] for error in (problem, *errors) if error.path}
    except MemoryError:
        raise  # the worker's limit
    except Exception as error:  # what jsonschema makes of deep JSON, or of a reference that leads nowhere
        said = f"jsonschema cannot check it: {type(error).__name__}: {shown(str(error))}"
        return (Outcome.REFUSED if depth_of(text) > _DEEPEST else Outcome.UNPARSEABLE).value, said, {}
    members = read_located(completion, *where, max_depth).members if names else ()
    there = [(str(name), one) for name, one in members if name in names]
    found = {name: (float(name not in broken), (one.start, one.end)) for name, one in there}
    if problem is None:
        return Outcome.RIGHT.value, "", found
    return Outcome.WRONG.value, f"breaks {problem.validator!r} at {shown(problem.json_path)}", found


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    loaded = json.loads(schema)
    registry = optional_module("json_schema", "jsonschema_specifications").REGISTRY
    draft = _draft(loaded)
    if isinstance(loaded, dict):
        loaded.pop("$schema", None)  # by which a reference to all of it would lead back to the draft's own arithmetic
    decimals = {name: _multiple_of for name in ("multipleOf", "divisibleBy") if name in draft.VALIDATORS}
    extended = optional_module("json_schema", "jsonschema.validators").extend(draft, decimals)
    return extended(loaded, registry=registry)  # with the standard's own schemas; nothing is fetched


def _multiple_of(validator: Any, divisor: Any, instance: Any, _: Any) -> Iterator[Any]:
    """The keyword in decimals: in doubles, 19.99 / 0.01 is no integer."""
    if validator.is_type(instance, "number") and Fraction(repr(instance)) % Fraction(repr(divisor)):
        yield optional_module("json_schema", "jsonschema").ValidationError(f"no multiple of {divisor}")


def _draft(schema: Any) -> Any:
    validators = optional_module("json_schema", "jsonschema.validators")
    return validators.validator_for(schema, default=validators.Draft202012Validator)


def _checked_schema(schema: Any) -> Any:
    exceptions = optional_module("json_schema", "jsonschema.exceptions")
    try:
        if isinstance(schema, str | Path):
            loaded = json.loads(Path(schema).read_text(encoding="utf-8"))
        else:
            loaded = json.loads(json.dumps(schema, default=dict, allow_nan=False))
        if not isinstance(loaded, dict | bool):
            raise TypeError(f"a {type(loaded).__name__} is none")
        draft = _draft(loaded)
        draft.check_schema(loaded, format_checker=draft.FORMAT_CHECKER)
    except exceptions.SchemaError as error:
        raise ConfigurationError(f"json_schema: not valid at {error.json_path}: {error.message[:200]}") from error
    except (OSError, TypeError, ValueError, RecursionError, OverflowError) as error:
        wanted = "a mapping of JSON values or the path of a JSON file"
        raise ConfigurationError(f"json_schema: schema must be {wanted}, got {schema!r:.200}: {error}.") from error
    return loaded
