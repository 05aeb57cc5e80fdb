"""Read the forms of Python tests in data sets, and prepare them for the process that runs them.

This finds out without running the tests which names are the solution's, which definitions are meant to run, and whether
there is any assert. It rewrites asserts so that those that ran are counted, and those skipped because of the solution's
result are noticed (`judge.Side`).
"""

# Tables of words are easier to read as words.
# ruff: noqa: SIM905
from __future__ import annotations

import ast
import builtins
import copy
import doctest
import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...guard.outcomes import shown

JUDGE = "__judge__"
"""The name by which rewritten tests reach `judge.Side`."""

_TOO_BAD = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_SOLUTION_MODULES = frozenset(
    "solution solutions main submission candidate answer code_solution program my_solution your_solution "
    "solution_module my_module your_module module task implementation".split()
)
_BUILT_IN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__builtins__"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_CATCH_ASSERTIONS = ("AssertionError", "Exception", "BaseException")


class UnreadableTestsError(Exception):
    """The tests of a row are in none of the forms, or cannot fail; the message says why."""


@dataclass(frozen=True)
class Checks:
    """Tests that call the solution.

    Attributes:
        plan: What `judge` runs, as JSON has it.
        count: How many tests there are.
    """

    plan: Mapping[str, Any]
    count: int


@dataclass(frozen=True)
class Examples:
    """What a program reads and what it must print.

    Attributes:
        pairs: Input and output.
    """

    pairs: tuple[tuple[str, str], ...]


def read_tests(tests: Any, entry_point: Any = None) -> Checks | Examples:
    """Read one row's tests.

    Args:
        tests: A list of statements, one source text, or a list of mappings with `input` and `output`.
        entry_point: What a source text's `check` is called with, where it does not call it itself.

    Raises:
        UnreadableTestsError: They are in none of these forms, there are none, they are no Python, or nothing in them
            could fail: no assert, no expected exception, no doctest, or only in definitions that nobody calls.
    """
    entry = entry_point if isinstance(entry_point, str) and entry_point.strip() else None
    if isinstance(tests, str):
        if not tests.strip():
            raise UnreadableTestsError("there are no tests")
        return _checks((tests,), entry)
    if not isinstance(tests, list | tuple) or not tests:
        raise UnreadableTestsError(f"the tests are {shown(tests)}, not a list of tests and not a source text")
    if all(isinstance(test, str) for test in tests):
        return _checks(tuple(tests), entry)
    if all(isinstance(test, Mapping) for test in tests):
        pairs = [(test.get("input"), test.get("output")) for test in tests]
        if all(isinstance(given, str) and isinstance(wanted, str) for given, wanted in pairs):
            return Examples(tuple(pairs))
        raise UnreadableTestsError("a test has no `input` or no `output` that is a string")
    raise UnreadableTestsError(f"the tests are neither all strings nor all mappings: {shown(tests)}")


