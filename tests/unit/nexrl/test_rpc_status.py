"""Typed errors and google.rpc.Status: nothing is lost between server and client."""

import base64
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    TrainingFailedError,
    UnauthenticatedError,
    UnavailableError,
    Violation,
)
from nexrl.rpc.client import is_passing
from nexrl.rpc.status import ERROR_DOMAIN, error_from_call, http_status, status_from_error

CLASSES: list[type[NexrlError]] = [
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    NexrlError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
]
texts = st.text(max_size=40)
violations = st.lists(st.builds(Violation, texts, texts), max_size=4)
seconds = st.none() | st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000)


def over_the_wire(error: NexrlError) -> NexrlError:
    status = rpc_status.to_status(status_from_error(error))
    metadata = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    return error_from_call(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details))


@given(kind=st.sampled_from(CLASSES), message=texts.filter(bool), wrong=violations, retry_after=seconds)
def test_an_error_is_the_same_on_the_other_side(
    kind: type[NexrlError], message: str, wrong: list[Violation], retry_after: float | None
) -> None:
    arrived = over_the_wire(kind(message, violations=wrong, retry_after_seconds=retry_after))
    assert type(arrived) is kind
    assert (arrived.message, arrived.violations) == (message, tuple(wrong))
    assert arrived.retry_after_seconds == retry_after


def test_an_error_with_much_to_say_fits_into_the_metadata_that_grpc_allows() -> None:
    wrong = [Violation(f"results[{i}].trajectories[0].columns[advantages]", "ä" * 2000) for i in range(500)]
    error = InvalidArgumentError("ä" * 20_000, violations=wrong)
    status = rpc_status.to_status(status_from_error(error))
    encoded = len(quote(status.details)) + sum(
        len(base64.b64encode(value if isinstance(value, bytes) else value.encode()))
        for _, value in status.trailing_metadata or ()
    )
    assert encoded < 8000
    arrived = over_the_wire(error)
    assert arrived.message.startswith("ää")
    assert arrived.violations[0].field == wrong[0].field


def test_a_code_that_grpc_has_put_in_the_place_of_the_servers_is_told() -> None:
    status = rpc_status.to_status(status_from_error(InvalidArgumentError("wrong")))
    metadata = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    replaced = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata, "too large")
    assert isinstance(error_from_call(replaced), ResourceExhaustedError)


def test_the_status_names_the_class_for_clients_in_other_languages() -> None:
    status, reason = status_from_error(LeaseLostError("late")), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(reason)
    assert (reason.reason, reason.domain) == ("LeaseLostError", ERROR_DOMAIN)


@pytest.mark.parametrize("kind", CLASSES)
def test_only_what_may_be_gone_next_time_is_tried_again(kind: type[NexrlError]) -> None:
    assert is_passing(kind("x")) == (kind in (UnavailableError, DeadlineExceededError))


@pytest.mark.parametrize("kind", [*CLASSES, UnauthenticatedError, PermissionDeniedError, TrainingFailedError])
def test_every_typed_error_has_an_http_status(kind: type[NexrlError]) -> None:
    assert 400 <= http_status(kind("x")) < 600
