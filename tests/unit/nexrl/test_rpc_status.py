"""Typed errors and google.rpc.Status: nothing is lost between server and client."""

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
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from nexrl.rpc.client import is_passing
from nexrl.rpc.status import ERROR_DOMAIN, error_from_call, status_from_error

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


def test_the_status_names_the_class_for_clients_in_other_languages() -> None:
    status, reason = status_from_error(LeaseLostError("late")), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(reason)
    assert (reason.reason, reason.domain) == ("LeaseLostError", ERROR_DOMAIN)


@pytest.mark.parametrize("kind", CLASSES)
def test_only_what_may_be_gone_next_time_is_tried_again(kind: type[NexrlError]) -> None:
    assert is_passing(kind("x")) == (kind in (UnavailableError, DeadlineExceededError))
