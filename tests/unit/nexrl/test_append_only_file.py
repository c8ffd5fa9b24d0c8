"""What is done with the end of an append-only file before a server loads it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.local.append_only_file import EXEC, MULTI, find_open_transaction, make_whole

# Values with these words have tests of their own: a file that is cut within one cannot be told from one that is not.
VALUES = st.binary(max_size=40).filter(lambda value: b"MULTI" not in value and b"EXEC" not in value)
COMMANDS = st.lists(VALUES, min_size=1, max_size=3).map(
    lambda values: b"".join([b"*%d\r\n" % len(values), *(b"$%d\r\n%s\r\n" % (len(v), v) for v in values)])
)
BLOCKS = st.one_of(
    COMMANDS.map(lambda command: [command]), st.lists(COMMANDS, min_size=1).map(lambda c: [MULTI, *c, EXEC])
)


@given(st.lists(BLOCKS, max_size=5), st.floats(0, 1))
def test_a_file_cut_anywhere_ends_in_no_transaction(blocks: list[list[bytes]], part: float) -> None:
    wholes = [b"".join(block) for block in blocks]
    content = b"".join(wholes)
    content = content[: round(part * len(content))]
    begin, expected = 0, None
    for block, whole in zip(blocks, wholes, strict=True):
        if begin + len(MULTI) <= len(content) < begin + len(whole) and block[0] == MULTI:
            expected = begin
        begin += len(whole)
    assert find_open_transaction(content) == expected


@pytest.mark.parametrize("name", ["appendonly.aof", "appendonlydir/appendonly.aof.2.incr.aof"])
def test_the_beginning_of_a_transaction_is_dropped_from_the_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    kept = b"REDIS0009\xfa*1\r\n$4\r\n" + MULTI + b"*1\r\n$1\r\na\r\n" + EXEC
    file.write_bytes(kept + MULTI + b"*1\r\n$1\r\nb\r\n*2\r\n$1")
    make_whole(tmp_path)
    assert file.read_bytes() == kept
    make_whole(tmp_path)
    assert file.read_bytes() == kept


def test_a_value_that_looks_like_the_end_of_a_transaction_is_none() -> None:
    value = b"." + EXEC + b"."
    command = b"*1\r\n$%d\r\n%s\r\n" % (len(value), value)
    assert find_open_transaction(MULTI + command + b"*1\r\n$9\r\n") == 0
    assert find_open_transaction(MULTI + command + EXEC + command + b"*1\r\n") is None


def test_a_value_that_looks_like_the_beginning_of_a_transaction_is_none() -> None:
    command = b"*1\r\n$%d\r\n%s\r\n" % (len(MULTI), MULTI)
    assert find_open_transaction(command + MULTI + b"*1\r\n$9\r\n") == len(command)
    assert find_open_transaction(command) is None


def test_files_without_transactions_stay_as_they_are(tmp_path: Path) -> None:
    for content in (b"", b"REDIS0009", b"*2\r\n$3\r\nDEL\r\n$1\r\nx"):
        (tmp_path / "appendonly.aof").write_bytes(content)
        make_whole(tmp_path)
        assert (tmp_path / "appendonly.aof").read_bytes() == content
