"""rollout.type external on a cluster: an agent in a pod of its own, with TLS, a token and NetworkPolicies."""

from pathlib import Path
from typing import Any

from nexrl.spec import yaml_core
from tests.support.cluster import WAIT, Namespace, Object, eventually
from tests.support.experiments import applied, assert_balanced
from tests.support.python_pods import python_pod

EXAMPLE = Path(__file__).parents[2] / "examples/agent-elsewhere/experiment.yaml"
NAME, RELEASE = "elsewhere", "nexrl"
STEPS = 6
AGENT = """
import asyncio, os, ssl, sys
import aiohttp
from nexrl.agent_sessions import open_agent_sessions

trusted, name = ssl.create_default_context(cafile=os.environ["NEXRL_TLS_CA"]), os.environ["NEXRL_TLS_NAME"]

async def episodes(sessions, http):
    while True:
        async with sessions.session() as session:
            body = {"messages": [{"role": "user", "content": session.task["prompt"]}]}
            url = f"{session.base_url}/chat/completions"
            async with http.post(url, json=body, ssl=trusted, server_hostname=name) as response:
                assert response.status == 200, await response.text()
                text = (await response.json())["choices"][0]["message"]["content"]
            session.score(sum(a == b for a, b in zip(text, session.task["answer"])) / 9)

async def main():
    async with open_agent_sessions(sys.argv[1]) as sessions, aiohttp.ClientSession() as http:
        await asyncio.gather(*(episodes(sessions, http) for _ in range(16)))

asyncio.run(main())
"""


def experiment() -> Object:
    item: Object = yaml_core.load(EXAMPLE.read_text())
    item["metadata"]["name"] = NAME
    item["spec"]["trainer"]["steps"] = STEPS
    item["spec"]["trajectoryPool"]["batchSize"] = 32
    return item


def agent(namespace: Namespace, name: str, labels: dict[str, str], audience: str) -> Object:
    """Return the pod of an agent whose token is for `audience`."""
    pod = python_pod(namespace, RELEASE, name, labels, "-c", AGENT, f"{NAME}-rollout.{namespace.name}.svc:50052")
    container: dict[str, Any] = pod["spec"]["containers"][0]
    container["env"] = [
        {"name": "NEXRL_TLS_NAME", "value": name_in_certificates(namespace)},
        {"name": "NEXRL_TLS_CA", "value": "/etc/nexrl/ca/ca.crt"},
        {"name": "NEXRL_TOKEN_FILE", "value": "/var/run/secrets/nexrl/token"},
    ]
    container["volumeMounts"] = [
        {"name": "ca", "mountPath": "/etc/nexrl/ca", "readOnly": True},
        {"name": "token", "mountPath": "/var/run/secrets/nexrl", "readOnly": True},
    ]
    token = {"serviceAccountToken": {"path": "token", "audience": audience, "expirationSeconds": 3600}}
    pod["spec"]["volumes"] = [
        {"name": "ca", "secret": {"secretName": f"{NAME}-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"name": "token", "projected": {"sources": [token]}},
    ]
    return pod


def name_in_certificates(namespace: Namespace) -> str:
    return f"{NAME}.{namespace.name}.experiment.nexrl.dev"


def test_an_agent_in_another_pod_is_trained_and_one_with_a_foreign_token_or_without_the_label_is_kept_out(
    namespace: Namespace,
) -> None:
    ours, labels = name_in_certificates(namespace), {"nexrl.dev/agents-of": NAME}
    foreign = ours.replace(NAME, "another")
    with applied(namespace, experiment()) as running:
        eventually(lambda: running.ready("rollout"), "the gateway is ready")
        for name, has_label, audience in (
            ("foreign-agent", True, foreign),
            ("unlabelled-agent", False, ours),
            ("agent", True, ours),
        ):
            namespace.apply(agent(namespace, name, labels if has_label else {}, audience))
        assert_balanced(running.until("Complete"))
        refused = (("foreign-agent", "PermissionDenied"), ("unlabelled-agent", "Unavailable"))
        eventually(lambda: all(why in namespace.kubectl("logs", name) for name, why in refused), "both say why")
        namespace.kubectl("delete", "pods", "agent", "foreign-agent", "unlabelled-agent", WAIT)
