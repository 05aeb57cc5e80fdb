"""Does the completion hold JSON that a schema accepts?"""

from __future__ import annotations

import functools
import graphlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..guard.messages import completion_text
from ..guard.outcomes import Judgement, Outcome, OutcomePolicy, shown
from ..guard.parameters import checked_choice, checked_number, checked_text, checked_whole, optional_module
from ..guard.parameters import column as checked_column
from ..guard.workers import Done, WorkerPool
from ..types import Part, Parts, RewardDeclaration
from ._judged import Judged
from ._text.json_text import EXTRACTS, AmbiguousError, RefusedError, find_json, read_json, read_located

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_OUTCOMES = (
    *(Outcome.RIGHT, Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNPARSEABLE),
    *(Outcome.REFUSED, Outcome.TIMEOUT, Outcome.DIED, Outcome.ERROR),
)


class JSONSchema(Judged):
    """Score 1.0 where the completion's JSON is valid under a schema, `partial` where it only parses, 0.0 elsewhere.

    Parsing and validation run in worker processes that are killed after `timeout` seconds of CPU time: a schema's
    patterns, its `uniqueItems` and its references to itself can take more than linear time on a model's text. JSON is
    read strictly: `NaN` is invalid, and so is an object with a repeated key, since parsers disagree on its meaning.

    The package jsonschema validates, by the draft that `$schema` names, else 2020-12. `format` is an annotation, as in
    the draft. References are never fetched: the target of `$ref` must be in the schema.

    Args:
        schema: The schema, or the path of its file. Without it, each row has its own in the column `column`.
        column: The dataset's column of schemas, as JSON text. (As mappings, `datasets` would give every row the keys of
            all rows.)
        extract: Where the JSON is. "fence": inside the last closed fence marked `json`, or else the last unmarked one.
            "whole": the whole completion. "last": the last closed object that is not part of another value.
        partial: The score of JSON that parses but is not valid; `outcomes: {wrong: ...}` overrides it. If it is not 0,
            each of the schema's own `properties` is a part, 1 if its value is valid, else 0; its place is the value.
            One that is missing scores 0 if it is required, else it does not apply.
        max_characters: Longer JSON is refused, and so is a completion more than ten times as long.
        max_depth: JSON with deeper nesting is refused.
        timeout: CPU seconds that one completion may take.
        outcomes: Values of the outcomes `right`, `wrong`, `no_answer` (no JSON), `unparseable_reference` (a row's
            schema is none that could be given as `schema`), `refused` (also for numbers that are too large for the
            schema's arithmetic), `timeout`, `died` and `error`.

    Raises:
        ConfigurationError: The schema cannot be read, is invalid, or has a reference that leads nowhere, to no schema,
            or back to itself without going into the JSON; a parameter is of the wrong kind; or jsonschema is not
            installed.
    """

    __name__ = "json_schema"
    reads = "the schema"
    declares = RewardDeclaration(
        conformance={
            "parameters": {"schema": {"properties": {"answer": {}}, "required": ["answer"]}, "partial": 0.2},
            "completions": ['```json\n{"answer": 18}\n```', '```json\n{"unit": "eggs"}\n```', '{"answer": 18}', "18"],
        }
    )

    def __init__(
        self,
        schema: Mapping[str, Any] | bool | str | Path | None = None,
        *,
        column: str = "schema",
        extract: str = "fence",
        partial: float = 0.0,
        max_characters: int = 100_000,
        max_depth: int = 50,
        timeout: float = 2.0,
        outcomes: Mapping[str, Any] | None = None,
    ) -> None:
        self.schema = None if schema is None else _checked_schema(_loaded(schema))
        optional_module("json_schema", "jsonschema")
        self.column = checked_text("json_schema: column", column)
        self.extract = checked_choice("json_schema: extract", extract, EXTRACTS)
        self.partial = checked_number("json_schema: partial", partial, "a finite number")
        self.max_characters = checked_whole("json_schema: max_characters", max_characters, 1)
        self.max_depth = checked_whole("json_schema: max_depth", max_depth, 1)
        self.timeout = checked_number("json_schema: timeout", timeout, "a positive number", lambda x: x > 0)
        self.policy = OutcomePolicy("json_schema", _OUTCOMES, outcomes, {Outcome.WRONG: self.partial})
        task = functools.partial(verdict, self.extract, self.max_characters, self.max_depth, self.partial != 0)
        self._pool = WorkerPool(task, name="json_schema")

    def judge(self, completions: Sequence[Any], **columns: Any) -> list[Judgement]:
        """The outcomes of `B` completions; a `RewardError` where there is no schema."""
        if self.schema is None:
            advice = "Give json_schema a schema, or name the column that has each row's."
            column = checked_column("json_schema", self.column, columns, len(completions), advice)
            schemas = [given if isinstance(given, str) else f"{given!r:.60}, not text" for given in column]
        else:
            schemas = [json.dumps(self.schema)] * len(completions)
        jobs = list(zip(schemas, map(completion_text, completions), strict=True))
        distinct = dict.fromkeys(jobs)
        judged = {job: known for job in distinct if (known := self._known(*job)) is not None}
        waiting = [job for job in distinct if job not in judged]
        done = self._pool.run(waiting, allowance=self.timeout)
        judged.update({job: self._judged(job[0], one) for job, one in zip(waiting, done, strict=True)})
        return [judged[job] for job in jobs]

    def _known(self, schema: str, text: str) -> Judgement | None:
        """The outcome that needs no worker, if it has one."""
        if self.schema is None and (problem := _problem(schema)):
            return Judgement(Outcome.UNPARSEABLE, problem)
        longest = self.max_characters if self.extract == "whole" else 10 * self.max_characters
        if len(text) > longest:
            detail = f"a completion of {len(text)} characters, more than {longest}"
            return Judgement(Outcome.REFUSED, detail, self._parts(schema, {}))
        return None

    def _judged(self, schema: str, done: Done) -> Judgement:
        name, detail, found = done.value if done.status == "done" else (done.status, done.detail, {})
        return Judgement(Outcome(name), detail, self._parts(schema, found))

    def _parts(self, schema: str, found: Mapping[str, tuple[bool, int, int]]) -> Parts | None:
        """The parts, by the properties that were found: whether each is valid, and its place."""
        if not self.partial:
            return None
        properties, required = _properties(schema)
        parts = [
            Part(name, float(found[name][0]), 1.0, found[name][1:])
            if name in found
            else Part(name, 0.0 if name in required else None, 1.0, None)
            for name in properties
        ]
        return Parts(parts, 0.0) if parts else None


