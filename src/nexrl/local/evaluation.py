"""`nexrl eval`: measures a model on the validation tasks of an experiment.

It is a run of zero steps. The trainer publishes its initial weights as a policy version. The launcher, and not the
controller, has that version validated, because the round must not be ended: its samples would be deleted.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console
from rich.table import Table

from nexrl.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NexrlError,
    NotFoundError,
    TrainingFailedError,
)
from nexrl.local.launcher import INTERRUPTED_EXIT, RunOptions, claimed_folder, copy_to_storage, launch
from nexrl.local.run_folder import RunFolder
from nexrl.local.scores import Score, ScoredSample, score_statistics
from nexrl.local.trajectories import Sample, Samples
from nexrl.local.view import RunView
from nexrl.rpc.client import call, is_passing, new_request_id, watch
from nexrl.run_layout import CHECKPOINT_MARKER, ENDPOINTS_FILE, EVAL_FILE
from nexrl.spec import Experiment, load_experiment
from nexrl.spec.document import read_document
from nexrl.v1 import controller_service_pb2 as controller_pb
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1 import validator_service_pb2 as validator_pb
from nexrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from nexrl.v1.trajectory_pb2 import PURPOSE_VALIDATION
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceStub

if TYPE_CHECKING:
    from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceAsyncStub
    from nexrl.v1.validator_service_pb2_grpc import ValidatorServiceAsyncStub

CALL_SECONDS = 30.0
WAIT_SECONDS = 1.0
"""Time between two looks at the progress."""
LINES = 10
"""Lines of progress where there is no terminal."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Which weights to measure, those of the experiment by default, and where the results go."""

    checkpoint: Path | None = None
    hf: Path | None = None
    out: Path | None = None
    """A new folder; None: runs/NAME-eval."""

    def __post_init__(self) -> None:
        if self.checkpoint and self.hf:
            raise InvalidArgumentError(f"checkpoint: {self.checkpoint} and hf: {self.hf}; give one of them")
        if self.checkpoint and not (self.checkpoint / CHECKPOINT_MARKER).is_file():
            raise InvalidArgumentError(
                f"checkpoint: {self.checkpoint} is no complete checkpoint: it has no {CHECKPOINT_MARKER}; give a "
                "folder global_step_N, or a Hugging Face folder with --hf"
            )
        if self.hf and not (self.hf / "config.json").is_file():
            raise InvalidArgumentError(f"hf: {self.hf} is no Hugging Face model: it has no config.json")
        if self.out and self.out.exists():
            raise AlreadyExistsError(f"out: {self.out} exists; choose another folder")

    @property
    def root(self) -> Path:
        """The folder in which the folder of the results is made."""
        return self.out.absolute().parent if self.out else RunOptions.root

    def overrides(self, name: str) -> list[str]:
        """Return what the evaluation changes in an experiment of this name."""
        weights = f"resume={{mode: from_path, path: {_quoted(self.checkpoint)}}}" if self.checkpoint else ""
        model = [f"model.path={_quoted(self.hf)}", "model.scratch=null", "model.seed=0"] if self.hf else []
        return [
            f"metadata.name={json.dumps(self.out.absolute().name if self.out else f'{name}-eval')}",
            "trainer.steps=0",
            "checkpoint.path=null",  # checkpoints of the training run are not those of the evaluation
            weights or "resume={mode: disable}",
            *model,
        ]


def evaluate(path: Path, overrides: Sequence[str], options: EvaluationOptions) -> int:
    """Measure a model on the validation tasks of the experiment at `path`, and print the table; returns the exit code.

    Raises SpecError and other NexrlErrors if it cannot start, TrainingFailedError if a component fails or no sample is
    scored, DeadlineExceededError if it does not end within `validation.timeoutSeconds`.
    """
    experiment = evaluation_of(path, overrides, options)
    return asyncio.run(_evaluate(experiment, RunOptions(options.root)))


