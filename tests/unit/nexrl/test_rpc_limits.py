"""The size limits of requests name methods that exist, and leave room for what those carry."""

import importlib
import pkgutil
from collections.abc import Mapping

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default

from nexrl import client, v1
from nexrl.rpc.limits import LARGER_BYTES, MAX_PIECE_BYTES, message_limit_bytes, request_limit_bytes


def methods(service: str = "") -> Mapping[str, MethodDescriptor]:
    """Return the methods of a service, or those with a larger limit, by path."""
    for module in pkgutil.iter_modules(v1.__path__):
        importlib.import_module(f"nexrl.v1.{module.name}")
    services = [f"nexrl.v1.{service}"] if service else {path.split("/")[1] for path in LARGER_BYTES}
    found = [method for name in services for method in Default().FindServiceByName(name).methods]
    return {f"/{method.containing_service.full_name}/{method.name}": method for method in found}


def test_each_larger_limit_is_that_of_a_method() -> None:
    assert LARGER_BYTES.keys() <= methods().keys()


def test_each_request_fits_a_message_that_its_server_reads_or_may_come_in_pieces() -> None:
    for path, method in methods().items():
        is_unary = not method.client_streaming and not method.server_streaming
        assert request_limit_bytes(path) <= MAX_PIECE_BYTES or is_unary
    for path in (*methods("ControllerService"), *methods("ActivityService")):
        assert request_limit_bytes(path) <= message_limit_bytes("controller") == 2**20
    assert message_limit_bytes("trainer") == MAX_PIECE_BYTES


def test_a_put_has_room_for_what_the_client_sends_at_once() -> None:
    assert request_limit_bytes("/nexrl.v1.TrajectoryPoolService/PutSamples") > 2 * client.MAX_PUT_BYTES
    assert request_limit_bytes("/nexrl.v1.ControllerService/StopExperiment") == 2**20
