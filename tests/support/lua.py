"""A linter for the ledger's Lua code: names that are not declared, and names that are declared and never used.

No Lua linter is available as a wheel. This linter reads tokens, not a syntax tree. It knows blocks, local variables,
parameters and table fields. That is enough to resolve a name.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<number>\d[\w.]*)|(?P<symbol>\.\.\.|\.\.|==|~=|<=|>=|[-+*/%^\#<>=(){}\[\];:,.])|(?P<space>\s+)|(?P<odd>.)"""
)
KEYWORDS = {
    *(
        "and",
        "break",
        "do",
        "else",
        "elseif",
        "end",
        "false",
        "for",
        "function",
        "if",
        "in",
        "local",
        "nil",
        "not",
        "or",
    ),
    *("repeat", "return", "then", "true", "until", "while"),
}
GLOBALS = {
    *("ARGV", "KEYS", "assert", "cjson", "error", "ipairs", "math", "pairs", "redis", "select", "string", "table"),
    *("tonumber", "tostring", "type", "unpack"),
}
"""The globals that Redis provides to scripts, as far as the ledger uses them."""


@dataclass(frozen=True)
class Token:
    """One token of a script."""

    kind: str
    text: str
    line: int


@dataclass
class Variable:
    """A local variable or parameter."""

    line: int
    is_used: bool = False


@dataclass
class Scope:
    """The variables of one block. `opener` is the word that opens the block."""

    opener: str
    variables: dict[str, Variable] = field(default_factory=dict)


def tokens(script: str) -> list[Token]:
    """Return the tokens of a script without comments. Raises ValueError for Lua that this linter does not know."""
    found, line = [], 1
    for match in TOKEN.finditer(script):
        kind, text = match.lastgroup or "", match.group()
        if kind == "odd" or text == "--[[" or text in ("repeat", "until"):
            raise ValueError(f"line {line}: {text!r} is not known here")
        if kind not in ("comment", "space"):
            found.append(Token("keyword" if text in KEYWORDS else kind, text, line))
        line += text.count("\n")
    return found


def problems(script: str) -> list[str]:
    """Return the problems with the names of a script, in the order of its lines."""
    return _Linter(tokens(script)).run()


class _Linter:
    def __init__(self, words: Sequence[Token]) -> None:
        self._words = words
        self._scopes = [Scope("script")]
        self._brackets: list[str] = []
        self._pending: list[Token] = []
        """Variables of a `for`. The following `do` declares them."""
        self._found: list[tuple[int, str]] = []

    def run(self) -> list[str]:
        position = 0
        while position < len(self._words):
            position = self._read(position)
        while self._scopes:
            self._close()
        return [f"line {line}: {problem}" for line, problem in sorted(self._found)]

    def _read(self, position: int) -> int:
        """Read the construct at `position`. Returns the position of the next one."""
        word = self._words[position]
        match word.text if word.kind in ("keyword", "symbol") else "":
            case "local":
                return self._read_local(position + 1)
            case "function":
                return self._read_function(position + 1)
            case "for":
                return self._read_for(position + 1)
            case "do" | "then" | "else" | "elseif" | "end":
                self._change_block(word.text)
            case "(" | "{" | "[":
                self._brackets.append(word.text)
            case ")" | "}" | "]":
                self._brackets.pop()
            case _ if word.kind == "name" and not self._is_field(position):
                self._use(word)
        return position + 1

    def _read_local(self, position: int) -> int:
        if self._words[position].text == "function":
            self._declare(self._words[position + 1])
            return self._read_function(position + 1)
        names, position = self._names(position)
        for name in names:
            self._declare(name)
        return position

    def _read_function(self, position: int) -> int:
        while self._words[position].text != "(":  # the function's name is declared already, or is a field of a table
            if self._words[position].kind == "name" and self._words[position + 1].text == ".":
                self._use(self._words[position])
            position += 1
        self._open("function")
        names, position = self._names(position + 1)
        for name in names:
            self._declare(name)
        return position + (self._words[position].text == "...") + 1

    def _read_for(self, position: int) -> int:
        self._pending, position = self._names(position)
        return position

    def _names(self, position: int) -> tuple[list[Token], int]:
        names = []
        while self._words[position].kind == "name":
            names.append(self._words[position])
            position += 1
            if self._words[position].text != ",":
                break
            position += 1
        return names, position

    def _change_block(self, word: str) -> None:
        if word in ("else", "elseif", "end"):
            self._close()
        if word in ("do", "then", "else"):
            self._open(word)
            for name in self._pending if word == "do" else ():
                self._declare(name)
            self._pending = [] if word == "do" else self._pending

    def _open(self, opener: str) -> None:
        self._scopes.append(Scope(opener))

    def _close(self) -> None:
        for name, variable in self._scopes.pop().variables.items():
            if not variable.is_used and name != "_":
                self._found.append((variable.line, f"{name} is never used"))

    def _declare(self, name: Token) -> None:
        self._scopes[-1].variables[name.text] = Variable(name.line)

    def _use(self, name: Token) -> None:
        for scope in reversed(self._scopes):
            if name.text in scope.variables:
                scope.variables[name.text].is_used = True
                return
        if name.text not in GLOBALS:
            self._found.append((name.line, f"{name.text} is not declared"))

    def _is_field(self, position: int) -> bool:
        """Return True for `x` in `.x`, in `:x` and, inside a table, in `x =`."""
        before = self._words[position - 1].text if position else ""
        after = self._words[position + 1].text if position + 1 < len(self._words) else ""
        return before in (".", ":") or (after == "=" and before in ("{", ",", ";") and self._brackets[-1:] == ["{"])


def literals(script: str, functions: Sequence[str], argument: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (function, string) for each call of `functions` whose argument at index `argument` is a string literal."""
    words = tokens(script)
    for position, word in enumerate(words):
        if word.text in functions and words[position + 1].text == "(":
            given = words[position + 2 + 2 * argument]
            if given.kind == "string":
                yield word.text, given.text[1:-1]
