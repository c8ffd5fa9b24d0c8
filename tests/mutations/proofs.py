"""Remembers in proven.json which mutations a test has noticed, by what was proven.

A proof holds for a digest of the function that is mutated, of the mutation, and of its test. Whoever changes one of the
three has to prove it again; a function that moves, or another one in the same file, changes nothing.
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tests.mutations.mutation import Mutation
from tests.support.marks import ROOT

FILE = Path(__file__).parent / "proven.json"
DIGEST_LENGTH = 16
Proofs = dict[str, str]
"""What the test then said, by digest."""


def load() -> Proofs:
    """Return what is proven."""
    return {digest: says for digest, (_, says) in json.loads(FILE.read_text()).items()} if FILE.exists() else {}


def write(proofs: Proofs, mutations: Iterable[Mutation]) -> None:
    """Write the proofs of these mutations, and no others."""
    digests = {mutation: digest(mutation) for mutation in mutations}
    kept = {found: [mutation.what, proofs[found]] for mutation, found in digests.items() if found in proofs}
    ordered = dict(sorted(kept.items(), key=lambda item: (item[1][0], item[0])))
    FILE.write_text(json.dumps(ordered, indent=0, ensure_ascii=False) + "\n")


def digest(mutation: Mutation, root: Path = ROOT) -> str:
    """Return a digest of all that a proof depends on."""
    code = around((root / mutation.path).read_text(), mutation.text, is_python=mutation.path.endswith(".py"))
    parts = (code, mutation.text, mutation.without, mutation.test.partition("[")[2], _test(mutation.test, root))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGEST_LENGTH]


def around(source: str, text: str, *, is_python: bool) -> str:
    """Return the innermost function that contains `text`.

    Python outside a function: the smallest statement. Else, and in other languages: from a line without indentation to
    the next one.
    """
    start = source.index(text)
    first, last = source.count("\n", 0, start) + 1, source.count("\n", 0, start + len(text.rstrip("\n"))) + 1
    lines = source.splitlines(keepends=True)
    spans = _statements(source, first, last) if is_python else []
    begin, end = spans[0] if spans else _unindented(lines, first, last)
    return "".join(lines[begin - 1 : end])


def _statements(source: str, first: int, last: int) -> list[tuple[int, int]]:
    """Return the lines of what contains the given ones: functions first, the smallest before others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            begin = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            end = node.end_lineno or node.lineno
            if begin <= first and last <= end:
                found.append((not is_function, end - begin, begin, end))
    return [(begin, end) for _, _, begin, end in sorted(found)]


def _unindented(lines: list[str], first: int, last: int) -> tuple[int, int]:
    starts = [number for number, line in enumerate(lines, 1) if line[:1].strip()]
    begin = max((number for number in starts if number <= first), default=1)
    return begin, min((number - 1 for number in starts if number > last), default=len(lines))


def _test(test: str, root: Path) -> str:
    """Return the source of a test; of its file, if `test` names a file."""
    path, *names = test.partition("[")[0].split("::")
    source = (root / path).read_text()
    if not names:
        return source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[-1]:
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "\n".join(source.splitlines()[begin - 1 : node.end_lineno])
    raise ValueError(f"{path} has no test {'::'.join(names)}")
