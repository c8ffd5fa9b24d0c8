"""Runs an operator in the test's process, and waits for states of its experiments."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nexrl.k8s.api import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EXPERIMENT,
    JOB,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    Api,
)
from nexrl_controller.controller import Controller
from nexrl_controller.events import VersionCommitted
from nexrl_operator.api_objects import owner_uid
from nexrl_operator.server import Operator
from tests.support.kubelet import Services, operator_settings
from tests.support.patience import eventually

Object = dict[str, Any]


@asynccontextmanager
async def operating(api: Api, namespace: str, services: Services, **settings: Any) -> AsyncIterator[Operator]:
    """Run an operator for this namespace until the block ends."""
    known = operator_settings(namespace=namespace, release_namespace=namespace, **settings)
    operator = Operator(api, known, services.connect)
    running = asyncio.create_task(operator.run())
    try:
        yield operator
    finally:
        running.cancel()
        for result in await asyncio.gather(running, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


async def condition(api: Api, namespace: str, name: str, kind: str) -> Object:
    """Return the condition of type `kind` in the status of an experiment; empty if there is none."""
    found = await api.get(EXPERIMENT, namespace, name)
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


async def phase(api: Api, namespace: str, name: str) -> str:
    """Return the phase of an experiment; "" if it has none yet."""
    found = await api.get(EXPERIMENT, namespace, name)
    return str((found or {}).get("status", {}).get("phase", ""))


async def until_phase(api: Api, namespace: str, name: str, wanted: str) -> None:
    """Wait until an experiment is in this phase."""

    async def is_there() -> bool:
        return await phase(api, namespace, name) == wanted

    await eventually(is_there)


async def run(api: Api, document: Object, controller: Controller) -> None:
    """Apply an experiment, and wait until it trains. Tells the controller, in place of weight sync, of version 0."""
    await api.apply(document, manager="test")
    name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
    await until_phase(api, namespace, name, "Starting")
    await controller.apply(VersionCommitted(0))
    await until_phase(api, namespace, name, "Running")


async def until_condition(api: Api, namespace: str, name: str, kind: str, status: str) -> None:
    """Wait until a condition of an experiment has this status; "": until there is no such condition."""

    async def holds() -> bool:
        return bool((await condition(api, namespace, name, kind)).get("status", "") == status)

    await eventually(holds)


async def until_gone(api: Api, namespace: str) -> None:
    """Wait until the namespace has no pods."""

    async def is_gone() -> bool:
        return not (await api.list(POD, namespace))["items"]

    await eventually(is_gone)


async def collect_garbage(api: Api, namespace: str, owner: str) -> None:
    """Delete the objects of a deleted owner, as a cluster does; a bare API server has no garbage collector."""
    for kind in (CONFIG_MAP, SECRET, CLAIM, SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET, DEPLOYMENT, STATEFUL_SET, JOB):
        for item in (await api.list(kind, namespace))["items"]:
            if owner_uid(item) == owner:
                await api.merge(kind, namespace, item["metadata"]["name"], {"metadata": {"finalizers": None}})
                await api.delete(kind, namespace, item["metadata"]["name"])
