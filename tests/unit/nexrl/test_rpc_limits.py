"""The size limits of requests name methods that exist, and leave room for what those carry."""

import importlib
import pkgutil

from google.protobuf.descriptor_pool import Default

from nexrl import client, v1
from nexrl.rpc.limits import LARGER_BYTES, request_limit_bytes


def test_each_larger_limit_is_that_of_a_method() -> None:
    for module in pkgutil.iter_modules(v1.__path__):
        importlib.import_module(f"nexrl.v1.{module.name}")
    for method in LARGER_BYTES:
        service, name = method.lstrip("/").split("/")
        assert name in Default().FindServiceByName(service).methods_by_name


def test_a_put_has_room_for_what_the_client_sends_at_once() -> None:
    assert request_limit_bytes("/nexrl.v1.TrajectoryPoolService/PutSamples") > 2 * client.MAX_PUT_BYTES
    assert request_limit_bytes("/nexrl.v1.ControllerService/StopExperiment") == 2**20
