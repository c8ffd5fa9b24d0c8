"""Writes the code that the pages quote: `make fix`.

A quote is a fenced block that names a file and a place in it. The block's text is copied from the file, as whole lines.

    ```python title="src/nexrl/client.py" symbol="RolloutClient.put"
    ```yaml title="buf.yaml" from="breaking:"

`symbol` names a class, a function, a method or an assignment of a Python file, with its decorators.
`from` is the beginning of a line that occurs once; white space does not count. In Python, the quote is the statement or
expression that begins there. In other files it is the line and the lines indented below it, with the comments `//`
above it and the closing bracket. Below a heading (`[section]`, or `FROM` of a Dockerfile) it ends at a blank line.
`through` is optional and names the last part of the quote, in the same way.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.marks import ROOT

QUOTE = re.compile(
    r'^(?P<head>```\w+ title="(?P<file>[^"\n]+)" (?P<kind>symbol|from)=(?P<mark>["\'])(?P<first>[^\n]+?)(?P=mark)'
    r'(?: through=(?P<mark2>["\'])(?P<last>[^\n]+?)(?P=mark2))?\n)(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"FROM |\[")

Lines = tuple[int, int]
"""The first line, counted from 0, and the line after the last."""


def main() -> None:
    """Write all pages that quote code. Exits with 1 if a quoted place does not exist."""
    problems = []
    for page in pages():
        text = page.read_text()
        try:
            page.write_text(refreshed(text))
        except ValueError as error:
            problems.append(f"{page.relative_to(ROOT)}: {error}")
    if problems:
        sys.exit("\n".join(problems))


def pages() -> list[Path]:
    """Return all pages with a quote."""
    found = [*ROOT.glob("*.md"), *(path for folder in ("docs", "examples", "services") for path in _below(folder))]
    return sorted(path for path in found if QUOTE.search(path.read_text()))


def refreshed(page: str, root: Path = ROOT) -> str:
    """Return the text of a page with each quote as its file is now. Raises ValueError for places not found."""
    problems = []

    def rewritten(match: re.Match[str]) -> str:
        try:
            return f"{match['head']}{_quoted(match, root)}```"
        except ValueError as error:
            problems.append(str(error))
            return match[0]

    text = QUOTE.sub(rewritten, page)
    if problems:
        raise ValueError("; ".join(problems))
    return text


def _below(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.md")


def _quoted(match: re.Match[str], root: Path) -> str:
    path = root / match["file"]
    if not path.is_file():
        raise ValueError(f"{match['file']} does not exist")
    text = path.read_text()
    first, end = _find(text, path, match["kind"], match["first"])
    if match["last"]:
        end = _find(text, path, match["kind"], match["last"])[1]
    # With the comma after an element of a list, the quote would be a tuple, which `ruff format` writes in another way.
    return "\n".join(text.splitlines()[first:end]).removesuffix(",") + "\n"


def _find(text: str, path: Path, kind: str, name: str) -> Lines:
    found = list(_symbols(text, name) if kind == "symbol" else _blocks(text, path, name))
    if len(found) != 1:
        raise ValueError(f"{kind} {name!r} occurs {len(found)} times in {path.name}; it must occur once")
    return found[0]


def _symbols(text: str, name: str) -> Iterator[Lines]:
    bodies = [ast.parse(text).body]
    *outer, last = name.split(".")
    for part in outer:
        bodies = [getattr(node, "body", []) for body in bodies for node in _named(body, part)]
    for node in (node for body in bodies for node in _named(body, last)):
        decorators = getattr(node, "decorator_list", [])
        yield min(part.lineno for part in (node, *decorators)) - 1, node.end_lineno or node.lineno


def _named(body: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Definitions and assignments of a name, also those inside of `if`, `for`, `with` and `try`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            names = [ast.unparse(node.target)]
        else:
            names = []
            yield from _named([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)], name)
        if name in names:
            yield node


def _blocks(text: str, path: Path, beginning: str) -> Iterator[Lines]:
    pattern = r"\s*".join(re.escape(letter) for letter in "".join(beginning.split()))
    for match in re.finditer(rf"^[ \t]*(?={pattern})", text, re.MULTILINE):
        first = text.count("\n", 0, match.start())
        yield _statement(text, first, len(match[0])) if path.suffix == ".py" else _indented(text.splitlines(), first)


def _statement(text: str, first: int, column: int) -> Lines:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.expr)]
    ends = [node.end_lineno or 0 for node in nodes if (node.lineno - 1, node.col_offset) == (first, column)]
    return first, max(ends, default=first + 1)


def _indented(lines: Sequence[str], first: int) -> Lines:
    def indentation(line: str) -> int:
        return len(line) - len(line.lstrip())

    own, end = indentation(lines[first]), first + 1
    is_heading = bool(HEADING.match(lines[first]))
    while end < len(lines) and lines[end].strip() and (is_heading or indentation(lines[end]) > own):
        end += 1
    if end < len(lines) and indentation(lines[end]) == own and lines[end].strip() in ("}", "]", ")"):
        end += 1
    while first and lines[first - 1].strip().startswith("//"):
        first -= 1
    return first, end


if __name__ == "__main__":
    main()
