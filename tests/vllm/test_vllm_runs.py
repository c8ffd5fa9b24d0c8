"""`nexrl run` with vLLM: it learns, replicas come and go, and no wrong token is trained after any kill."""

import asyncio
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nexrl.checkpoint_files import tensor_files
from nexrl.local.launcher import INTERRUPTED_EXIT
from nexrl.models import iter_weights
from nexrl.rpc.client import connect, watch
from nexrl.spec import load_resolved
from nexrl.v1 import weight_sync_service_pb2 as pb
from nexrl.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from nexrl_trainer.checkpoint import read_metadata
from tests.support.chaos import Killer, schedule
from tests.support.patience import LIMIT_SECONDS, for_minutes
from tests.support.runs import Run, batches_of, metrics_of, nexrl, running
from tests.support.vllm import Reference, Versions, replica_process

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

KILLS, SEED = int(os.environ.get("KILLS", "30")), int(os.environ.get("SEED", "0"))
EXPERIMENT = Path(__file__).with_name("copy-digits.yaml")
JUDGED_OF_A_BATCH = 8
ENDLESS = "trainer.steps=100000"
"""More steps than a run makes that the test interrupts."""
STEPS = 100
REWARD = 0.3
"""The mean reward of the last ten of these steps. The first steps have 0.07."""


@pytest.mark.guide("L9", "L17", "Q32")
@pytest.mark.timeout(1800)
async def test_no_wrong_token_is_trained_while_a_replica_of_vllm_comes_and_goes(tmp_path: Path) -> None:
    async with running(tmp_path, ENDLESS, file=EXPERIMENT) as run:
        await run.until_step(3)
        weight_sync = json.loads((run.folder / "endpoints.json").read_text())["weight_sync"]
        experiment = load_resolved(run.folder / "experiment.yaml")
        with replica_process(experiment, tmp_path / "more", "inference-1", weight_sync):
            run.hold()  # until vLLM is up; it joins while the run trains
            log = tmp_path / "more" / "inference-1.log"
            await for_minutes.eventually(lambda: "listening" in log.read_text())
            run.release()
            await until_ready(weight_sync, 2)
            step = await run.until_step(0)
            await run.until_step(step + 5)
        await until_ready(weight_sync, 1)
        await run.until_step(await run.until_step(0) + 3)
        run.launcher.send_signal(signal.SIGINT)
        await run.ends(INTERRUPTED_EXIT)
    require_nothing_lost(tmp_path)
    await require_whole(run)


@pytest.mark.timeout(1800)
@pytest.mark.soak
async def test_it_learns_with_vllm(tmp_path: Path) -> None:
    async with running(tmp_path, f"trainer.steps={STEPS}", file=EXPERIMENT) as run:
        await run.ends()
    rewards = [line["reward_mean"] for line in metrics_of(run.folder)]
    assert len(rewards) == STEPS
    assert sum(rewards[-10:]) / 10 >= REWARD
    require_nothing_lost(tmp_path)
    await require_whole(run)


@pytest.mark.guide("L9", "S3")
@pytest.mark.timeout(900 + 120 * KILLS)
@pytest.mark.soak
async def test_whatever_is_killed_at_random_instants_no_wrong_token_is_served(tmp_path: Path) -> None:
    # It trains until all are back, with a sync at every step, so that many kills fall into one. A process that does not
    # come back fails the test.
    names = (*("trainer", "trainer-rank-1", "weight-sync") * 2, "inference-0", "inference-1")
    replicas = ("inference.replicas=2", "trainer.processesPerReplica=2")
    overrides = (ENDLESS, *replicas, "rollout.reward=copy_digits:slow_reward")
    async with running(tmp_path, *overrides, file=EXPERIMENT) as run:
        await run.until_step(1)
        strikes = [replace(strike, gap_seconds=3 * strike.gap_seconds) for strike in schedule(SEED, KILLS, names)]
        await Killer(run).kill_all(strikes)
        await run.until_step(await run.until_step(0) + 3)
        run.launcher.send_signal(signal.SIGINT)
        await run.ends(INTERRUPTED_EXIT)
    await require_whole(run)


def require_nothing_lost(root: Path) -> None:
    """Raise if a run without a kill has dropped samples for an error. One that is held may count as stalled."""
    drops = re.findall(r"dropped ([^;\n]*)", (root / "output").read_text())
    assert not re.findall("error|lost|timeout|incomplete", " ".join(drops))


async def require_whole(run: Run) -> None:
    """Raise unless each step was made once, the ledger balances, and each token is one of the version that it names."""
    steps = {line["step"] for line in metrics_of(run.folder)}
    assert steps == {*range(1, len(steps) + 1)}
    audit = await asyncio.to_thread(nexrl, run.root, "audit", str(run.folder))
    assert audit.returncode == 0, audit.stdout
    judge(run)


def judge(run: Run) -> None:
    """Each token of some samples of every batch has the log-probability of the version that it is said to be of."""
    model = load_resolved(run.folder / "experiment.yaml").spec.model
    reference, versions, judged = Reference(model), weights_of_run(run), 0
    for batch in batches_of(run.folder):
        samples = [sample for group in batch.groups for sample in group.samples]
        for sample in samples[:: len(samples) // JUDGED_OF_A_BATCH]:
            (trajectory,) = sample.trajectories
            begin = trajectory.spans[0].start
            assert list(trajectory.loss_mask) == [index >= begin for index in range(len(trajectory.token_ids))]
            of_token = [span.policy_version for span in trajectory.spans for _ in range(span.start, span.end)]
            prompt, tokens = trajectory.token_ids[:begin], trajectory.token_ids[begin:]
            reference.require_equal(versions, prompt, tokens, trajectory.logprobs[begin:], of_token)
            judged += 1
    assert judged >= JUDGED_OF_A_BATCH * len(batches_of(run.folder)) > 0


def weights_of_run(run: Run) -> Versions:
    """The weights of every policy version, from its checkpoint."""
    model = load_resolved(run.folder / "experiment.yaml").spec.model
    versions: Versions = {0: dict(iter_weights(Reference(model).model))}
    for folder in (run.folder / "checkpoints").glob("global_step_*"):
        if folder.name.rpartition("_")[2].isdecimal():
            files = tensor_files(folder, "model")  # one for each rank of the trainer
            versions[read_metadata(folder).step] = {name: t for file in files for name, t in load_file(file).items()}
    return versions


async def until_ready(weight_sync: str, replicas: int) -> None:
    """Wait until so many replicas are there, all of them ready."""
    async with connect(weight_sync) as channel, asyncio.timeout(LIMIT_SECONDS):
        request = pb.WatchReplicasRequest(model_tag="default")
        async for view in watch(WeightSyncServiceStub(channel).WatchReplicas, request):
            if [replica.ready for replica in view.replicas] == [True] * replicas:
                return
