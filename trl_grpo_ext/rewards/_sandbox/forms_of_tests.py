"""Read the forms of Python tests in data sets, and prepare them for the process that runs them.

This finds out, without running them, which names are the solution's and which definitions are meant to run, and
rewrites asserts so that those that ran are counted and what they compare is seen (`tests_process.Side`).
"""

# ruff: noqa: SIM905
import ast
import builtins
import contextlib
import decimal
import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...guard.outcomes import shown
from .._text.json_text import is_near
from .wire import SOLUTION_MODULES

JUDGE = "__judge__"  # the name by which rewritten tests reach `tests_process.Side`

_TOO_BAD = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_BUILT_IN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__builtins__"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_SAYS_NOTHING = re.compile(
    r"pytest\.(?:skip|importorskip|warns|deprecated_call)|from pytest import[^\n]*(?:skip|warns|deprecated)"
    r"|unittest\.skip|\b(?:skipTest|SkipTest|skipIf|skipUnless|assertLogs|assertNoLogs|assertWarns|catch_warnings"
    r"|addHandler|asyncio)|async (?:def|for|with)"
)
"""Tests that skip, or of warnings, logs and coroutines, which stay in the process of the code."""
_DEFINITIONS = _FUNCTIONS | ast.ClassDef


class UnreadableTestsError(Exception):
    """The tests of a row are in none of the forms, or cannot fail; the message says why."""


Plan = dict[str, Any]  # tests that call the solution: what `tests_process` runs, as JSON has it


class Example(NamedTuple):
    """What a program reads, what it must print, and whether that may be nearly so (`same_output`)."""

    given: str
    wanted: str
    near: bool


Examples = list[Example]


def read_tests(tests: Any, entry_point: Any = None) -> Plan | Examples:
    """Read one row's tests: statements, one source text, mappings with `input` and `output`, or one of `inputs`."""
    entry = entry_point if isinstance(entry_point, str) and entry_point.strip() else None
    if isinstance(tests, str):
        read = None
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(tests)
        if not isinstance(read, list | dict):
            return _plan((tests,), entry)
        tests = read
    if isinstance(tests, Mapping) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise UnreadableTestsError("there are not as many `inputs` as `outputs`")
        pairs = [*zip(tests["inputs"], tests["outputs"], strict=True)]
        name = tests.get("fn_name")
        if name is None:
            return _examples(pairs, near=True)
        lines = _all_texts(tests["inputs"])
        return _calls(_read_lines(pairs) if lines else pairs, name, "assert same(candidate(*keyed({})), {})")
    listed = tests if isinstance(tests, list | tuple) else []
    if listed and _all_texts(listed):
        return _plan(tuple(listed), entry)
    if not listed or not all(isinstance(test, Mapping) for test in listed):
        raise UnreadableTestsError(f"the tests are neither strings nor mappings: {shown(tests)}")
    pairs = [(test.get("input"), test.get("output")) for test in tests]
    if any(test.get("testtype") == "functional" for test in tests):
        if entry is None:
            raise UnreadableTestsError("the tests call a function, and there is no column `entry_point`")
        return _calls(_read_lines(pairs), entry, "assert plain(candidate(*{})) == {}")
    return _examples(pairs, near=False)