def evaluation_of(path: Path, overrides: Sequence[str], options: EvaluationOptions) -> Experiment:
    """Return the experiment at `path` as one that only serves the weights to be measured. Raises SpecError."""
    metadata = read_document(path, overrides).get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    experiment = load_experiment(path, [*overrides, *options.overrides(name)])
    validation, monitor = experiment.spec.validation, experiment.spec.monitor
    if validation is None:
        raise InvalidArgumentError(f"{path}: spec.validation: missing; its `data` are the tasks to measure on")
    # The launcher measures, so the controller must not, and it sees no step during the time that this takes.
    stall_seconds = monitor.health.stall_deadline_seconds + validation.timeout_seconds
    health = monitor.health.model_copy(update={"stall_deadline_seconds": stall_seconds})
    changed = {
        "validation": validation.model_copy(update={"before_training": False, "every_steps": 0}),
        "monitor": monitor.model_copy(update={"health": health}),
    }
    return experiment.model_copy(update={"spec": experiment.spec.model_copy(update=changed)})


async def _evaluate(experiment: Experiment, options: RunOptions) -> int:
    async with claimed_folder(experiment, options) as folder:
        measured = Measurement(experiment, folder.path)
        began = time.monotonic()
        try:
            _, ended = await launch(folder, experiment, options.port, measured.run)
        finally:
            (folder.path / ENDPOINTS_FILE).unlink(missing_ok=True)
        if ended is not None:
            raise TrainingFailedError(f"{ended.message}\nThe logs are in {folder.logs}")
        if measured.samples is None:
            sys.stdout.write("stopped before the end: there are no results\n")
            return INTERRUPTED_EXIT
        write_results(folder, experiment, measured, time.monotonic() - began)
        await copy_to_storage(folder, experiment)
    return 0


class Measurement:
    """One validation round of the version that the trainer publishes."""

    def __init__(self, experiment: Experiment, run: Path) -> None:
        assert experiment.spec.validation is not None, "evaluation_of has checked it"
        self._spec = experiment.spec
        self._run = run
        self._samples_per_task = experiment.spec.validation.samples_per_task
        self._timeout_seconds = experiment.spec.validation.timeout_seconds
        self._printed = -1
        self.policy_version = -1
        """The version, which is the number of steps in a checkpoint; -1 before it is served."""
        self.tasks = 0
        self.samples: Sequence[Sample] | None = None
        """The scored samples; None before the round has ended."""
        self.failures: Mapping[str, int] = {}
        """Failed samples by reason. The ledger of a validation only counts them."""

    async def run(self, controller: grpc.aio.Channel, pool: grpc.aio.Channel, view: RunView) -> None:
        """Wait until the version is served, measure it, and read the samples. Raises DeadlineExceededError."""
        async for message in watch(
            ControllerServiceStub(controller).WatchExperiment, controller_pb.WatchExperimentRequest()
        ):
            self.policy_version = message.experiment.progress.policy_version
            if self.policy_version >= 0:
                break
        pools: TrajectoryPoolServiceAsyncStub = TrajectoryPoolServiceStub(pool)
        await self._measure(ValidatorServiceStub(pool), pools, view)
        view.say("reading the samples")
        self.failures = (await self._state(pools)).dropped
        samples = Samples(self._run, self._spec, pools)
        found = [await samples.complete(record) async for record in samples.records()]
        self.samples = [sample for sample in found if sample.trajectories]

    async def _measure(
        self, validator: "ValidatorServiceAsyncStub", pools: "TrajectoryPoolServiceAsyncStub", view: RunView
    ) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        wait = validator_pb.WaitValidationRequest(
            model_tag=self._spec.model.tag, policy_version=self.policy_version, wait_seconds=WAIT_SECONDS
        )
        total, progress = 0, ""
        while time.monotonic() < deadline:
            try:
                total = total or await self._start(validator)
                if (await call(validator.WaitValidation, wait, timeout_seconds=CALL_SECONDS)).complete:
                    return
                progress = await self._progress(pools, total, view)
            except NotFoundError:
                total = 0  # Redis has lost its last writes, among them this round
            except NexrlError as error:
                if not is_passing(error):
                    raise
        raise DeadlineExceededError(
            f"the evaluation did not end within {self._timeout_seconds:g} s ({progress or 'no sample has ended'}); "
            "raise validation.timeoutSeconds"
        )

    async def _start(self, validator: "ValidatorServiceAsyncStub") -> int:
        request = validator_pb.StartValidationRequest(
            request_id=new_request_id(), model_tag=self._spec.model.tag, policy_version=self.policy_version
        )
        total = (await call(validator.StartValidation, request, timeout_seconds=CALL_SECONDS)).samples
        self.tasks = total // self._samples_per_task
        return total

    async def _progress(self, pools: "TrajectoryPoolServiceAsyncStub", total: int, view: RunView) -> str:
        state = await self._state(pools)
        ended = state.granted - state.open - state.leased
        told = f"{ended} of {total} samples, {sum(state.dropped.values())} failed"
        if view.is_live or ended * LINES // total != self._printed:
            self._printed = ended * LINES // total
            view.say(f"evaluating policy version {self.policy_version}: {told}")
        return told

    async def _state(self, pools: "TrajectoryPoolServiceAsyncStub") -> pool_pb.PoolState:
        request = pool_pb.GetTrajectoryPoolStateRequest(model_tag=self._spec.model.tag, purpose=PURPOSE_VALIDATION)
        return (await call(pools.GetTrajectoryPoolState, request, timeout_seconds=CALL_SECONDS)).pools[0]


