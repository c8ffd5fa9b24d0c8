"""`nexrl traj replay`: generates a sample again and shows the differences from the recorded one.

If several policy versions generated a completion, each version generates its own part again.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from nexrl.components import Wiring
from nexrl.errors import CheckFailedError, FailedPreconditionError, NotFoundError
from nexrl.local.components import LOOPBACK, free_ports, service_command
from nexrl.local.run_folder import checkpoints_of, endpoint, experiment_of, is_running
from nexrl.local.temporary import serving
from nexrl.local.trajectories import columns, draw_text, samples_of, token_decoder
from nexrl.rpc.client import call, connect, new_request_id, watch
from nexrl.run_layout import EXPERIMENT_FILE
from nexrl.spec.trainer import ResumeFromPath
from nexrl.v1.inference_service_pb2 import GeneratedCompletion, GenerateRequest
from nexrl.v1.inference_service_pb2_grpc import InferenceServiceStub
from nexrl.v1.policy_pb2 import Replica
from nexrl.v1.trajectory_pb2 import CompletionSpan, Trajectory
from nexrl.v1.weight_sync_service_pb2 import WatchReplicasRequest
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub

if TYPE_CHECKING:
    from nexrl.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

CALL_SECONDS = 120.0
LOOK_SECONDS = 10.0
TOLERANCE = 1e-3
"""Log-probabilities that differ by less are equal, for float32: rounding depends on the rest of the batch."""


@dataclass(frozen=True)
class ReplayOptions:
    """Which engine to use, and which differences count as equal."""

    engine: str | None = None
    """host:port of an engine to use, whatever version it serves."""
    version: int | None = None
    """The policy version to use, instead of the recorded ones."""
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Part:
    """Tokens [start, end) of a trajectory that one policy version generated for one completion."""

    trajectory: Trajectory
    completion: CompletionSpan
    start: int
    end: int
    policy_version: int

    @property
    def token_ids(self) -> Sequence[int]:
        """The recorded tokens."""
        return self.trajectory.token_ids[self.start : self.end]

    @property
    def logprobs(self) -> Sequence[float]:
        """The recorded log-probabilities."""
        return self.trajectory.logprobs[self.start : self.end]

    def request(self) -> GenerateRequest:
        """Return the request that generates this part again."""
        draw, drawn = self.completion.draw, self.start - self.completion.start
        # The last part must end by itself, as the completion did. An earlier part ends where the next version began.
        is_last = self.end == self.completion.end
        return GenerateRequest(
            request_id=new_request_id(),
            prompt_token_ids=self.trajectory.token_ids[: self.start],
            n=1,
            max_new_tokens=draw.max_new_tokens - drawn if is_last else self.end - self.start,
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k,
            stop_token_ids=draw.stop_token_ids,
            stop=draw.stop,
            seeds=[draw.seed],
            drawn_tokens=drawn,
        )


@dataclass(frozen=True)
class Drawn:
    """What an engine generated now, and the name of that engine."""

    completion: GeneratedCompletion
    where: str


@dataclass(frozen=True)
class Difference:
    """Index of the first token that differs, and the largest difference of log-probabilities before it."""

    first_token: int | None
    logprob: float

    def is_within(self, tolerance: float) -> bool:
        """Return whether the tokens are equal, and the log-probabilities up to `tolerance`."""
        return self.first_token is None and self.logprob <= tolerance


async def replay(run: Path, sample_id: str, options: ReplayOptions) -> None:
    """Generate a sample again and print the differences.

    Raises CheckFailedError if there are any, NotFoundError if no engine can serve the policy version, and
    FailedPreconditionError if there is no record of how the sample was drawn.
    """
    async with samples_of(run) as samples:
        trajectories = (await samples.get(sample_id)).trajectories
    if not trajectories:
        raise FailedPreconditionError(f"{sample_id}: it has no trajectories; see `nexrl traj get`")
    parts = [part for trajectory in trajectories for part in parts_of(trajectory)]
    if not parts:
        raise FailedPreconditionError(
            f"{sample_id}: there is no record of how it was drawn. Demonstrations are not drawn; other workers must "
            "set Trajectory.completions with the draw that the engine returns, as nexrl.transcript.Transcript does"
        )
    decode = token_decoder(run)
    different = 0
    async with Engines(run, options) as engines:
        for part in parts:
            now = await engines.generate(part)
            difference = compare(part, now.completion)
            different += not difference.is_within(options.tolerance)
            for line in describe(part, now, difference, options.tolerance, decode):
                sys.stdout.write(line + "\n")
    for line in _not_recorded(trajectories):
        sys.stdout.write(line + "\n")
    if different:
        raise CheckFailedError(f"{sample_id}: {different} of {len(parts)} parts differ from what was recorded")


def parts_of(trajectory: Trajectory) -> Iterator[Part]:
    """Yield the parts that can be generated again, in order. Raises FailedPreconditionError for an invalid record."""
    for completion in trajectory.completions:
        if not completion.draw.HasField("seed"):
            continue
        if not (
            0 < completion.start < completion.end <= len(trajectory.token_ids)
            and completion.end - completion.start <= completion.draw.max_new_tokens
        ):
            raise FailedPreconditionError(
                f"completion at tokens {completion.start} to {completion.end - 1}, {draw_text(completion)}: "
                f"does not fit a trajectory of {len(trajectory.token_ids)} tokens"
            )
        for span in trajectory.spans:
            start, end = max(span.start, completion.start), min(span.end, completion.end)
            if start < end:
                yield Part(trajectory, completion, start, end, span.policy_version)


def compare(part: Part, now: GeneratedCompletion) -> Difference:
    """Compare token by token up to the first difference. Later tokens were generated from another context."""
    same = 0
    for recorded, drawn in zip(part.token_ids, now.token_ids, strict=False):
        if recorded != drawn:
            break
        same += 1
    pairs = zip(part.logprobs[:same], now.logprobs[:same], strict=True)
    is_whole = same == len(part.token_ids) == len(now.token_ids)
    return Difference(None if is_whole else same, max((abs(a - b) for a, b in pairs), default=0.0))


class Engines:
    """The engines to choose from: a given one, the replicas of a running run, and one for each checkpoint.

    An engine for a checkpoint is started when it is needed and stopped at the end of the block.
    """

    def __init__(self, run: Path, options: ReplayOptions) -> None:
        self._run = run
        self._options = options
        self._stack = AsyncExitStack()
        self._logs = Path(self._stack.enter_context(TemporaryDirectory(prefix="nexrl-")))
        self._started: dict[int, InferenceServiceAsyncStub] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def generate(self, part: Part) -> Drawn:
        """Generate `part` again. Raises NotFoundError if no engine has its policy version."""
        if self._options.engine is not None:
            return await self._ask_at(self._options.engine, part)
        version = part.policy_version if self._options.version is None else self._options.version
        for replica in await _replicas(self._run):
            if replica.policy_version == version:
                now = await self._ask_at(replica.address, part)
                if set(now.completion.policy_versions) == {version}:
                    return now
                break  # the replicas have switched to a newer version meanwhile
        return await _ask(await self._engine_of(version), "an engine started for it", part)

    async def _ask_at(self, address: str, part: Part) -> Drawn:
        async with connect(address) as channel:
            return await _ask(InferenceServiceStub(channel), address, part)

    async def _engine_of(self, version: int) -> "InferenceServiceAsyncStub":
        if version not in self._started:
            weights = weights_at_hand(self._run)
            if version not in weights:
                at_hand = ", ".join(map(str, sorted(weights)))
                raise NotFoundError(
                    f"no replica serves policy version {version}, and no checkpoint has it; available: {at_hand}. "
                    "Select one of these with --version to compare the policies"
                )
            self._started[version] = InferenceServiceStub(await self._start(weights[version]))
        return self._started[version]

    async def _start(self, weights: str) -> grpc.aio.Channel:
        address = f"{LOOPBACK}:{free_ports(1)[0]}"
        wiring = Wiring(self._run / EXPERIMENT_FILE, self._run)
        variables = {"NEXRL_LISTEN": address, "NEXRL_WEIGHTS": weights}
        name = f"engine-{len(self._started)}"
        command = service_command("inference", name, experiment_of(self._run), wiring, variables)
        return await self._stack.enter_async_context(serving(command, self._logs, address))


def weights_at_hand(run: Path) -> Mapping[int, str]:
    """Return the value of NEXRL_WEIGHTS for each policy version that an engine can be started with."""
    experiment = experiment_of(run)
    checkpoints = {step: str(path) for step, path in checkpoints_of(run, experiment).items()}
    # With resume.path, training began with a checkpoint of another run, and version 0 does not exist.
    return checkpoints if isinstance(experiment.spec.resume, ResumeFromPath) else {0: "initial", **checkpoints}


def describe(
    part: Part, now: Drawn, difference: Difference, tolerance: float, decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """Yield lines that describe the part. `decode` returns the text of tokens."""
    drawn = now.completion
    versions = sorted(set(drawn.policy_versions))
    yield f"tokens    {part.start} to {part.end - 1}, of policy version {part.policy_version}"
    yield f"drawn     {draw_text(part.completion)}"
    yield f"asked     {now.where}, policy version {', '.join(map(str, versions))}"
    yield f"recorded  {decode(part.token_ids)!r}"
    yield f"now       {decode(drawn.token_ids)!r}"
    if versions != [part.policy_version]:
        yield "another policy version: differences are those of the policies"
    measured = f"largest difference of a log-probability {difference.logprob:.2g} (tolerance {tolerance:g})"
    if difference.first_token is None:
        verdict = "equal" if difference.is_within(tolerance) else "the same tokens"
        yield f"{verdict}; {measured}"
    else:
        yield f"different from token {part.start + difference.first_token} on; before it, {measured}"
    if not difference.is_within(tolerance):
        yield from _differing_tokens(part, drawn, tolerance, decode)


def _differing_tokens(
    part: Part, now: GeneratedCompletion, tolerance: float, decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    rows: list[Sequence[object]] = [("position", "recorded", "text", "logprob", "now", "text", "logprob")]
    nothing = ("-", "-", "-")
    recorded = zip(part.token_ids, part.logprobs, strict=True)
    drawn = zip(now.token_ids, now.logprobs, strict=True)
    for position, (old, new) in enumerate(zip_longest(recorded, drawn), start=part.start):
        if old is None or new is None or old[0] != new[0] or abs(old[1] - new[1]) > tolerance:
            cells = [
                nothing if pair is None else (pair[0], repr(decode([pair[0]])), f"{pair[1]:.4f}") for pair in (old, new)
            ]
            rows.append((position, *cells[0], *cells[1]))
    return columns(rows)


def _not_recorded(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    for completion in (c for trajectory in trajectories for c in trajectory.completions):
        if not completion.draw.HasField("seed"):
            yield f"tokens {completion.start} to {completion.end - 1}: {draw_text(completion)}, so not drawn again"


async def _ask(engine: "InferenceServiceAsyncStub", where: str, part: Part) -> Drawn:
    answer = await call(engine.Generate, part.request(), timeout_seconds=CALL_SECONDS)
    return Drawn(answer.completions[0], where)


async def _replicas(run: Path) -> Sequence[Replica]:
    """Return the ready replicas of the run; empty if it is not running."""
    if not is_running(run):
        return ()
    request = WatchReplicasRequest(model_tag=experiment_of(run).spec.model.tag)
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS), connect(endpoint(run, "weight_sync")) as channel:
            async for state in watch(WeightSyncServiceStub(channel).WatchReplicas, request):
                return [replica for replica in state.replicas if replica.ready]
    return ()