def _read_lines(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Arguments, each a line of JSON, and a result of JSON."""
    try:
        written = [(filter(str.strip, given.split("\n")), wanted) for given, wanted in pairs]
        return [([*map(json.loads, given)], json.loads(wanted)) for given, wanted in written]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableTestsError("a test has no `input` or no `output` of JSON") from error


def _examples(pairs: Sequence[tuple[Any, Any]], near: bool) -> Examples:
    texts = [["\n".join(t) if isinstance(t, list) and _all_texts(t) else t for t in pair] for pair in pairs]
    if pairs and all(map(_all_texts, texts)):
        return [Example(given, wanted, near) for given, wanted in texts]
    raise UnreadableTestsError("a test has no `input` or no `output` that is a string")


def _calls(pairs: Sequence[tuple[Any, Any]], name: Any, test: str) -> Plan:
    """Arguments and results of a function, as JSON has them, each a `test`."""
    if not isinstance(name, str) or not name.isidentifier() or not all(isinstance(given, list) for given, _ in pairs):
        raise UnreadableTestsError(f"`inputs` are not lists of arguments, or {shown(name)} is no name of a function")
    tests = [test.format(*(f"json.loads({json.dumps(value)!r})" for value in pair)) for pair in pairs]
    return _plan((_CALLING.format(name=name), *tests), None) | {"imports": True, "deep": True}


_CALLING = """
import json
def plain(value):
    if isinstance(value, dict):
        return {{str(key) if type(key) is int else key: plain(part) for key, part in value.items()}}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value
def same(got, wanted):
    got = plain(got)
    return got == wanted or [got] == wanted
def is_numbered(value):
    return isinstance(value, dict) and all(key.removeprefix("-").isdecimal() for key in value)
def keyed(given):
    return [{{int(key): part for key, part in value.items()}} if is_numbered(value) else value for value in given]
try:
    candidate = Solution().{name}
except NameError:
    candidate = {name}
"""
"""JSON has no tuples and no numbers for keys. Results of APPS and TACO stand in a list of one, and these two, as their
graders do, mean numbers by arguments' keys that are written so."""


def _all_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def same_output(printed: bytes, expected: str, near: bool) -> bool:
    """Whether the lines are equal, as LiveCodeBench compares them, or nearly so, as APPS and TACO do.

    White space around a line does not count, and lines of numbers are compared by their values. With `near` empty lines
    do not count, nor how much white space is between words, and where a number is expected that is written as no
    integer, it may be off by 1e-5 of it, or 1e-8.
    """

    def lines(text: bytes) -> list[str]:
        stripped = map(str.strip, text.decode("utf-8", "replace").strip().splitlines())
        return [line for line in stripped if line or not near]

    said = lines(printed)
    right = lines(expected.encode("utf-8", "replace"))
    return len(said) == len(right) and all(_same_line(*pair, near) for pair in zip(said, right, strict=True))


def _same_line(said: str, right: str, near: bool) -> bool:
    words = said.split()
    wanted = right.split()
    if said == right or (near and words == wanted):
        return True
    return len(words) == len(wanted) and all(_same_number(*pair, near) for pair in zip(words, wanted, strict=True))


def _same_number(said: str, right: str, near: bool) -> bool:
    try:
        numbers = decimal.Decimal(said), decimal.Decimal(right)
        equal = numbers[0] == numbers[1]
    except decimal.InvalidOperation:
        return False
    may_differ = near and not right.lstrip("+-").isdecimal() and all(number.is_finite() for number in numbers)
    return equal or (may_differ and is_near(*numbers, 1e-8, 1e-5))


@functools.lru_cache(maxsize=4096)  # the completions of a group have the same tests
def _plan(tests: tuple[str, ...], entry: str | None) -> Plan:
    trees = [_tree(test) for test in tests]
    free = _free_names(trees, entry)
    if "candidate" in free and entry is not None:  # MBPP+ in its original form
        return _plan((f"candidate = {entry}", *tests), entry)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    of_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    alone = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in of_attributes}
    modules = {name: _MODULES[name] for name in free & _MODULES.keys() - alone}
    free -= modules.keys()
    try:
        planned = [_planned(tree, number, free, entry) for number, tree in enumerate(trees)]
    except _TOO_BAD as error:
        raise UnreadableTestsError(f"a test is no Python: {shown(str(error))}") from error
    if all(test["empty"] for test in planned):
        raise UnreadableTestsError("nothing in the tests can fail: no assert or expected exception is in what runs")
    imports = entry is not None
    return {"tests": planned, "free": sorted(free), "modules": modules, "imports": imports, "deep": False}


_USED = "math cmath re itertools functools operator collections random datetime copy sys os json heapq bisect time"
_MODULES = {name: name for name in f"{_USED} statistics unittest pytest numpy".split()} | {"np": "numpy"}
"""Modules that tests use without importing them: they are the tests' own all the same, and not the solution's."""


def _tree(text: str) -> ast.Module:
    """A test's tree, in which what `if __name__ == "__main__"` guards stands unguarded, if it starts no runner."""
    tree = _parsed(text) or _parsed(textwrap.dedent(text))
    if tree is None:
        raise UnreadableTestsError(f"a test is no Python: {shown(text)}")
    if not tree.body:
        raise UnreadableTestsError("a test is empty")
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and not node.orelse:
            runs = any(name in ast.unparse(part) for part in node.body for name in ("unittest.main", "pytest.main"))
            body += [] if runs else node.body
        else:
            body.append(node)
    return ast.Module(body, tree.type_ignores)


