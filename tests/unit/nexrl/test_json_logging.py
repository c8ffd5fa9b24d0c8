"""Every process logs in one format."""

import json
import logging
import sys

import pytest

from nexrl.json_logging import JsonFormatter, configure_logging, last_words


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("nexrl_trainer").makeRecord
    return made("nexrl_trainer.loop", logging.INFO, __file__, 1, message, ("4",), None, extra=extra)


@pytest.mark.guide("P3")
def test_a_line_says_when_where_and_what_with_all_that_was_given() -> None:
    line = json.loads(JsonFormatter("sums", "trainer").format(record("step %s", step=4, loss=0.5)))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "experiment": "sums",
        "instance": "trainer",
        "logger": "nexrl_trainer.loop",
        "message": "step 4",
        "step": 4,
        "loss": 0.5,
    }


def test_an_exception_is_one_line_with_its_traceback() -> None:
    failed = record("step %s")
    try:
        raise ValueError("loss is NaN")
    except ValueError:
        failed.exc_info = sys.exc_info()
    text = JsonFormatter("sums", "trainer").format(failed)
    assert "\n" not in text
    assert json.loads(text)["traceback"].endswith("ValueError: loss is NaN")


@pytest.mark.guide("P3")
def test_the_root_logger_writes_it_from_the_given_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("sums", "rollout-0", "WARNING")
        logging.getLogger("any").info("not shown")
        logging.getLogger("any").warning("shown")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["instance"], json.loads(line)["message"]) == ("rollout-0", "shown")


def line(level: str, message: str, **fields: str) -> str:
    return json.dumps({"time": "now", "level": level, "message": message, **fields})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("CRITICAL", "x: 1 problem\n  a"), "trainer: x: 1 problem", "  a"], "trainer: x: 1 problem\n  a"),
        ([line("ERROR", "no such model"), line("INFO", "closed")], "no such model"),
        ([line("CRITICAL", "crashed", traceback="Traceback:\n  at 1\nKeyError: 'x'")], "crashed: KeyError: 'x'"),
        ([line("INFO", "loaded"), line("INFO", "step 3")], "step 3"),
        (["Segmentation fault"], "Segmentation fault"),
        ([], ""),
    ],
)
def test_the_last_words_of_a_log_are_plain_text(lines: list[str], words: str) -> None:
    assert last_words(lines) == words
