"""The rollout process: builds the worker that the experiment names, and keeps it busy."""

from nexrl.client import RolloutClient
from nexrl.environment import load_environment
from nexrl.policy import Policy
from nexrl.rewards import load_reward
from nexrl.rollout_worker import RolloutWorker, WorkerContext, load_worker
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec.experiment import Experiment
from nexrl.spec.rollout import AgentRollout, DemonstrationRollout, ExternalRollout, ScoredRollout, WorkerRollout
from nexrl.text import TextCodec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1.gateway_service_pb2_grpc import add_GatewayServiceServicer_to_server
from nexrl_rollout.agent import AgentWorker
from nexrl_rollout.demonstrations import DemonstrationWorker
from nexrl_rollout.external import ExternalWorker
from nexrl_rollout.gateway import Gateway
from nexrl_rollout.mock import MockWorker
from nexrl_rollout.service import GatewayServicer
from nexrl_rollout.single_turn import SingleTurnWorker
from nexrl_rollout.user_threads import ThreadLimits, UserThreads
from nexrl_rollout.worker import RolloutLimits, RolloutLoop

LOOPBACK = "127.0.0.1"
"""Where the gateway listens if its agents run in this process."""


def main() -> None:
    """`nexrl serve rollout`."""
    run_service("rollout", start)


async def start(process: ServiceProcess) -> None:
    """Build everything and start to lease."""
    experiment, settings = process.experiment, process.settings
    model_tag = experiment.spec.model.tag
    policy = Policy(
        process.connect(settings.weight_sync),
        model_tag=model_tag,
        max_retries=experiment.spec.inference.max_retries,
        activity=process.activity,
    )
    process.on_close(policy.close)
    client = RolloutClient(
        process.connect(settings.trajectory_pool), policy, model_tag=model_tag, worker_id=settings.instance
    )
    worker = await _build_worker(process, policy)
    process.spawn(policy.follow_replicas())
    process.spawn(RolloutLoop(client, worker, rollout_limits(experiment), process.activity).run())
    await process.set_ready()


def rollout_limits(experiment: Experiment) -> RolloutLimits:
    """The bounds of the loop, from the experiment."""
    rollout = experiment.spec.rollout
    return RolloutLimits(
        max_in_flight=rollout.workers,
        group_size=experiment.spec.trajectory_pool.group_size,
        lease_seconds=rollout.lease_seconds,
        timeout_seconds=rollout.timeout_seconds,
    )


async def _build_worker(process: ServiceProcess, policy: Policy) -> RolloutWorker:
    experiment, rollout = process.experiment, process.experiment.spec.rollout
    codec = TextCodec(build_tokenizer(experiment.spec.model), chat=rollout.chat, system_prompt=rollout.system_prompt)
    match rollout:
        case DemonstrationRollout():
            reward = load_reward(rollout.reward, experiment.folder)
            return DemonstrationWorker(policy, codec, reward, _user_threads(process), experiment)
        case ScoredRollout():
            reward = load_reward(rollout.reward, experiment.folder)
            return SingleTurnWorker(policy, codec, reward, _user_threads(process), experiment)
        case AgentRollout():
            environment = load_environment(rollout.environment, experiment.folder)
            gateway = await _open_gateway(process, policy, codec)
            agent = AgentWorker(gateway, environment, _user_threads(process), experiment)
            process.on_close(agent.close)
            return agent
        case ExternalRollout():
            return await _serve_sessions(process, policy, codec)
        case WorkerRollout():
            return load_worker(rollout.worker, experiment.folder, WorkerContext(policy, codec, experiment))
        case _:
            return MockWorker(policy, codec, experiment)


def _user_threads(process: ServiceProcess) -> UserThreads:
    rollout = process.experiment.spec.rollout
    threads = UserThreads(ThreadLimits(rollout.workers, max_blocked_seconds=rollout.timeout_seconds), process.activity)
    process.spawn(threads.watch())
    return threads


async def _serve_sessions(process: ServiceProcess, policy: Policy, codec: TextCodec) -> ExternalWorker:
    gateway = _gateway(process, policy, codec)
    worker = ExternalWorker(gateway, process.experiment, process.activity)
    servicer = GatewayServicer(worker)
    process.add(add_GatewayServiceServicer_to_server, servicer, "nexrl.v1.GatewayService")
    sessions = servicer.application()
    settings = process.settings
    await gateway.listen(
        settings.host,
        settings.http_port,
        advertised=settings.advertised,
        tls=process.secure_http(sessions),  # other requests name a session, which is a secret
        sessions=sessions,
    )
    process.on_close(gateway.close)
    return worker


async def _open_gateway(process: ServiceProcess, policy: Policy, codec: TextCodec) -> Gateway:
    gateway = _gateway(process, policy, codec)
    await gateway.listen(LOOPBACK, process.settings.http_port)
    process.on_close(gateway.close)
    return gateway


def _gateway(process: ServiceProcess, policy: Policy, codec: TextCodec) -> Gateway:
    spec = process.experiment.spec
    return Gateway(
        policy,
        codec,
        model=spec.model.tag,
        max_context_tokens=spec.inference.max_tokens_per_row,
        timeout_seconds=spec.rollout.timeout_seconds,
    )