def _planned(tree: ast.Module, number: int, free: set[str], entry: str | None) -> dict[str, Any]:
    called = {_called_name(node) for node in _outside_definitions(tree)}
    functions = [node for node in tree.body if isinstance(node, _FUNCTIONS) and node.name not in called]
    candidates = [node for node in functions if _takes_a_candidate(node)]
    if candidates and entry is None:
        raise UnreadableTestsError(f"nothing calls `{candidates[0].name}`, and there is no column `entry_point`")
    calls = [f"{node.name}({entry})" for node in candidates]
    for call in calls:
        compile(call, "<entry_point>", "eval", dont_inherit=True)
    wanted = [node for node in functions if node.name.startswith("test") and node not in candidates]
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node for node in defined if any(ast.unparse(base).endswith("TestCase") for base in node.bases)]
    planned: dict[str, Any] = {"calls": calls, "functions": [node.name for node in wanted]}
    planned["classes"] = [node.name for node in classes]
    if _SAYS_NOTHING.search(ast.unparse(tree)):
        raise UnreadableTestsError("they skip, await, or expect a warning or a log of the process of the code")
    if _needs_pytest(tree, wanted):
        raise UnreadableTestsError("they need pytest to run them: fixtures, marks, or classes that are no `TestCase`")
    runs = bool(candidates or wanted or classes)
    defines = all(isinstance(node, _DEFINITIONS | ast.Import | ast.ImportFrom) for node in tree.body)
    planned["empty"] = (defines and not runs) or not any(map(_checks_something, ast.walk(tree)))
    rewritten = _Rewriting(_tainted(tree, free), number).visit(tree)
    planned["calls_of"] = sorted(free & {_called_name(node) for node in ast.walk(tree)})
    planned["source"] = ast.unparse(ast.fix_missing_locations(rewritten))
    compile(planned["source"], "<test>", "exec", dont_inherit=True)
    return planned


def _parsed(source: str) -> ast.Module | None:
    with contextlib.suppress(*_TOO_BAD):
        return ast.parse(source)
    return None


def _outside_definitions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _DEFINITIONS | ast.Lambda):
            yield node
            yield from _outside_definitions(node)


def _called_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _takes_a_candidate(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    needed = len(node.args.args) - len(node.args.defaults)
    named = node.args.args[:1] and node.args.args[0].arg in ("candidate", "candidate_function", "solution_function")
    return needed == 1 and (node.name == "check" or bool(named))


def _needs_pytest(tree: ast.Module, functions: Sequence[Any]) -> bool:
    """`pytest.raises` and `pytest.approx` alone are a library's, and need nobody to run them."""
    fixtures = any(node.args.args and not node.args.defaults for node in functions)
    marks = [ast.unparse(mark) for node in ast.walk(tree) for mark in getattr(node, "decorator_list", ())]
    marked = any("pytest" in mark for mark in marks)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.bases]
    others = any(node.name.startswith("Test") and "def test" in ast.unparse(node) for node in classes)
    return fixtures or marked or others or "pytestmark" in _bound_names(tree)