@functools.lru_cache(maxsize=1024)
def _problem(schema: str) -> str:
    """Why a row's schema cannot be used; empty if it can."""
    try:
        loaded = json.loads(schema)
        if not isinstance(loaded, dict | bool):  # a path, say
            return f"{shown(schema[:60])} is no schema"
        _checked_schema(_loaded(loaded))
    except (ConfigurationError, ValueError, RecursionError) as error:
        return f"{shown(schema[:60])}: {str(error)[:200]}"
    return ""


@functools.lru_cache(maxsize=1024)
def _properties(schema: str) -> tuple[list[str], set[str]]:
    """A schema's own properties, and which of them are required."""
    loaded = json.loads(schema)
    own = loaded if isinstance(loaded, dict) else {}
    required = own.get("required")
    return [name for name in own.get("properties", {}) if name], set(required if isinstance(required, list) else ())


_Verdict = tuple[str, str, dict[str, tuple[bool, int, int]]]
"""An outcome, why, and the schema's properties that are there: whether each is valid, and where its value stands."""


def verdict(extract: str, max_characters: int, max_depth: int, by_property: bool, job: tuple[str, str]) -> _Verdict:
    """The outcome of one completion under one schema. Runs in a worker."""
    schema, completion = job
    where = find_json(completion, extract)
    if where is None:
        return Outcome.NO_ANSWER.value, "no JSON", {}
    text = completion[slice(*where)]
    if len(text) > max_characters:
        return Outcome.REFUSED.value, f"{len(text)} characters, more than max_characters, {max_characters}", {}
    validator = _validator(schema)
    try:
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
        errors = validator.iter_errors(instance)
        problem = next(errors, None)
        if names and problem is not None:
            broken = {error.path[0] for error in (problem, *errors) if error.path}
    except MemoryError:
        raise  # the worker's limit
    except Exception as error:  # the schema was checked before, so the answer is to blame: a number of 401 digits, say
        return Outcome.REFUSED.value, f"jsonschema cannot check it: {type(error).__name__}: {shown(str(error))}", {}
    members = read_located(completion, *where, max_depth).members if names else ()
    found = {str(name): (name not in broken, value.start, value.end) for name, value in members if name in names}
    if problem is None:
        return Outcome.RIGHT.value, "", found
    return Outcome.WRONG.value, f"breaks {problem.validator!r} at {shown(problem.json_path)}", found


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    return _build(json.loads(schema))


