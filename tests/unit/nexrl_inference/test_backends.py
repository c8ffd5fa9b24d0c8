"""The backends that can be started are those that the experiment file allows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nexrl.errors import FailedPreconditionError
from nexrl.rpc.server import ServiceProcess
from nexrl.spec import ExperimentSpec
from nexrl_inference import server
from nexrl_inference.server import BACKENDS
from tests.support.services import settings, small_experiment


def variants(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The object schemas that `node` allows."""
    if "$ref" in node:
        yield from variants(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    for alternatives in ("anyOf", "oneOf", "allOf"):
        for alternative in node.get(alternatives, ()):
            yield from variants(schema, alternative)
    if "properties" in node:
        yield node


def test_each_backend_of_the_experiment_file_can_be_started_and_no_other() -> None:
    schema = ExperimentSpec.model_json_schema()
    backends = [variant["properties"]["backend"] for variant in variants(schema, schema["properties"]["inference"])]
    allowed = [name for backend in backends for name in backend.get("enum", [backend.get("const")])]
    assert sorted(allowed) == sorted(BACKENDS)


async def test_the_built_in_engine_computes_on_the_device_of_the_experiment_without_attention_by_cudnn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    experiment = small_experiment(inference={"maxTokensPerRow": 32, "device": "cuda"})
    process = ServiceProcess("inference", settings(tmp_path, weight_sync="127.0.0.1:1"), experiment)
    with pytest.raises(FailedPreconditionError, match=r"inference\.device: cuda"):
        await process.run(server.start)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