def _checks_something(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Expr(value=value):
            return _is_assertion_call(value) or _always_fails(node)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return any(_expects(item.context_expr) for item in items)
    return isinstance(node, ast.Assert | ast.Raise)


def _is_assertion_call(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return _last_name(node.func).startswith("assert") or ast.unparse(node.func) in ("self.fail", "pytest.fail")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _expects(node: ast.expr) -> bool:
    called = _last_name(node.func) if isinstance(node, ast.Call) else ""
    return called == "raises" or called.startswith("assertRaises")


def _always_fails(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _last_name(node.value.func) == "fail"
    return isinstance(node, ast.Raise)


def _bound_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, _DEFINITIONS):
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
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {name for tree in trees for name in _bound_names(tree)}
    free = used - bound - _BUILT_IN - {JUDGE}
    if entry is not None:
        expression = _parsed(entry.strip())
        return free | {node.id for node in ast.walk(expression or ast.Pass()) if isinstance(node, ast.Name)}
    if free or _imported_from_solution(nodes):
        return free
    inner = {
        _called_name(node)
        for check in nodes
        if isinstance(check, ast.Assert)
        for node in ast.walk(check)
        if isinstance(node, ast.Call) and not any(isinstance(n, ast.Call) for a in node.args for n in ast.walk(a))
    }
    inner = (inner & _BUILT_IN) - bound
    return inner if len(inner) == 1 else set()


def _imported_from_solution(nodes: Sequence[ast.AST]) -> set[str]:
    return {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name) in SOLUTION_MODULES
    }


def _tainted(tree: ast.Module, free: set[str]) -> set[str]:
    nodes = list(ast.walk(tree))
    tainted = free | {"candidate"} | _imported_from_solution(nodes)
    functions = {node.name: node for node in nodes if isinstance(node, _FUNCTIONS)}
    while True:
        before = len(tainted)
        for node in nodes:
            tainted |= _reached(node, tainted, functions)
        if len(tainted) == before:
            return tainted


def _reached(node: ast.AST, tainted: set[str], functions: Mapping[str, Any]) -> set[str]:
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        pairs = _taken(node.target, node.iter)
    elif isinstance(node, ast.withitem):
        pairs = [(node.optional_vars, node.context_expr)]
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _FILLING:
            pairs = [(node.func.value, value) for value in node.args]
        if _last_name(node.func) in functions:
            named = functions[_last_name(node.func)].args.args
            named = named[1:] if named and named[0].arg == "self" else named
            pairs += [(ast.Name(arg.arg), value) for arg, value in zip(named, node.args, strict=False)]
    elif isinstance(node, _FUNCTIONS):
        if _gives(node, tainted):
            return {node.name}
        pairs = [(ast.Name(arg.arg), mark) for arg in node.args.args for mark in node.decorator_list]
    reached = [target for target, value in pairs if target and value and _from_solution(value, tainted)]
    return {name for target in reached for name in _targets(target)}


def _taken(target: ast.expr, iterated: ast.expr) -> list[tuple[ast.expr | None, ast.expr | None]]:
    """What a loop takes from where: with `zip`, each name from its own."""
    if isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call):
        if _called_name(iterated) == "zip" and len(target.elts) == len(iterated.args) and not _has_star(iterated):
            return list(zip(target.elts, iterated.args, strict=True))
        if _called_name(iterated) == "enumerate" and iterated.args and len(target.elts) == 2:
            return _taken(target.elts[1], iterated.args[0])
    return [(target, iterated)]


def _gives(node: ast.AST, tainted: set[str]) -> bool:
    """Whether a function returns what it has from the solution otherwise than by its arguments."""
    inner = list(ast.walk(node))
    own = tainted - _bound_names(node)
    for _ in range(9):
        own |= {name for part in inner if part is not node for name in _reached(part, own, {})}
    return any(isinstance(part, ast.Return) and part.value and _from_solution(part.value, own) for part in inner)


_FILLING = frozenset("append appendleft extend add insert update setdefault put push".split())