def _build(schema: Any) -> Any:
    validators = optional_module("json_schema", "jsonschema.validators")
    specifications = optional_module("json_schema", "jsonschema_specifications")
    made = validators.validator_for(schema, default=validators.Draft202012Validator)
    return made(schema, registry=specifications.REGISTRY)  # the standard's own schemas; nothing is fetched


def _loaded(schema: object) -> Any:
    wanted = "json_schema: schema must be a mapping of JSON values or the path of a JSON file"
    try:
        if isinstance(schema, str | Path):
            text = Path(schema).read_text(encoding="utf-8")
        elif isinstance(schema, Mapping | bool):
            text = json.dumps(schema, default=_plain, allow_nan=False)
        else:
            raise TypeError(f"a {type(schema).__name__} is none")
        return json.loads(text, parse_int=_in_range(int), parse_float=_in_range(float), parse_constant=_in_range(float))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{wanted}, got {schema!r:.200}: {error}.") from error


def _in_range(kind: type) -> Any:
    """A reader of numbers that refuses those that jsonschema cannot compute with."""

    def read(digits: str) -> Any:
        if not math.isfinite(float(digits)):
            raise ValueError(f"{digits[:20]}... is no finite double" if len(digits) > 20 else f"{digits} is no number")
        return kind(digits)

    return read


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} of {type(value).__name__}")


def _checked_schema(schema: Any) -> Any:
    """The schema, if no answer can find a fault in it; else a `ConfigurationError`."""
    exceptions = optional_module("json_schema", "jsonschema.exceptions")
    try:
        _check(schema)
    except ConfigurationError:
        raise
    except exceptions.SchemaError as error:
        raise ConfigurationError(
            f"json_schema: the schema is not valid at {error.json_path}: {error.message[:200]}"
        ) from error
    except Exception as error:  # what a value of a keyword makes jsonschema, `re` or the stack meet
        raise ConfigurationError(
            f"json_schema: the schema cannot be used: {type(error).__name__}: {str(error)[:200]}."
        ) from error
    return schema


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def _check(schema: Any) -> None:
    """Check a schema and everything that it refers to, so that validation itself cannot fail because of it."""
    validators = optional_module("json_schema", "jsonschema.validators")
    referencing = optional_module("json_schema", "referencing")
    specifications = optional_module("json_schema", "jsonschema_specifications")
    named = schema.get("$schema", _DRAFT) if isinstance(schema, dict) else _DRAFT
    if named != _DRAFT and validators.validator_for(schema, default=None) is None:
        raise ConfigurationError(f"json_schema: $schema must name a draft that jsonschema knows, got {named!r}.")
    draft = type(_build(schema))
    specification = optional_module("json_schema", "referencing.jsonschema").specification_with(
        draft.META_SCHEMA.get("$schema", _DRAFT)
    )
    draft.check_schema(schema, format_checker=draft.FORMAT_CHECKER)
    resource = specification.create_resource(schema)
    registry = specifications.REGISTRY.with_resource(resource.id() or "", resource)
    queue = [(resource, registry.resolver_with_root(resource))]
    applied: dict[int, list[int]] = {}  # by `id`, the schemas that a schema applies to the value that it has itself
    while queue:
        current, resolver = queue.pop()
        part = current.contents
        if not isinstance(part, dict) or id(part) in applied:
            continue
        applied[id(part)] = [id(each) for each in _in_place(part)]
        re.compile("|".join(part.get("patternProperties", ())))  # as jsonschema does
        for reference in [part[keyword] for keyword in _REFERENCES if isinstance(part.get(keyword), str)]:
            try:
                found = resolver.lookup(reference)
            except referencing.exceptions.Unresolvable as error:
                raise ConfigurationError(
                    f"json_schema: the schema refers to {reference!r}, which it does not hold, and references are "
                    "never fetched. Put what it names under $defs."
                ) from error
            draft.check_schema(found.contents, format_checker=draft.FORMAT_CHECKER)  # it may stand under no keyword
            applied[id(part)].append(id(found.contents))
            queue.append((specification.create_resource(found.contents), found.resolver))
        queue += [(inner, resolver.in_subresource(inner)) for inner in current.subresources()]
    try:
        graphlib.TopologicalSorter(applied).prepare()
    except graphlib.CycleError as error:
        raise ConfigurationError(
            "json_schema: a part of the schema applies itself to the same value, without end. Let the reference stand "
            "under properties or items, or remove it."
        ) from error


def _in_place(part: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that one applies to the same value, its references aside."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from part.get(keyword, ())
    for keyword in ("not", "if", "then", "else"):
        if keyword in part:
            yield part[keyword]
    for keyword in ("dependentSchemas", "dependencies"):
        yield from part.get(keyword, {}).values()
