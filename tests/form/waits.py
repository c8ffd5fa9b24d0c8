"""Finds what makes a test depend on the speed of the machine: sleeps, short limits, and the clock in a comparison.

Each needs a reason in a comment, on its line or right above it:

    # speed: a lease of the real server cannot be shorter
    await asyncio.sleep(1.5)

Waits without a reason that are older than this rule are in known_waits.yaml. That list only gets shorter: `make fix`
takes off what is gone. Everything else waits with tests/support/patience.py.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.marks import ROOT, TESTS

KNOWN = Path(__file__).with_name("known_waits.yaml")
PATIENCE = "tests/support/patience.py"
LONG_SECONDS = 60
"""A limit of this length or more only ends a test that hangs."""

CLOCKS = re.compile(r"(time\.)?(monotonic|perf_counter|time)(_ns)?|.*loop(\(\))?\.time")
LIMITS: Mapping[str, int] = {"asyncio.timeout": 0, "pytest.mark.timeout": 0, "asyncio.wait_for": 1}
"""Functions with a limit, and the position of this argument."""
METHODS = ("join", "result", "wait")
"""Methods whose first argument, if it is a number, is a limit."""
LIMIT_NAMES = ("timeout", "timeout_seconds", "seconds")
REASON = re.compile(r"# speed: \S")
HEADER = """# Waits that depend on the speed of the machine and have no reason beside them, by file (waits.py).
# The list only gets shorter: `make fix` takes off what is gone. A new wait needs a reason; see patience.py.
"""
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
Numbers = Mapping[str, float]
"""The numbers that a module gives names to."""


@dataclass(frozen=True, order=True)
class Wait:
    """A place in a source. Lines are counted from 1."""

    line: int
    what: str


def main() -> None:
    """Take off the list what is not there any more."""
    write(shortened(load(), find_all()))


def load() -> dict[str, list[str]]:
    """Return the known waits by file."""
    return yaml.safe_load(KNOWN.read_text()) or {}


def write(known: Mapping[str, Sequence[str]]) -> None:
    """Write the known waits."""
    lists = {path: sorted(waits) for path, waits in sorted(known.items())}
    KNOWN.write_text(HEADER + yaml.safe_dump(lists, width=1000))


def shortened(known: Mapping[str, Sequence[str]], there: Mapping[str, Sequence[Wait]]) -> dict[str, list[str]]:
    """Return the known waits that are there. Nothing is added."""
    kept = {path: Counter(waits) & _counted(there.get(path, ())) for path, waits in known.items()}
    return {path: sorted(waits.elements()) for path, waits in kept.items() if waits}


def problems(known: Mapping[str, Sequence[str]], there: Mapping[str, Sequence[Wait]]) -> list[str]:
    """Return a line for each wait of a kind that its file has more often than is known, and each file with fewer."""
    lines = []
    for path, found in sorted(there.items()):
        more = _counted(found) - Counter(known.get(path, ()))
        lines += [f"{path}:{wait.line}: {wait.what}" for wait in found if wait.what in more]
    fewer = [path for path, waits in sorted(known.items()) if Counter(waits) - _counted(there.get(path, ()))]
    return [*lines, *(f"{path}: has fewer waits than are known: run `make fix`" for path in fewer)]


def _counted(waits: Sequence[Wait]) -> Counter[str]:
    return Counter(wait.what for wait in waits)


def find_all() -> dict[str, list[Wait]]:
    """Return the waits without a reason of all files in tests/, by path."""
    paths = {str(path.relative_to(ROOT)): path for path in sorted(TESTS.rglob("*.py"))}
    found = {name: find(path.read_text()) for name, path in paths.items() if name != PATIENCE}
    return {name: waits for name, waits in found.items() if waits}


def find(source: str) -> list[Wait]:
    """Return the waits of a source that have no reason beside them."""
    module, lines = ast.parse(source), source.splitlines()
    numbers = _numbers(module)
    found = {wait for node in ast.walk(module) for wait in _waits(node, numbers)} | set(_comparisons(module))
    return sorted(wait for wait in found if not _has_reason(lines, wait.line))


def _has_reason(lines: list[str], line: int) -> bool:
    """Look at a line, and at the lines above it that are only comments."""
    above = line - 1
    while above and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return any(REASON.search(text) for text in lines[above:line])


def _waits(node: ast.AST, numbers: Numbers) -> Iterator[Wait]:
    if isinstance(node, ast.Call):
        yield from _in_call(node, numbers)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for name, default in _defaults(node.args):
            if name in LIMIT_NAMES and _is_short(default, numbers):
                yield Wait(default.lineno, f"{name} = {ast.unparse(default)}")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_short(node.value, numbers):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            if _is_found_by_name(name):
                yield Wait(node.lineno, f"{name} = {ast.unparse(node.value)}")


def _in_call(call: ast.Call, numbers: Numbers) -> Iterator[Wait]:
    name = ast.unparse(call.func)
    is_sleep = name.rpartition(".")[2] == "sleep"
    position = 0 if is_sleep or name.rpartition(".")[2] in METHODS else LIMITS.get(name)
    if position is not None and len(call.args) > position:
        argument = call.args[position]
        is_pause = is_sleep and (isinstance(argument, ast.BinOp) or (_number(argument, numbers) or 0) > 0)
        if is_pause or _is_short(argument, numbers):
            yield Wait(call.lineno, f"{name}({ast.unparse(argument)})")
    for keyword in call.keywords:
        if keyword.arg in LIMIT_NAMES and _is_short(keyword.value, numbers):
            yield Wait(keyword.value.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}")


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        yield argument.arg, default
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            yield argument.arg, value


def _comparisons(module: ast.Module) -> Iterator[Wait]:
    """Yield assertions and other comparisons of the clock, or of a variable that was calculated from it."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in (module, *functions):
        nodes = list(ast.walk(scope) if scope in functions else _outside_functions(module))
        timed = {
            ast.unparse(target)
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_reading(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        assertions = [node for node in nodes if isinstance(node, ast.Assert)]
        asserted = {id(part) for assertion in assertions for part in ast.walk(assertion)}
        compared: list[ast.stmt | ast.expr] = [
            node for node in nodes if isinstance(node, ast.Compare) and id(node) not in asserted
        ]
        for node in (*assertions, *compared):
            if any(_is_reading(part) or _name(part) in timed for part in ast.walk(node)):
                yield Wait(node.lineno, "compares the clock")


def _is_reading(node: ast.AST) -> bool:
    """True for a call of a clock, and for a sum or difference with one."""
    if isinstance(node, ast.BinOp):
        return _is_reading(node.left) or _is_reading(node.right)
    return isinstance(node, ast.Call) and CLOCKS.fullmatch(ast.unparse(node.func)) is not None


def _name(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _outside_functions(child)


def _numbers(module: ast.Module) -> Numbers:
    """Return the numbers that the module gives names to, also in functions; of several, the smallest."""
    numbers: dict[str, float] = {}
    parameters = {node.arg for node in ast.walk(module) if isinstance(node, ast.arg)}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            number = _number(node.value, numbers)
            if isinstance(target, ast.Name) and target.id not in parameters and number is not None:
                numbers[target.id] = min(number, numbers.get(target.id, number))
    return numbers


def _number(node: ast.expr, numbers: Numbers) -> float | None:
    """Return the value of a number, of a name of one, or of a calculation with them."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) else None
    if isinstance(node, ast.Name) and not _is_found_by_name(node.id):
        return numbers.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _number(node.left, numbers), _number(node.right, numbers)
        if left is not None and right is not None:
            with suppress(ZeroDivisionError):
                return OPERATORS[type(node.op)](left, right)
    return None


def _is_found_by_name(name: str) -> bool:
    """True for the name of a constant that needs its reason where it is defined, and not at each use."""
    return name.isupper() and name.endswith("SECONDS")


def _is_short(node: ast.expr, numbers: Numbers) -> bool:
    number = _number(node, numbers)
    return number is not None and 0 < number < LONG_SECONDS


if __name__ == "__main__":
    main()