def same_output(printed: bytes, expected: str) -> bool:
    """Whether the lines are equal, apart from white space at their ends and empty lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(printed.decode("utf-8", "replace")) == lines(expected.encode("utf-8", "replace").decode("utf-8"))


@functools.lru_cache(maxsize=4096)  # the completions of a group have the same tests
def _checks(tests: tuple[str, ...], entry: str | None) -> Checks:
    sources = [_Source(test, number) for number, test in enumerate(tests)]
    free = _free_names([source.tree for source in sources if source.tree is not None], entry)
    for source in sources:
        for text in [source.text] if source.tree is None else _docstrings(source.tree):
            free |= _doctest_names(text, sources)
    modules = {name: _MODULES[name] for name in free & _MODULES.keys() if _only_as_module(name, sources)}
    free -= modules.keys()
    try:
        planned = [source.plan(free, entry) for source in sources]
    except _TOO_BAD as error:
        raise UnreadableTestsError(f"a test is no Python: {shown(str(error))}") from error
    if all(test["empty"] for test in planned):
        raise UnreadableTestsError(
            "nothing in the tests can fail: there is no assert, no expected exception and no doctest in what runs "
            "(statements, `test_*` functions, `Test*` and `TestCase` classes, `check(candidate)`)"
        )
    return Checks(
        {"tests": planned, "free": sorted(free), "modules": modules, "stop": True},
        sum(1 for test in planned if not test["empty"]),
    )


_MODULES = {name: name for name in "math cmath re itertools functools operator collections random".split()}
_MODULES |= {name: name for name in "datetime copy sys os json heapq bisect statistics time unittest pytest".split()}
_MODULES |= {"numpy": "numpy", "np": "numpy"}
"""Modules that tests use without importing them: they are the tests' own all the same, and not the solution's."""


def _only_as_module(name: str, sources: Sequence[_Source]) -> bool:
    """Whether a name is used for its attributes alone."""
    nodes = [node for source in sources if source.tree is not None for node in ast.walk(source.tree)]
    used = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    bases = (node.value for node in nodes if isinstance(node, ast.Attribute))
    return used == sum(isinstance(base, ast.Name) and base.id == name for base in bases)


class _Source:
    """One test's source text."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number
        self.tree: ast.Module | None = None
        try:
            self.tree = ast.parse(text)
        except _TOO_BAD as error:
            if _doctest_examples(text):
                return
            try:
                self.tree = ast.parse(textwrap.dedent(text))
            except _TOO_BAD:
                raise UnreadableTestsError(f"a test is no Python: {shown(str(error))}") from error
        if not self.tree.body:
            raise UnreadableTestsError("a test is empty")

    def plan(self, free: frozenset[str] | set[str], entry: str | None) -> dict[str, Any]:
        """What `judge` needs."""
        planned: dict[str, Any] = {"source": self.text, "doctest": self.tree is None, "empty": False, "entry": entry}
        planned |= {"candidates": [], "pytest": False, "functions": [], "classes": [], "docstrings": [], "main": ""}
        tree = self.tree
        if tree is None:
            return planned
        tree, main = _without_main(tree)
        called = set(map(_called_name, _outside_definitions(tree)))
        functions = [node for node in tree.body if isinstance(node, _FUNCTIONS)]
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        planned["candidates"] = [
            node.name for node in functions if node.name not in called and _takes_a_candidate(node)
        ]
        if planned["candidates"]:
            if entry is None:
                raise UnreadableTestsError(
                    f"the test defines `{planned['candidates'][0]}` and does not call it, and there is no column "
                    "`entry_point`"
                )
            try:
                compile(entry, "<entry_point>", "eval", dont_inherit=True)
            except _TOO_BAD as error:
                raise UnreadableTestsError(f"the entry point {shown(entry)} is no Python") from error
        planned["functions"] = [
            node.name
            for node in functions
            if node.name.startswith("test") and node.name not in called and node.name not in planned["candidates"]
        ]
        planned["classes"] = [node.name for node in classes if _holds_tests(node)]
        wanted = [node for node in functions if node.name in planned["functions"]]
        planned["pytest"] = bool(wanted or planned["classes"]) and _needs_pytest(tree, wanted, classes)
        planned["docstrings"] = _docstrings(tree)
        planned["main"] = ast.unparse(ast.Module(main, [])) if main else ""
        planned["empty"] = not planned["docstrings"] and not _can_fail(tree, main, planned)
        rewriting = _Rewriting(_tainted([tree, ast.Module(main, [])], free))
        planned["source"] = ast.unparse(ast.fix_missing_locations(rewriting.visit(tree)))
        if main:
            planned["main"] = ast.unparse(ast.fix_missing_locations(rewriting.visit(ast.Module(main, []))))
        compile(planned["source"], "<test>", "exec", dont_inherit=True)
        return planned


# --- what tests consist of -------------------------------------------------------------------------------------------


def _doctest_examples(text: str) -> bool:
    try:
        return any(example.want for example in doctest.DocTestParser().get_examples(text))
    except ValueError:
        return False


def _docstrings(tree: ast.Module) -> list[str]:
    """Those of the module and its definitions that hold doctests."""
    nodes = [tree, *(node for node in tree.body if isinstance(node, _FUNCTIONS | ast.ClassDef))]
    return [text for node in nodes if _doctest_examples(text := ast.get_docstring(node) or "")]


def _doctest_names(text: str, sources: Sequence[_Source]) -> set[str]:
    trees: list[ast.Module] = []
    for example in doctest.DocTestParser().get_examples(text):
        try:
            trees.append(ast.parse(example.source))
        except _TOO_BAD:
            continue
    bound = {name for source in sources if source.tree is not None for name in _bound_names(source.tree)}
    return _free_names(trees, None) - bound