def _targets(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {f".{node.attr}"}
    if isinstance(node, ast.Subscript | ast.Starred):
        return _targets(node.value)
    return {name for part in getattr(node, "elts", []) for name in _targets(part)}


def _from_solution(node: ast.AST, tainted: set[str]) -> bool:
    return any(
        (isinstance(inner, ast.Name) and inner.id in tainted)
        or (isinstance(inner, ast.Attribute) and f".{inner.attr}" in tainted)
        for inner in ast.walk(node)
    )


class _Rewriting(ast.NodeTransformer):
    """Hands asserts and what they compare to `tests_process.Side`, and notices those that the solution can skip."""

    def __init__(self, tainted: set[str], number: int) -> None:
        self.tainted = tainted
        self.number = number
        self.compares = False  # whether what is visited is a side of a comparison
        self.sites = 0
        self.checked_until = 0  # the last line of an assert in the function that is being visited

    def site(self) -> ast.expr:
        self.sites += 1
        return ast.Constant(f"{self.number}.{self.sites}")

    def compared(self, node: ast.expr) -> ast.expr:
        """Hand over the sides of all comparisons that decide an expression's truth."""
        if isinstance(node, ast.BoolOp):
            node.values = [self.compared(value) for value in node.values]
        elif isinstance(node, ast.UnaryOp):
            node.operand = self.compared(node.operand)
        elif isinstance(node, ast.IfExp):
            node.body = self.compared(node.body)
            node.orelse = self.compared(node.orelse)
        elif isinstance(node, ast.GeneratorExp | ast.ListComp):
            node.elt = self.compared(node.elt)
        elif isinstance(node, ast.Compare):
            if not any(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
                mark = "" if any(isinstance(one, ast.In | ast.NotIn) for one in node.ops) else "="
                computes = any(isinstance(inner, ast.BinOp) for inner in ast.walk(node))
                if any(isinstance(one, _ORDER) for one in node.ops) and not computes:
                    mark = "<"  # else the arithmetic, which knows both sides, says whether a nan was expected
                node.left, *node.comparators = self.sides([node.left, *node.comparators], mark)
        elif isinstance(node, ast.Call):
            if len(node.args) == 1 and _last_name(node.func) in ("all", "any", "bool"):
                node.args = [self.compared(node.args[0])]
            elif isinstance(node.func, ast.Attribute) and not node.args:
                node.func.value = self.compared(node.func.value)
            elif isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords:
                node.func.value, *node.args = self.sides([node.func.value, *node.args])
            else:
                plain = [number for number, value in enumerate(node.args) if not isinstance(value, ast.Constant)]
                self.arguments(node, plain if len(plain) > 1 else [0, 1])
        return node

    def arguments(self, node: ast.Call, which: Sequence[int] = (0, 1)) -> None:
        which = [number for number in which if number < len(node.args)]
        if not any(isinstance(node.args[number], ast.Starred) for number in which):
            named = [keyword for keyword in node.keywords if keyword.arg in _SIDES][: max(0, 2 - len(node.args))]
            handed = self.sides([*(node.args[number] for number in which), *(keyword.value for keyword in named)])
            for number, value in zip(which, handed, strict=False):
                node.args[number] = value
            for keyword, value in zip(named, handed[len(which) :], strict=True):
                keyword.value = value

    def sides(self, values: list[ast.expr], mark: str = "") -> list[ast.expr]:
        """Hand over values that are put together, and how: compared ("="), or ordered or computed with ("<")."""
        site = self.site()
        outer = self.compares
        self.compares = True
        handed: list[ast.expr] = []
        for position, value in enumerate(values):
            names = any(isinstance(inner, ast.Name | ast.Attribute) for inner in ast.walk(value))
            kind = "s" if _from_solution(value, self.tainted) else "o" if names else "c"
            kind = kind.upper() + mark.strip("=") if mark else kind
            handed.append(_call("op", site, ast.Constant(position), ast.Constant(kind), self.visit(value)))
        self.compares = outer
        return handed

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not self.mixed([node.left, node.right]):
            return self.generic_visit(node)
        node.left, node.right = self.sides([node.left, node.right], "<")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        own = not _from_solution(node.func, self.tainted)
        if own and self.compares and _called_name(node) != "map" and self.mixed(node.args):
            node.args = self.sides(node.args)
            return node
        self.generic_visit(node)
        return self.side_by_side(node) if _called_name(node) == "map" else node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        node.iter = self.side_by_side(node.iter)
        return node

    def mixed(self, values: list[ast.expr]) -> bool:
        plain = not any(isinstance(value, ast.Starred) for value in values)
        return plain and len({_from_solution(value, self.tainted) for value in values}) > 1

    def side_by_side(self, node: ast.expr) -> ast.expr:
        """Hand over a `map`, and a `zip` of the solution's values with the tests' own."""
        name = _called_name(node)
        if name not in {"map", "zip"} - self.tainted:
            return node
        if isinstance(node, ast.Call) and not _has_star(node) and not (name == "map" and node.keywords):
            values = node.args[name == "map" :]
            given = [number for number, value in enumerate(values) if _from_solution(value, self.tainted)]
            given = given if len(given) < len(values) else []
            if given or name == "map":
                node.func = _call("mapped" if name == "map" else "zipped").func
                node.args.insert(0, ast.List([ast.Constant(number) for number in given], ast.Load()))
        return node

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        outer = self.checked_until
        self.checked_until = max((getattr(n, "lineno", 0) for n in ast.walk(node) if _checks_something(n)), default=0)
        self.generic_visit(node)
        self.checked_until = outer
        return node

    visit_Module = visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = _Vacuous(self).visit(self.compared(node.test))
        raised = ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg is not None else [], [])
        condition = ast.UnaryOp(ast.Not(), _call("check", _call("begin"), test))
        return ast.copy_location(ast.If(condition, [ast.Raise(_call("failing", raised), None)], []), node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        self.generic_visit(node)
        if node.exc is not None and _last_name(getattr(node.exc, "func", node.exc)) == "AssertionError":
            node.exc = _call("failing", node.exc if isinstance(node.exc, ast.Call) else ast.Call(node.exc, [], []))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not isinstance(node.value, ast.Call) or not _is_assertion_call(node.value):
            self.generic_visit(node)
        else:
            if _last_name(node.value.func) in ("assertTrue", "assertFalse", "assert_"):
                node.value.args[:1] = [self.compared(value) for value in node.value.args[:1]]
            else:
                self.arguments(node.value)
            node.value.func = _call("checking", node.value.func)
            node.value = _Vacuous(self).visit(node.value)
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        kinds = [item.context_expr for item in node.items if _expects(item.context_expr)]
        own = any("AssertionError" in ast.unparse(kind) for kind in kinds)
        excused = ast.parse(f"{JUDGE}.expected(*{JUDGE}.failed[-1:])").body if own else []
        return [node, *excused, *([ast.Expr(_call("passed"))] if kinds else [])]

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        fails = any(map(_always_fails, node.orelse))
        checks = _has_checks(node.body)
        expected = fails or any(map(_always_fails, node.body))
        node.body = self._block(node.body)
        for handler in node.handlers:
            quiet = not _has_checks(handler.body)
            handler.body = self._block(handler.body)
            calls = [*(["expected"] if fails or not quiet else []), *(["passed"] if quiet and expected else [])]
            calls += ["swallowed"] if quiet and checks and not expected else []
            handler.body[:0] = [ast.Expr(_call(name)) for name in calls]
        node.orelse = self._block(node.orelse)
        node.finalbody = self._block(node.finalbody)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        branches = [node.body, node.orelse]
        checks = [_has_checks(branch) for branch in branches]
        fails = [bool(branch) and all(map(_always_fails, branch)) for branch in branches]
        if _from_solution(node.test, self.tainted) and not any(fails):
            later = self.checked_until > (node.end_lineno or 0)
            leaves = [later and _contains(branch, lambda node: isinstance(node, _LEAVING)) for branch in branches]
            for own, other in ((0, 1), (1, 0)):
                rest = leaves[other] and not leaves[own]  # what follows is checked instead
                if not checks[own] and (leaves[own] or (checks[other] and not rest)):
                    raise UnreadableTestsError("an assert is under a condition that the solution decides")
        test = self.visit(node.test)
        if any(map(_always_fails, node.body + node.orelse)):
            test = _call("value", _call("begin"), self.compared(test))
        return ast.copy_location(ast.If(test, self._block(node.body), self._block(node.orelse)), node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        decided = _has_checks(node.body) and _from_solution(node.iter, self.tainted)
        self.generic_visit(node)
        if decided:
            node.iter = _call("several", self.site(), _Vacuous(self).visit(node.iter))
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        if _has_checks(node.body) and _from_solution(node.test, self.tainted):
            raise UnreadableTestsError("an assert is in a loop whose length the solution decides")
        self.generic_visit(node)
        return node

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        block: list[ast.stmt] = []
        for statement in statements:
            visited = self.visit(statement)
            block += visited if isinstance(visited, list) else [visited]
        return block


_ORDER = ast.Lt | ast.LtE | ast.Gt | ast.GtE
_LEAVING = ast.Return | ast.Continue | ast.Break
_SIDES = frozenset("first second actual desired expected x y a b left right list1 list2".split())
"""Names of parameters that are compared."""


class _Vacuous(ast.NodeTransformer):
    """Where there may be nothing to compare: `all(... for x in f())` of no x, `zip(f(), [1, 2])` of a short f()."""

    def __init__(self, rewriting: _Rewriting) -> None:
        self.rewriting = rewriting
        self.bounded = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.bounded = any(isinstance(one, _ORDER) for one in node.ops)  # an error within a tolerance
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = _called_name(node)
        if name in ("list", "tuple", "dict", "set", "sorted", "len"):
            return node  # what it has is compared
        self.generic_visit(node)
        inner = node.args[0] if len(node.args) == 1 else None
        if inner is None or not (name in ("all", "any") or (name == "sum" and self.bounded)):
            return self.rewriting.side_by_side(node)
        if isinstance(inner, ast.GeneratorExp | ast.ListComp):
            inner.generators[0].iter = self.several(inner.generators[0].iter)
        elif name == "all":
            node.args = [self.several(inner)]
        return node

    def several(self, values: ast.expr) -> ast.expr:
        own = not _from_solution(values, self.rewriting.tainted)
        return values if own else _call("several", self.rewriting.site(), values)


def _has_star(node: ast.Call) -> bool:
    return any(isinstance(value, ast.Starred) for value in node.args)


def _contains(statements: Sequence[ast.stmt], wanted: Callable[[ast.AST], bool]) -> bool:
    return any(wanted(inner) for part in statements for inner in ast.walk(part))


def _has_checks(statements: Sequence[ast.stmt]) -> bool:
    return _contains(statements, _checks_something)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(JUDGE, ast.Load()), name, ast.Load()), list(arguments), [])
