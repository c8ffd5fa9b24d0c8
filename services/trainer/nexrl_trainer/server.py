"""Starts the trainer: the algorithm processor and the train worker, in one process."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from nexrl.activity import ActivityTracker
from nexrl.client import BatchClient, TrainBatchClient
from nexrl.errors import InvalidArgumentError
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.run_layout import TRAJECTORIES_FOLDER, checkpoints_path
from nexrl.spec import Experiment, ExperimentSpec
from nexrl.spec.trainer import ResumeFromPath
from nexrl.tokenizers import build_tokenizer
from nexrl.train_batch import TrainBatch
from nexrl.v1 import trainer_replica_service_pb2 as replica_pb
from nexrl.v1.activity_service_pb2 import SEVERITY_WARNING
from nexrl.v1.trainer_replica_service_pb2_grpc import (
    TrainerReplicaServiceStub,
    add_TrainerReplicaServiceServicer_to_server,
)
from nexrl.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.gpu import gpu_for_transfer
from nexrl.weights.published import PublishedVersions
from nexrl.weights.publisher import WeightPublisher
from nexrl.weights.transport import Sender, listening_store
from nexrl_trainer.build import (
    build_learner,
    device_of,
    learner_warnings,
    prepare_torch,
    reference_logprobs,
    teacher_logprobs,
)
from nexrl_trainer.gang import Gang, wait_for_gang_end
from nexrl_trainer.hosted_ranks import HostedRanks
from nexrl_trainer.leader import Leader
from nexrl_trainer.loop import TrainWorker
from nexrl_trainer.memory_check import memory_warning
from nexrl_trainer.other_replica import OtherReplica
from nexrl_trainer.processor import AlgorithmProcessor, Forward, build_processor
from nexrl_trainer.rank_processes import start_ranks
from nexrl_trainer.ranks import LOOPBACK
from nexrl_trainer.service import ReplicaServicer, TrainerServicer
from nexrl_trainer.starting_point import Checkpoints
from nexrl_trainer.step import Learner
from nexrl_trainer.uploads import STOP_SECONDS, Uploads


def main() -> None:
    """Entry point of `nexrl serve trainer`."""
    run_service("trainer", start)


async def start(process: ServiceProcess) -> None:
    """Build the model, connect it to the other services, and start training in the background."""
    spec = process.experiment.spec
    if process.settings.replica > 0:
        await _follow(process)
        return
    prepare_torch(spec)
    warning = await asyncio.to_thread(memory_warning, spec, device_of(spec))
    learner = await (_lead(process) if spec.trainer.ranks > 1 else _learn(process))
    teacher = await asyncio.to_thread(teacher_logprobs, spec)
    pool = process.connect(process.settings.trajectory_pool)
    publisher = WeightPublisher(
        WeightSyncServiceStub(process.connect(process.settings.weight_sync)),
        Sender(process.settings.advertised, gpu_for_transfer(spec.weight_sync.transport, learner.model.device)),
        model_tag=spec.model.tag,
        bucket_bytes=spec.weight_sync.bucket_bytes,
        timeout_seconds=spec.weight_sync.timeout_seconds,
        published=PublishedVersions.of(process.experiment),
    )
    process.on_close(publisher.close)
    checkpoints = run_checkpoints(process.settings.run_dir, spec)
    uploads = Uploads.of(process.experiment, process.settings, checkpoints.folder, process.activity)
    checkpoints = replace(checkpoints, uploads=uploads)
    train_batches = TrainBatchClient(pool, model_tag=spec.model.tag)
    worker = TrainWorker(spec, learner, checkpoints, train_batches, publisher, process.activity)
    process.add(add_TrainerServiceServicer_to_server, TrainerServicer(worker), "nexrl.v1.TrainerService")
    process.on_stop(worker.stop)
    if uploads is not None:
        process.on_stop(partial(uploads.finish, STOP_SECONDS, STOP_SECONDS))
        process.spawn(_upload(worker, uploads))
    process.spawn(publisher.keep_replicas_current())
    process.spawn(worker.run())
    if spec.algorithm.processor != "external":
        batches = BatchClient(pool, model_tag=spec.model.tag, worker_id=process.settings.instance)
        process.spawn(_process_batches(worker, _algorithm_processor(process, worker, batches, teacher)))
    process.spawn(report_warnings(process.activity, [*learner_warnings(learner), *filter(None, [warning])]))
    await process.set_ready()


async def _follow(process: ServiceProcess) -> None:
    """Serve replica 0 of the trainer, which starts and ends the ranks of this replica."""
    hosted = HostedRanks(process)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, hosted.request_stop)
    process.add(add_TrainerReplicaServiceServicer_to_server, ReplicaServicer(hosted), "nexrl.v1.TrainerReplicaService")
    process.spawn(hosted.run())
    await process.set_ready()


async def _learn(process: ServiceProcess) -> Learner:
    return await asyncio.to_thread(build_learner, process.experiment.spec, process.experiment.folder)


async def _lead(process: ServiceProcess) -> Learner:
    """Start the other ranks, and build the learner of rank 0."""
    gang = await start_gang(process)
    process.on_close(gang.end)
    process.spawn(gang.watch())
    return await asyncio.to_thread(_join_and_build, gang, process.experiment)


async def start_gang(process: ServiceProcess) -> Gang:
    """Start the other ranks of this replica, and have the other replicas start theirs."""
    trainer, settings = process.experiment.spec.trainer, process.settings
    host = LOOPBACK if trainer.replicas == 1 else settings.advertised
    store = listening_store(host)
    rendezvous = f"{host}:{store.port}"
    others = _start_others(process, rendezvous)
    own = await start_ranks(range(1, trainer.processes_per_replica), trainer.ranks, settings.instance, rendezvous)
    return Gang(store, host, trainer.ranks, [*own, *others])


def _start_others(process: ServiceProcess, rendezvous: str) -> list[OtherReplica]:
    trainer, addresses = process.experiment.spec.trainer, process.settings.other_replicas
    if len(addresses) != trainer.replicas - 1:
        raise InvalidArgumentError(
            f"settings: NEXRL_TRAINER_REPLICAS: {len(addresses)} addresses, and trainer.replicas is {trainer.replicas}"
            "; set it to the addresses of all replicas but replica 0, separated by commas"
        )
    request = replica_pb.RunRanksRequest(
        trainer_id=uuid4().hex,
        replicas=trainer.replicas,
        processes_per_replica=trainer.processes_per_replica,
        rendezvous=rendezvous,
    )
    others = []
    for request.replica, address in enumerate(addresses, 1):
        own = replica_pb.RunRanksRequest.FromString(request.SerializeToString())
        stub = TrainerReplicaServiceStub(process.connect(address))
        others.append(OtherReplica.started(stub, own, process.stopping.set))
    return others


def _join_and_build(gang: Gang, experiment: Experiment) -> Learner:
    with wait_for_gang_end():
        ranks = gang.join(device_of(experiment.spec))
        return build_learner(experiment.spec, experiment.folder, ranks, Leader)


async def report_warnings(activity: ActivityTracker, warnings: Sequence[str]) -> None:
    """Report to the controller, which shows it to the user, what the checks at the start have found."""
    for warning in warnings:
        await activity.report(warning, work_context="start", severity=SEVERITY_WARNING)


async def _process_batches(worker: TrainWorker, processor: AlgorithmProcessor) -> None:
    # The ledger would count a batch leased before it knows this trainer as the previous trainer's, and requeue it.
    await worker.has_begun.wait()
    await processor.run()


async def _upload(worker: TrainWorker, uploads: Uploads) -> None:
    await worker.has_begun.wait()  # until then it waits for the storage itself
    await uploads.run()


def _algorithm_processor(
    process: ServiceProcess, worker: TrainWorker, client: BatchClient, teacher: Forward | None
) -> AlgorithmProcessor:
    """Build the processor that the experiment names, for this process."""
    experiment, loop = process.experiment, asyncio.get_running_loop()

    def policy(batch: TrainBatch) -> NDArray[np.float32]:
        """Called in the thread of `fit`; the learner has a thread of its own."""
        return asyncio.run_coroutine_threadsafe(worker.forward(batch), loop).result()

    def base(batch: TrainBatch) -> NDArray[np.float32]:
        return asyncio.run_coroutine_threadsafe(worker.forward_reference(batch), loop).result()

    shares_prompts = worker.learner.forward_pass.shares_prompts
    of_model = reference_logprobs(experiment.spec, shares_prompts=shares_prompts)
    reference = base if worker.learner.adapter else of_model
    processor = build_processor(experiment.spec.algorithm, experiment.folder, policy, reference, teacher)
    trajectories = process.settings.run_dir / TRAJECTORIES_FOLDER
    trajectories.mkdir(exist_ok=True)
    return AlgorithmProcessor(processor, client, process.activity, trajectories, reference)


def run_checkpoints(run_dir: Path, spec: ExperimentSpec) -> Checkpoints:
    """Return where this run reads and writes checkpoints. Creates the folder if it does not exist."""
    folder = checkpoints_path(run_dir, spec.checkpoint.path)
    folder.mkdir(parents=True, exist_ok=True)
    given = spec.resume.path if isinstance(spec.resume, ResumeFromPath) else None
    return Checkpoints(folder, Path(given) if given else None, build_tokenizer(spec.model))
