"""Starts the trainer: algorithm processor and train worker in one process."""

import asyncio
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from nexrl.models import build_model
from nexrl.rpc.server import ServiceProcess, run_service
from nexrl.spec import ExperimentSpec
from nexrl.tokenizers import build_tokenizer
from nexrl.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl.weights.published import PublishedVersions
from nexrl.weights.publisher import WeightPublisher
from nexrl.weights.transport import Sender
from nexrl_trainer.loop import Checkpoints, TrainWorker
from nexrl_trainer.processor import AlgorithmProcessor, ReferenceLogprobs
from nexrl_trainer.service import TrainerServicer
from nexrl_trainer.step import Learner, LearnerSettings, MockLearner


def main() -> None:
    """Entry point of `nexrl serve trainer`."""
    run_service("trainer", start)


async def start(process: ServiceProcess) -> None:
    """Build the model, find the newest checkpoint, train."""
    spec = process.experiment.spec
    torch.set_num_threads(spec.trainer.threads)
    torch.manual_seed(spec.trainer.seed)
    transformers_logging.disable_progress_bar()  # no terminal shows it, and its lock would be a process of its own
    learner = await asyncio.to_thread(build_learner, spec)
    pool = process.connect(process.settings.trajectory_pool)
    publisher = WeightPublisher(
        WeightSyncServiceStub(process.connect(process.settings.weight_sync)),
        Sender(process.settings.advertised),
        model_tag=spec.model.tag,
        bucket_bytes=spec.weight_sync.bucket_bytes,
        timeout_seconds=spec.weight_sync.timeout_seconds,
        published=PublishedVersions.of(process.experiment),
    )
    process.on_close(publisher.close)
    checkpoints = run_checkpoints(process.settings.run_dir, spec)
    worker = TrainWorker(spec, learner, checkpoints, pool, publisher, process.activity)
    trajectories = process.settings.run_dir / "trajectories"
    trajectories.mkdir(exist_ok=True)
    processor = AlgorithmProcessor(
        spec.algorithm,
        pool,
        spec.model.tag,
        process.activity,
        trajectories,
        await asyncio.to_thread(reference_logprobs, spec),
    )
    process.add(add_TrainerServiceServicer_to_server, TrainerServicer(worker), "nexrl.v1.TrainerService")
    process.on_stop(worker.stop)
    process.spawn(publisher.keep_replicas_current())
    process.spawn(worker.run())
    process.spawn(_process_batches(worker, processor))
    await process.set_ready()


async def _process_batches(worker: TrainWorker, processor: AlgorithmProcessor) -> None:
    # What is leased before the ledger knows of this trainer would count as its predecessor's, and be taken back.
    await worker.has_begun.wait()
    await processor.run()


def build_learner(spec: ExperimentSpec) -> Learner:
    """The model with its initial weights, and its optimizer."""
    settings = LearnerSettings(
        spec.algorithm, spec.trainer.steps, spec.rollout.temperature, spec.trainer.max_tokens_per_micro_batch
    )
    learner = MockLearner if spec.trainer.backend == "mock" else Learner
    return learner(build_model(spec.model, spec.model.seed), settings)


def reference_logprobs(spec: ExperimentSpec) -> ReferenceLogprobs | None:
    """Log-probabilities under the initial weights, when the loss has a KL term."""
    return build_learner(spec).forward if spec.algorithm.kl_coefficient else None


def run_checkpoints(run_dir: Path, spec: ExperimentSpec) -> Checkpoints:
    """Where this run writes its checkpoints; the folder is made if need be."""
    folder = Path(spec.checkpoint.path) if spec.checkpoint.path else run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    given = spec.resume.path if spec.resume.mode == "from_path" else None
    return Checkpoints(folder, Path(given) if given else None, build_tokenizer(spec.model))
