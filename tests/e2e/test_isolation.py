"""Hostile code of a user in each process that runs such code, next to a Redis that experiments share."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from nexrl.components import BY_NAME, Wiring
from nexrl.local.child import Child
from nexrl.local.components import LOOPBACK, free_ports, service_command
from nexrl.redis_users import put_user
from nexrl.spec import Experiment, dump_resolved, with_folder
from nexrl.store import connect_redis, key_prefix
from tests.support.foreign_commands import OTHERS_KEY, REFUSED
from tests.support.ledger_run import PASSWORD, program
from tests.support.patience import LIMIT_SECONDS, for_minutes
from tests.support.redis_servers import Server, folder, running
from tests.support.services import small_experiment

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

OWN_PASSWORD = "of-own"
OWN_KEY = key_prefix("own", "default") + "meta"
HOSTILE = """
import json
import os
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from nexrl.rollout_worker import RolloutWorker


def environments():
    found = {}
    for process in Path("/proc").iterdir():
        try:
            content = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        known = dict(line.partition("=")[::2] for line in content.split("\\0"))
        if known.get("NEXRL_RUN_DIR") == os.environ["NEXRL_RUN_DIR"]:
            found[known["NEXRL_INSTANCE"]] = known
    return found


def accepted(user, password, commands):
    found = []
    for command in commands:
        socket, once = os.environ["HOSTILE_SOCKET"], Retry(NoBackoff(), 0)
        with redis.Redis(unix_socket_path=socket, username=user, password=password, retry=once) as server:
            try:
                server.execute_command(*command.split())
                found.append(command)
            except redis.RedisError:
                pass
    return found


def probe():
    while "trajectory-pool" not in (seen := environments()):  # the test kills a process that waits in vain
        time.sleep(0.1)
    passwords = {"", *(known.get("NEXRL_REDIS_PASSWORD", "") for known in seen.values())}
    users = [(user, password) for user in ("default", "own", "other") for password in sorted(passwords)]
    commands = json.loads(os.environ["HOSTILE_COMMANDS"])
    report = {
        "told": sorted(name for name, value in os.environ.items() if name.startswith("NEXRL_REDIS") and value),
        "of_others": sorted({found for user in users for found in accepted(*user, commands)}),
        "own": [user for user, password in users if accepted(user, password, [os.environ["HOSTILE_OWN"]])],
    }
    path = Path(os.environ["NEXRL_RUN_DIR"]) / (os.environ["NEXRL_INSTANCE"] + ".json")
    path.with_suffix(".new").write_text(json.dumps(report))
    path.with_suffix(".new").rename(path)


probe()


def tasks(split):
    return [{"prompt": "1", "answer": "1"}] * 8


def reward(task, text, is_finished):
    return {"exact": 1.0}


class Worker(RolloutWorker):
    def __init__(self, context):
        pass

    async def rollout(self, lease):
        return []
"""
ROLLOUTS: dict[str, dict[str, Any]] = {
    "rollout-0": {"reward": "hostile:reward", "maxNewTokens": 8},
    "rollout-1": {"type": "worker", "worker": "hostile:Worker", "maxNewTokens": 8},
}


async def test_a_hostile_factory_reward_and_worker_read_and_write_nothing_of_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    with folder() as redis_folder, running(server := Server(program("redis-6.2"), redis_folder)):
        server.ask("ACL", "SETUSER", "default", "resetpass", f">{PASSWORD}")
        monkeypatch.setenv("NEXRL_REDIS_PASSWORD", PASSWORD)
        async with aclosing(await connect_redis(f"unix://default@{server.socket}")) as administrator:
            await put_user(administrator, "own", OWN_PASSWORD)
            await put_user(administrator, "other", "of-other")
            await administrator.hset(OTHERS_KEY, "granted", "8")
            monkeypatch.setenv("NEXRL_REDIS_PASSWORD", OWN_PASSWORD)
            monkeypatch.setenv("HOSTILE_SOCKET", str(server.socket))
            monkeypatch.setenv("HOSTILE_COMMANDS", json.dumps(REFUSED))
            monkeypatch.setenv("HOSTILE_OWN", f"HGETALL {OWN_KEY}")
            async with all_running(processes(tmp_path, f"unix://own@{server.socket}")) as children:
                told = await reports(tmp_path, ["data-reader", *ROLLOUTS])
                credentials = {child.name for child in children if has_credentials(child)}
            assert await administrator.hgetall(OTHERS_KEY) == {b"granted": b"8"}
    assert credentials == {name for name, component in BY_NAME.items() if component.uses_redis}
    # On one machine a process can read the environment of others of its user (SECURITY.md): it reaches its own ledger.
    assert list(told.values()) == [{"told": [], "of_others": [], "own": ["own"]}] * len(told)


@asynccontextmanager
async def all_running(children: list[Child]) -> AsyncIterator[list[Child]]:
    tasks = [asyncio.create_task(child.run()) for child in children]
    try:
        yield children
    finally:
        await asyncio.gather(*(child.stop(LIMIT_SECONDS) for child in children))
        await asyncio.gather(*tasks)


def processes(path: Path, redis_url: str) -> list[Child]:
    """Return a process of each component without a model, and a second rollout."""
    addresses = [f"{LOOPBACK}:{port}" for port in free_ports(4)]
    controller, reader, pool, weight_sync = addresses
    listens = {"controller": controller, "data-reader": reader, "trajectory-pool": pool, "weight-sync": weight_sync}
    found = []
    for instance in ("controller", "data-reader", "trajectory-pool", "weight-sync", *ROLLOUTS):
        role = instance.removesuffix("-0").removesuffix("-1")
        experiment = hostile_experiment(path, ROLLOUTS.get(instance, ROLLOUTS["rollout-0"]))
        file = path / f"{instance}.yaml"
        file.write_text(dump_resolved(experiment))
        wiring = Wiring(file, path, controller, reader, pool, weight_sync, redis_url=redis_url, redis_is_managed=True)
        variables = {"NEXRL_LISTEN": listens.get(role, f"{LOOPBACK}:0")}
        found.append(Child(service_command(role, instance, experiment, wiring, variables), path))
    return found


def hostile_experiment(path: Path, rollout: dict[str, Any]) -> Experiment:
    data = {"type": "python", "factory": "hostile:tasks"}
    return with_folder(small_experiment("own", data=data, rollout=rollout), path)


async def reports(path: Path, names: list[str]) -> dict[str, Any]:
    async def are_there() -> bool:
        return all((path / f"{name}.json").exists() for name in names)

    await for_minutes.eventually(are_there)
    return {name: json.loads((path / f"{name}.json").read_text()) for name in names}


def has_credentials(child: Child) -> bool:
    assert child.pid is not None, child.last_words()
    known = psutil.Process(child.pid).environ()
    return bool(known.get("NEXRL_REDIS_URL") or known.get("NEXRL_REDIS_PASSWORD"))
