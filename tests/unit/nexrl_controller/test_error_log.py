"""Errors are kept within a limit and add up to a health."""

from dataclasses import fields

import pytest

from nexrl_controller.error_log import ErrorLog, ErrorReport, Severity
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def errors(clock: Clock) -> ErrorLog:
    return ErrorLog(clock)


def report(error_id: str = "1", severity: Severity = Severity.ERROR, **more: str) -> ErrorReport:
    return ErrorReport(error_id, "trainer", "train", severity, more.pop("message", "loss is NaN"), **more)  # type: ignore[arg-type]


@pytest.mark.guide("M1", "N1")
def test_the_newest_thousand_errors_are_kept(errors: ErrorLog) -> None:
    for number in range(1500):
        errors.record(report(str(number)))
    kept = errors.newest(5000)
    assert (len(kept), kept[0].error_id, kept[-1].error_id) == (1000, "1499", "500")


@pytest.mark.guide("M11", "N2", "N3")
def test_each_error_has_an_id_and_a_repeated_report_is_kept_once(errors: ErrorLog) -> None:
    assert errors.record(report("a")) == "a"
    assert errors.record(report("a")) == "a"
    assert errors.record(report("b")) == "b"
    assert [kept.error_id for kept in errors.newest(10)] == ["b", "a"]


@pytest.mark.guide("M12", "N4")
@pytest.mark.parametrize(
    ("severities", "status", "counts"),
    [
        ([], "healthy", (0, 0, 0)),
        ([Severity.INFO], "healthy", (1, 0, 0)),
        ([Severity.INFO, Severity.WARNING], "warning", (2, 0, 1)),
        ([Severity.WARNING, Severity.ERROR, Severity.CRITICAL], "error", (3, 2, 1)),
    ],
)
def test_health_follows_from_recent_errors(
    errors: ErrorLog, severities: list[Severity], status: str, counts: tuple[int, int, int]
) -> None:
    for number, severity in enumerate(severities):
        errors.record(report(str(number), severity))
    health = errors.health()
    assert health.status == status
    assert (health.recent_error_count, health.error_level_count, health.warning_level_count) == counts
    assert health.message.startswith(f"{status}: {counts[1]} errors and {counts[2]} warnings")


@pytest.mark.guide("N4")
def test_health_recovers_five_minutes_after_the_last_error(errors: ErrorLog, clock: Clock) -> None:
    errors.record(report())
    clock.advance(299)
    assert errors.health().status == "error"
    clock.advance(1)
    assert errors.health().status == "healthy"
    assert len(errors.newest(10)) == 1


def test_an_error_has_the_nine_fields_of_the_guide() -> None:
    assert {field.name for field in fields(ErrorReport)} == {
        "error_id",
        "unix_seconds",
        "module",
        "work_context",
        "severity",
        "message",
        "details",
        "exception_type",
        "exception_traceback",
    }


def test_long_texts_are_cut_where_they_matter_least(errors: ErrorLog) -> None:
    errors.record(report(message="m" * 100_000, exception_traceback="t" * 100_000 + "ValueError"))
    kept = errors.newest(1)[0]
    assert len(kept.message) == 16_384
    assert len(kept.exception_traceback) == 65_536
    assert kept.exception_traceback.endswith("ValueError")
