"""A quote names a file and a place in it; its text follows the file."""

from pathlib import Path

import pytest

from tests.form.quotes import refreshed

PYTHON = '''LIMITS = {
    "put": 3,
}
if LIMITS:
    LATE: int = 4


class Pool:
    """A pool."""

    size: int = 3

    @property
    def free(self) -> int:
        return self.size

    async def put(self) -> None:
        taken = 1
        for _ in range(2):  # twice
            self.size -= taken


class Other:
    def put(self) -> None: ...


CALLS = [
    call(
        "one",
        2,
    ),
    call("three"),
]
'''
PROTO = """service Pools {
  // Puts.
  rpc Put(PutRequest) returns (PutResponse);
  // Takes.
  rpc Take(TakeRequest) returns (TakeResponse);
}

// Request of Put.
// Is small.
message PutRequest {
  int32 size = 1;
}

// Response of Put.
message PutResponse {}
"""
YAML = "a:\n  one: {x: 1}\n  two:\n    - 3\n\nb: 4\n"
TOML = '[tool.one]\na = 1\n\n[tool.two]\nlist = [\n  "x",\n]\nb = 2\n'
DOCKERFILE = "FROM base AS one\n# Why.\nRUN x\n\nFROM base AS two\n"
FILES = {"pool.py": PYTHON, "pools.proto": PROTO, "values.yaml": YAML, "some.toml": TOML, "Dockerfile": DOCKERFILE}


def page(file: str, place: str, text: str = "old\n") -> str:
    return f'Before.\n\n```text title="{file}" {place}\n{text}```\n\nAfter.\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "place", "text"),
    [
        ("pool.py", 'symbol="LIMITS"', 'LIMITS = {\n    "put": 3,\n}\n'),
        ("pool.py", 'symbol="LATE"', "    LATE: int = 4\n"),
        ("pool.py", 'symbol="Pool.size"', "    size: int = 3\n"),
        ("pool.py", 'symbol="Pool" through="Pool.size"', 'class Pool:\n    """A pool."""\n\n    size: int = 3\n'),
        ("pool.py", 'symbol="Pool.free"', "    @property\n    def free(self) -> int:\n        return self.size\n"),
        ("pool.py", 'symbol="Pool.put.taken"', "        taken = 1\n"),
        ("pool.py", 'symbol="Other.put"', "    def put(self) -> None: ...\n"),
        (
            "pool.py",
            'from="for _ in range(2):"',
            "        for _ in range(2):  # twice\n            self.size -= taken\n",
        ),
        ("pool.py", "from='call(\"one\",'", '    call(\n        "one",\n        2,\n    )\n'),
        ("pools.proto", 'from="rpc Put("', "  // Puts.\n  rpc Put(PutRequest) returns (PutResponse);\n"),
        (
            "pools.proto",
            'from="message PutRequest"',
            "// Request of Put.\n// Is small.\nmessage PutRequest {\n  int32 size = 1;\n}\n",
        ),
        ("values.yaml", 'from="a:"', "a:\n  one: {x: 1}\n  two:\n    - 3\n"),
        ("values.yaml", 'from="two:"', "  two:\n    - 3\n"),
        ("some.toml", 'from="list ="', 'list = [\n  "x",\n]\n'),
        ("some.toml", 'from="[tool.one]"', "[tool.one]\na = 1\n"),
        ("Dockerfile", 'from="FROM base AS one"', "FROM base AS one\n# Why.\nRUN x\n"),
    ],
)
def test_a_quote_is_what_its_place_names(root: Path, file: str, place: str, text: str) -> None:
    assert refreshed(page(file, place), root) == page(file, place, text)


def test_a_page_that_is_up_to_date_stays_as_it_is_and_a_file_to_write_is_no_quote(root: Path) -> None:
    once = refreshed(page("pool.py", 'symbol="Pool.size"') + page("values.yaml", 'from="b:"'), root)
    assert refreshed(once, root) == once
    file = '```python title="digits.py"\nold\n```\n'
    assert refreshed(file, root) == file


def test_a_quote_follows_code_that_moves_and_changes(root: Path) -> None:
    (root / "pool.py").write_text("import os\n\n\nclass Pool:\n    size: int = 5\n")
    assert "    size: int = 5\n" in refreshed(page("pool.py", 'symbol="Pool.size"'), root)


def test_all_places_that_are_not_found_are_named_at_once(root: Path) -> None:
    wrong = page("pool.py", 'symbol="Pool.take"') + page("none.py", 'symbol="x"') + page("pools.proto", 'from="rpc"')
    with pytest.raises(
        ValueError, match=r"'Pool.take' occurs 0 times in pool.py.*none.py does not exist.*'rpc' occurs 2 times"
    ):
        refreshed(wrong, root)