def _without_main(tree: ast.Module) -> tuple[ast.Module, list[ast.stmt]]:
    """The tree without what stands under `if __name__ == "__main__"`, and that."""
    body, main = [], []
    for node in tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and not node.orelse:
            main += node.body
        else:
            body.append(node)
    if not body:
        body.append(ast.Pass())
    calls = (node for node in main if "unittest.main" in ast.unparse(node) or "pytest.main" in ast.unparse(node))
    return ast.Module(body, tree.type_ignores), [] if any(True for _ in calls) else main


def _outside_definitions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _FUNCTIONS | ast.ClassDef | ast.Lambda):
            yield node
            yield from _outside_definitions(node)


def _called_name(node: ast.AST) -> str:
    """The name that it calls, or "" where it calls none."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _takes_a_candidate(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    needed = len(node.args.args) - len(node.args.defaults)
    named = node.args.args[:1] and node.args.args[0].arg in ("candidate", "candidate_function", "solution_function")
    return needed == 1 and (node.name == "check" or bool(named))


def _holds_tests(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base) for base in node.bases]
    methods = any(isinstance(inner, _FUNCTIONS) and inner.name.startswith("test") for inner in node.body)
    return any(base.endswith("TestCase") for base in bases) or (methods and not bases and node.name.startswith("Test"))


def _needs_pytest(
    tree: ast.Module, functions: Sequence[ast.FunctionDef | ast.AsyncFunctionDef], classes: Sequence[ast.ClassDef]
) -> bool:
    """Fixtures and marks are for pytest itself to run. `pytest.raises` alone is not."""
    for node in (*functions, *(inner for kind in classes for inner in kind.body if isinstance(inner, _FUNCTIONS))):
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if any("pytest" in mark and not mark.endswith((".asyncio", ".anyio")) for mark in marks):
            return True
    if any(node.args.args and not node.args.defaults for node in functions):
        return True
    marked = any(
        "fixture" in ast.unparse(mark)
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        for mark in node.decorator_list
    )
    plain = [kind for kind in classes if not any(ast.unparse(base).endswith("TestCase") for base in kind.bases)]
    taking = [
        inner
        for kind in plain
        for inner in kind.body
        if isinstance(inner, _FUNCTIONS) and inner.name.startswith("test") and len(inner.args.args) > 1
    ]
    return marked or bool(taking) or "pytestmark" in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _checks_something(node: ast.AST) -> bool:
    """Whether a node is an assert, or what is like one."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and bool(node.test.value))
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Expr):
        return _is_assertion_call(node.value) or _always_fails(node)
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(_expects(item.context_expr) for item in node.items)
    return False


def _is_assertion_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func).startswith("assert")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _expects(node: ast.expr) -> bool:
    called = _last_name(node.func) if isinstance(node, ast.Call) else ""
    return called in ("raises", "warns", "deprecated_call") or called.startswith(
        ("assertRaises", "assertWarns", "assertLogs")
    )