def write_results(folder: RunFolder, experiment: Experiment, measured: Measurement, seconds: float) -> None:
    """Write eval.json and print the table. Raises TrainingFailedError if no sample was scored."""
    scored = [_scored(sample) for sample in measured.samples or ()]
    failed = dict(measured.failures)
    validation, model, resume = experiment.spec.validation, experiment.spec.model, experiment.spec.resume
    assert validation is not None, "evaluation_of has checked it"
    scores = score_statistics(scored, validation.samples_per_task)
    results = {
        "name": experiment.metadata.name,
        "model": model.path or "scratch",
        "checkpoint": getattr(resume, "path", None),
        "policy_version": measured.policy_version,
        "temperature": validation.temperature,
        "samples_per_task": validation.samples_per_task,
        "tasks": measured.tasks,
        "samples": len(scored),
        "failed_samples": sum(failed.values()),
        "failures": failed,
        "seconds": round(seconds, 2),
        "scores": {name: asdict(score) for name, score in scores.items()},
    }
    folder.write_json(EVAL_FILE, results)
    if not scored:
        raise TrainingFailedError(f"no sample was scored: {_told(failed)}\nThe logs are in {folder.logs}")
    console = Console(markup=False, emoji=False)
    console.print(_table(experiment.metadata.name, scores, len(scored)))
    if failed:
        console.print(f"failed samples: {_told(failed)}", highlight=False, soft_wrap=True)
    console.print(f"results, samples and logs: {folder.path}", highlight=False, soft_wrap=True)


def _scored(sample: Sample) -> ScoredSample:
    """Return the reward and its components. The last trajectory has them, as in a validation of a training run."""
    trajectory = sample.trajectories[-1]
    scores = {**trajectory.reward_components, "reward": trajectory.reward}
    return ScoredSample(sample.record.sample_id.partition(".")[0], scores)


def _told(failed: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in failed.items())
    return f"{counts}; the log of rollout-0 has the errors"


def _table(name: str, scores: Mapping[str, Score], samples: int) -> Table:
    table = Table(title=f"{name}: {samples} samples")
    ks = sorted({k for score in scores.values() for k in score.pass_at_k})
    for column in ("", "mean", "standard error", *(f"pass@{k}" for k in ks)):
        table.add_column(column)
    for title, score in scores.items():
        values = [score.mean, score.standard_error, *map(score.pass_at_k.get, ks)]
        table.add_row(title, *("-" if value is None else f"{value:.3f}" for value in values))
    return table


def _quoted(path: Path | None) -> str:
    """Return an absolute path as a text of YAML."""
    return json.dumps(str(path.absolute())) if path else "null"
