"""Finds what makes a test depend on the speed of the machine: sleeps, short limits, and the clock in a comparison.

Each needs a reason in a comment, on its line or right above it:

    # speed: a lease of the real server cannot be shorter
    await asyncio.sleep(1.5)

Waits without a reason that are older than this rule are counted by file in known_waits.yaml. The counts only go down:
`make fix` lowers them. Everything else waits with tests/support/patience.py.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.marks import ROOT, TESTS

KNOWN = Path(__file__).with_name("known_waits.yaml")
PATIENCE = "tests/support/patience.py"
LONG_SECONDS = 60
"""A limit of this length or more only ends a test that hangs."""

SLEEPS = ("time.sleep", "asyncio.sleep", "sleep")
CLOCKS = (
    "time.time",
    "time.monotonic",
    "time.perf_counter",
    "monotonic",
    "perf_counter",
    "asyncio.get_running_loop().time",
)
LIMITS: Mapping[str, int] = {"asyncio.timeout": 0, "pytest.mark.timeout": 0, "asyncio.wait_for": 1}
"""Functions with a limit, and the position of this argument."""
METHODS = ("join", "result", "wait")
"""Methods whose first argument, if it is a number, is a limit."""
LIMIT_NAMES = ("timeout", "timeout_seconds", "seconds")
REASON = re.compile(r"# speed: \S")
HEADER = """# Waits that depend on the speed of the machine and have no reason beside them, by file (waits.py).
# The counts only go down: `make fix` lowers them. Give a new wait a reason, or use tests/support/patience.py.
"""


@dataclass(frozen=True, order=True)
class Wait:
    """A place in a source. Lines are counted from 1."""

    line: int
    what: str


def main() -> None:
    """Lower the counts of the list to what is there."""
    write(lowered(load(), {path: len(found) for path, found in find_all().items()}))


def load() -> dict[str, int]:
    """Return the known counts by file."""
    return yaml.safe_load(KNOWN.read_text()) or {}


def write(counts: Mapping[str, int]) -> None:
    """Write the known counts."""
    KNOWN.write_text(HEADER + "".join(f"{path}: {count}\n" for path, count in sorted(counts.items())))


def lowered(known: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Return the known counts, none of them above what is there. No file is added."""
    counts = {path: min(count, there.get(path, 0)) for path, count in known.items()}
    return {path: count for path, count in counts.items() if count}


def problems(known: Mapping[str, int], there: Mapping[str, list[Wait]]) -> list[str]:
    """Return what differs: each wait of a file that has more than are known, and each count that is too high."""
    lines = []
    for path, found in sorted(there.items()):
        if len(found) > known.get(path, 0):
            lines.append(f"{path}: {len(found)} waits without a reason, {known.get(path, 0)} are known:")
            lines += [f"  {path}:{wait.line}: {wait.what}" for wait in found]
    too_high = [path for path, count in sorted(known.items()) if count > len(there.get(path, ()))]
    return [*lines, *(f"{path}: has fewer waits than are known: run `make fix`" for path in too_high)]


def find_all() -> dict[str, list[Wait]]:
    """Return the waits without a reason of all files in tests/, by path."""
    paths = {str(path.relative_to(ROOT)): path for path in sorted(TESTS.rglob("*.py"))}
    found = {name: find(path.read_text()) for name, path in paths.items() if name != PATIENCE}
    return {name: waits for name, waits in found.items() if waits}


def find(source: str) -> list[Wait]:
    """Return the waits of a source that have no reason beside them."""
    module, lines = ast.parse(source), source.splitlines()
    found = {wait for node in ast.walk(module) for wait in _waits(node)} | set(_comparisons(module))
    return sorted(wait for wait in found if not _has_reason(lines, wait.line))


def _has_reason(lines: list[str], line: int) -> bool:
    """Look at a line, and at the lines above it that are only comments."""
    above = line - 1
    while above and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return any(REASON.search(text) for text in lines[above:line])


def _waits(node: ast.AST) -> Iterator[Wait]:
    if isinstance(node, ast.Call):
        yield from _in_call(node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for name, default in _defaults(node.args):
            if name in LIMIT_NAMES and _is_short(default):
                yield Wait(default.lineno, f"{name} = {ast.unparse(default)}")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_short(node.value):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            if name.isupper() and name.endswith("SECONDS"):
                yield Wait(node.lineno, f"{name} = {ast.unparse(node.value)}")


def _in_call(call: ast.Call) -> Iterator[Wait]:
    name = ast.unparse(call.func)
    is_sleep = name in SLEEPS
    position = 0 if is_sleep or name.rpartition(".")[2] in METHODS else LIMITS.get(name)
    if position is not None and len(call.args) > position:
        argument = call.args[position]
        if _is_short(argument) or (is_sleep and _is_number(argument)):
            yield Wait(call.lineno, f"{name}({ast.unparse(argument)})")
    for keyword in call.keywords:
        if keyword.arg in LIMIT_NAMES and _is_short(keyword.value):
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
    for function in functions:
        nodes = list(ast.walk(function))
        timed = {
            ast.unparse(target)
            for node in nodes
            if isinstance(node, ast.Assign) and _is_reading(node.value)
            for target in node.targets
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
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS


def _name(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > 0


def _is_short(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < LONG_SECONDS


if __name__ == "__main__":
    main()