def _always_fails(node: ast.stmt) -> bool:
    """`assert False`, `raise ...`, `self.fail()`, `pytest.fail()`."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _last_name(node.value.func) == "fail"
    return isinstance(node, ast.Raise)


def _can_fail(tree: ast.Module, main: list[ast.stmt], planned: Mapping[str, Any]) -> bool:
    """Whether an assert can be reached from what is run: by name, from one definition to the next."""
    definitions: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS | ast.ClassDef):
            definitions.setdefault(node.name, []).append(node)
    runs = {*planned["functions"], *planned["classes"], *planned["candidates"]}
    reached: list[ast.AST] = [node for node in tree.body if not isinstance(node, _FUNCTIONS | ast.ClassDef)]
    reached += [*main, *(node for name in runs for node in definitions.get(name, []))]
    seen: set[str] = set(runs)
    while reached:
        for node in ast.walk(reached.pop()):
            if _checks_something(node):
                return True
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in definitions and name not in seen:
                seen.add(name)
                reached += definitions[name]
    return False


def _bound_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, _FUNCTIONS | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
    return names


def _free_names(trees: Sequence[ast.AST], entry: str | None) -> set[str]:
    """The names that are the solution's.

    A name of Python's own stays Python's, whatever the solution defines, unless nothing but such names is tested
    (`assert sum(10, 15) == 6`): then the one that is called innermost in the asserts.
    """
    used, bound, imported = set[str](), set[str](), False
    for tree in trees:
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        bound |= _bound_names(tree)
        imported = imported or any(_imports_solution(node) for node in ast.walk(tree))
    if entry is not None:
        try:
            named = {node.id for node in ast.walk(ast.parse(entry, mode="eval")) if isinstance(node, ast.Name)}
        except _TOO_BAD:
            named = set()
        return ((used - bound - _BUILT_IN) | named) - {JUDGE}
    free = used - bound - _BUILT_IN - {JUDGE}
    if free or imported:
        return free
    inner = {
        _called_name(node)
        for tree in trees
        for check in ast.walk(tree)
        if isinstance(check, ast.Assert)
        for node in ast.walk(check)
        if isinstance(node, ast.Call) and not any(isinstance(n, ast.Call) for a in node.args for n in ast.walk(a))
    }
    inner = (inner & _BUILT_IN) - bound
    return inner if len(inner) == 1 else set()


def _imports_solution(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in _SOLUTION_MODULES
    return isinstance(node, ast.Import) and any(alias.name in _SOLUTION_MODULES for alias in node.names)


# --- what the solution decides ---------------------------------------------------------------------------------------


def _tainted(trees: Sequence[ast.Module], free: set[str] | frozenset[str]) -> set[str]:
    """Names, and `.names` of attributes, whose values may come from the solution."""
    tainted = set(free) | {"candidate"}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in _SOLUTION_MODULES:
            tainted |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            tainted |= {alias.asname or alias.name for alias in node.names if alias.name in _SOLUTION_MODULES}
    functions = {node.name: node for node in nodes if isinstance(node, _FUNCTIONS)}
    while True:
        before = len(tainted)
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if node.value is not None and _from_solution(node.value, tainted):
                    for target in targets:
                        tainted |= _targets(target)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                if _from_solution(node.iter, tainted):
                    tainted |= _targets(node.target)
            elif isinstance(node, ast.withitem):
                if node.optional_vars is not None and _from_solution(node.context_expr, tainted):
                    tainted |= _targets(node.optional_vars)
            elif isinstance(node, ast.Call) and _last_name(node.func) in functions:
                named = functions[_last_name(node.func)].args.args
                named = named[1:] if named and named[0].arg == "self" else named
                for parameter, value in zip(named, node.args, strict=False):
                    if _from_solution(value, tainted):
                        tainted.add(parameter.arg)
            elif isinstance(node, ast.Return) and node.value is not None:
                continue
        for name, function in functions.items():
            if name not in tainted and any(
                isinstance(inner, ast.Return) and inner.value is not None and _from_solution(inner.value, tainted)
                for inner in ast.walk(function)
            ):
                tainted.add(name)
        if len(tainted) == before:
            return tainted


def _targets(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {f".{node.attr}"}
    if isinstance(node, ast.Subscript | ast.Starred):
        return _targets(node.value)
    return {name for part in getattr(node, "elts", []) for name in _targets(part)}


def _from_solution(node: ast.expr, tainted: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in tainted:
            return True
        if isinstance(inner, ast.Attribute) and f".{inner.attr}" in tainted:
            return True
    return False


class _Rewriting(ast.NodeTransformer):
    """Has asserts counted, and notices those that the solution can keep from running."""

    def __init__(self, tainted: set[str]) -> None:
        self.tainted = tainted
        self.swallowed = False
        self.sites = 0
        self.checked_until = 0  # the last line of an assert in the function that is being visited

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.checked_until = _last_check(node)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        outer, self.checked_until = self.checked_until, _last_check(node)
        swallowed, self.swallowed = self.swallowed, False
        self.generic_visit(node)
        self.checked_until, self.swallowed = outer, swallowed
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = _Vacuous(self).visit(node.test)
        arguments = [test, ast.Constant(self.swallowed), *self._expected(node.test)]
        raised = ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg is not None else [], [])
        condition = ast.UnaryOp(ast.Not(), _call("check", *arguments))
        return ast.copy_location(ast.If(condition, [ast.Raise(raised, None)], []), node)

    def _expected(self, test: ast.expr) -> list[ast.expr]:
        """Of a comparison with what the solution gives, the other side, where it is computed from variables."""
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
            return []
        for given, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if _from_solution(given, self.tainted) and _is_computed(other):
                nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
                return [ast.Lambda(nothing, copy.deepcopy(other))]
        return []

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and _is_assertion_call(node.value):
            node.value.func = _call("checking", node.value.func)
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        if any(_expects(item.context_expr) for item in node.items):
            return [node, ast.Expr(_call("passed"))]
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        expected = any(map(_always_fails, node.body)) or any(map(_always_fails, node.orelse))
        checks = any(_checks_something(inner) for part in node.body for inner in ast.walk(part))
        outer = self.swallowed
        fails = any(_always_fails(part) for part in node.orelse)
        self.swallowed = outer or (checks and not fails and any(_swallows(handler) for handler in node.handlers))
        node.body = self._block(node.body)
        self.swallowed = outer
        for handler in node.handlers:
            quiet = not any(_checks_something(inner) for part in handler.body for inner in ast.walk(part))
            handler.body = self._block(handler.body)
            if expected and quiet:
                handler.body.insert(0, ast.Expr(_call("passed")))
            elif checks and quiet:
                handler.body.insert(0, ast.Expr(_call("failed")))
        node.orelse, node.finalbody = self._block(node.orelse), self._block(node.finalbody)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        branches = [node.body, node.orelse]
        checks = [any(_checks_something(inner) for part in branch for inner in ast.walk(part)) for branch in branches]
        leaves = [
            any(isinstance(inner, ast.Return | ast.Continue | ast.Break) for part in branch for inner in ast.walk(part))
            for branch in branches
        ]
        later = self.checked_until > (node.end_lineno or 0)
        decided = _from_solution(node.test, self.tainted)
        test = self.visit(node.test)
        bodies = [self._block(branch) for branch in branches]
        if decided:
            for own, other in ((0, 1), (1, 0)):
                if not checks[own] and (checks[other] or (leaves[own] and later)):
                    bodies[own].insert(0, ast.Expr(_call("skipped")))
        return ast.copy_location(ast.If(test, bodies[0], bodies[1]), node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        checks = any(_checks_something(inner) for part in node.body for inner in ast.walk(part))
        decided = _from_solution(node.iter, self.tainted)
        self.generic_visit(node)
        if checks and decided:
            node.iter = self.several(node.iter)
        return node

    def several(self, values: ast.expr) -> ast.expr:
        """Count whether there is anything in what the solution gives."""
        self.sites += 1
        if isinstance(values, ast.Call) and _called_name(values) == "zip":
            values.func = _call("zipped").func
        return _call("several", ast.Constant(self.sites), values)

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        block: list[ast.stmt] = []
        for statement in statements:
            visited = self.visit(statement)
            block += visited if isinstance(visited, list) else [visited]
        return block


def _is_computed(node: ast.expr) -> bool:
    """Whether it is computed from variables by Python's own functions alone, so that it can be computed twice."""
    computed = False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            computed = True
            if isinstance(inner.func, ast.Name) and inner.func.id not in _PURE:
                return False
            if isinstance(inner.func, ast.Attribute) and ast.unparse(inner.func.value) not in _PURE_MODULES:
                return False
        elif isinstance(inner, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.BinOp | ast.Slice):
            computed = True
        elif isinstance(inner, ast.NamedExpr | ast.Await | ast.Lambda | ast.Yield | ast.YieldFrom):
            return False
    return computed


_PURE = frozenset(
    "sorted sum len max min set frozenset list tuple dict reversed abs round all any str range zip".split()
)
_PURE_MODULES = frozenset(("math", "np", "numpy", "statistics", "collections", "itertools", "functools", "operator"))


class _Vacuous(ast.NodeTransformer):
    """In an assert: `all(... for x in f())`, which holds where there is no x."""

    def __init__(self, rewriting: _Rewriting) -> None:
        self.rewriting = rewriting

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "all" and len(node.args) == 1:
            inner = node.args[0]
            if isinstance(inner, ast.GeneratorExp | ast.ListComp):
                first = inner.generators[0]
                if _from_solution(first.iter, self.rewriting.tainted):
                    first.iter = self.rewriting.several(first.iter)
        return node


def _last_check(node: ast.AST) -> int:
    return max((getattr(inner, "lineno", 0) for inner in ast.walk(node) if _checks_something(inner)), default=0)


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches a failed assert and lets the test go on as if nothing were."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches = any(kind is None or _last_name(kind) in _CATCH_ASSERTIONS for kind in kinds)
    return catches and not any(_checks_something(inner) for part in handler.body for inner in ast.walk(part))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(JUDGE, ast.Load()), name, ast.Load()), list(arguments), [])
