"""Many experiments, and an operator with nothing to do. CI has EXPERIMENTS=100, `make many` 500; -s shows the times."""

import asyncio
import math
import os
import re
import sys
import time
from collections import Counter
from uuid import uuid4

import pytest
from prometheus_client import REGISTRY, Histogram

from nexrl.k8s.api import EXPERIMENT, Api
from nexrl_operator.credentials import SECRETS_SECONDS
from nexrl_operator.reconciler import RECONCILED
from nexrl_operator.server import Operator
from tests.support.kubelet import Services, experiment_object, operator_settings
from tests.support.patience import BASE_SECONDS, Patience

NUMBER = int(os.environ.get("EXPERIMENTS", "20"))
IDLE_SECONDS = 15.0
BOUNDS = [bound for bound in Histogram.DEFAULT_BUCKETS if bound < float("inf")]
REQUESTS = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(max(600, 20 * NUMBER))


async def test_many_experiments_reconcile_and_then_nothing_is_asked(api: Api, redis_url: str) -> None:
    namespace = f"many-{uuid4().hex[:8]}"
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    failed, succeeded = _reconciled("error") + _reconciled("conflict"), _reconciled("success")
    settings = operator_settings(namespace=namespace, release_namespace=namespace, redis_url=redis_url)
    operator = Operator(api, settings, Services().connect)
    running = asyncio.create_task(operator.run())
    began = time.monotonic()
    for number in range(NUMBER):
        await api.apply(experiment_object(f"experiment-{number}", namespace), manager="test")

    async def all_have_a_status() -> bool:
        if _reconciled("success") - succeeded < NUMBER or not await _is_quiet(operator):
            return False
        items = (await api.list(EXPERIMENT, namespace))["items"]
        return len([item for item in items if "status" in item]) == NUMBER

    await Patience(BASE_SECONDS + 2 * NUMBER).eventually(all_have_a_status)
    assert _reconciled("error") + _reconciled("conflict") == failed
    seconds = time.monotonic() - began
    sys.stdout.write(f"\n{NUMBER} experiments in {seconds:.0f} s; 99 % of reconciles took at most {_p99_bound()} s\n")

    before = await _requests(api)
    await asyncio.sleep(IDLE_SECONDS)
    asked = await _requests(api) - before
    assert not running.done()
    # Leases say that it is alive. It looks for the two Secrets of each experiment once in SECRETS_SECONDS.
    assert set(asked) <= {"leases", "secrets"}, asked
    assert asked["secrets"] <= 2 * NUMBER * math.ceil(IDLE_SECONDS / SECRETS_SECONDS), asked
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _is_quiet(operator: Operator) -> bool:
    before = _reconciled("success")
    await asyncio.sleep(2.0)
    return operator.queue.depth == 0 and _reconciled("success") == before


def _reconciled(result: str) -> float:
    # Not from REGISTRY: it would collect all metrics of all experiments, many times in a second.
    [metric] = RECONCILED.collect()
    return sum(
        each.value for each in metric.samples if each.name == metric.name + "_total" and each.labels["result"] == result
    )


def _p99_bound() -> float:
    """Seconds; as near as the histogram's buckets allow."""
    name = "nexrl_operator_reconcile_duration_seconds"
    everything = REGISTRY.get_sample_value(f"{name}_count") or 0.0
    counts = {bound: REGISTRY.get_sample_value(f"{name}_bucket", {"le": str(bound)}) for bound in BOUNDS}
    return next((bound for bound, count in counts.items() if (count or 0.0) >= 0.99 * everything), float("inf"))


async def _requests(api: Api) -> Counter[str]:
    """What the API server was asked so far, by resource, without watches and what this function does."""
    text = b"".join([line async for line in api.text("/metrics", {})]).decode()
    found: Counter[str] = Counter()
    for match in REQUESTS.finditer(text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
        is_own = (labels["verb"], labels["resource"], labels["scope"]) == _OWN
        if labels["verb"] != "WATCH" and labels["resource"] in _WATCHED and not is_own:
            found[labels["resource"]] += int(float(match["count"]))
    return found


_WATCHED = {"configmaps", "deployments", "events", "experiments", "jobs", "leases", "networkpolicies"} | {
    *("persistentvolumeclaims", "poddisruptionbudgets", "pods", "secrets", "services", "statefulsets"),
}
_OWN = "LIST", "services", "cluster"
"""The API server asks this itself, every three minutes; the operator lists the services of one namespace."""
