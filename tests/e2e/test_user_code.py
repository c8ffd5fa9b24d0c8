"""Runs whose loss, advantage, processor or rollout worker is the user's: modules beside the experiment file."""

import shlex
from pathlib import Path

import pytest

from tests.support.runs import batches_of, metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS = 6
SHORT = (f"trainer.steps={STEPS}", "trajectoryPool.batchSize=32", "rollout.workers=64", "validation=null")

ALGORITHM = """
import numpy as np
import torch
from nexrl.algorithm import Batch, LossInputs, LossOutputs, PreparedBatch, Processor


def loss(inputs: LossInputs, *, clip: float) -> LossOutputs:
    ratio_T = (inputs.logprobs_T - inputs.rollout_logprobs_T).clamp(-20, 20).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip) * inputs.advantages_T
    unclipped_T = ratio_T * inputs.advantages_T
    weights_T = inputs.weights_T * inputs.columns["weight"]
    return LossOutputs(-(weights_T * torch.minimum(unclipped_T, clipped_T)).sum(), clipped_T < unclipped_T)


def advantage(rewards_B, groups_B):
    return (rewards_B - rewards_B.mean()).astype(np.float32)


class Mine(Processor):
    def fit(self, batch: Batch) -> PreparedBatch:
        advantages_B = self.context.advantage(batch.rewards_B, batch.groups_B)
        plain = [
            trajectory.sequence(float(advantage))
            for sample, advantage in zip(batch.samples, advantages_B, strict=True)
            for trajectory in sample.trajectories
        ]
        policy = self.context.policy_logprobs(plain)
        reference = self.context.reference_logprobs(plain)
        sequences = [
            trajectory.sequence(float(advantage), {"weight": 1.0})
            for sample, advantage in zip(batch.samples, advantages_B, strict=True)
            for trajectory in sample.trajectories
        ]
        drift = max(float(abs(p - r).max()) for p, r in zip(policy, reference, strict=True))
        return PreparedBatch(sequences, {"mine/drift": drift})


def broken(inputs: LossInputs) -> LossOutputs:
    raise ValueError("no such column")


def not_a_loss(inputs: LossInputs) -> float:
    return 1.0
"""

WORKER = """
from nexrl.rollout_worker import RolloutWorker, WorkerContext, scored, with_columns
from nexrl.transcript import Transcript


class Mine(RolloutWorker):
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def rollout(self, lease):
        task = self.context.task(lease)
        prompt_ids = self.context.text.encode_prompt(task["prompt"])
        completions = await self.context.generate(lease, prompt_ids)
        texts = self.context.text.decode([completion.token_ids for completion in completions])
        results = []
        for sample, completion, text in zip(lease.samples, completions, texts, strict=True):
            transcript = Transcript(prompt_ids)
            transcript.add_completion(completion)
            reward = sum(map(str.__eq__, text, task["answer"])) / 3
            trajectory = transcript.trajectory(reward, metadata=self.context.metadata(task), response=text)
            with_columns(trajectory, {"weight": 1.0})
            results.append(scored(sample, [trajectory], completion.finish_reason))
        return results
"""


@pytest.mark.guide("R4")
async def test_a_run_trains_with_loss_advantage_and_processor_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ALGORITHM)
    algorithm = ("algorithm.loss=mine:loss", "algorithm.lossConfig={clip: 0.2}", "algorithm.advantage=mine:advantage")
    async with running(tmp_path, *SHORT, *algorithm, "algorithm.processor=mine:Mine") as run:
        await run.ends()
    steps = [line for line in metrics_of(run.folder) if "mine/drift" in line]
    assert len(steps) == STEPS
    assert steps[0]["mine/drift"] == 0 < steps[-1]["mine/drift"], "in mode sync each batch sees the newest weights"


@pytest.mark.guide("R3")
@pytest.mark.soak
async def test_a_run_takes_its_samples_from_a_worker_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ALGORITHM)
    (tmp_path / "my_worker.py").write_text(WORKER)
    worker = ("rollout.type=worker", "rollout.worker=my_worker:Mine", "rollout.reward=null")
    loss = ("algorithm.loss=mine:loss", "algorithm.lossConfig={clip: 0.2}")
    async with running(tmp_path, *SHORT, *worker, *loss) as run:
        await run.ends()
    assert len([line for line in metrics_of(run.folder) if "reward_mean" in line]) == STEPS
    samples = [sample for batch in batches_of(run.folder) for group in batch.groups for sample in group.samples]
    assert {name for sample in samples for name in sample.trajectories[0].columns} == {"weight"}


@pytest.mark.soak  # the run ends as in the next test; the message: tests/unit/nexrl_trainer/test_user_loss.py
async def test_a_loss_that_returns_no_loss_ends_the_run_and_is_named_in_its_status(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ALGORITHM)
    async with running(tmp_path, *SHORT, "algorithm.loss=mine:not_a_loss") as run:
        await run.ends(10)
    output = (tmp_path / "output").read_text()
    assert "algorithm.loss mine:not_a_loss: returned float; a nexrl.algorithm.LossOutputs is needed" in output


@pytest.mark.soak
async def test_a_run_whose_loss_raises_ends_with_what_failed_and_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ALGORITHM)
    overrides = (*SHORT, "algorithm.loss=mine:broken", "failurePolicy.maxRestarts=0")
    async with running(tmp_path, *overrides) as run:
        await run.ends(10)
    output = (tmp_path / "output").read_text()
    assert '"level"' not in output, "no line of a log"
    _, _, ending = output.partition("\nerror: ")
    limit = "it was restarted 0 times without a new checkpoint, the limit of failurePolicy.maxRestarts"
    *lines, to_do = ending.splitlines()
    line_number = 1 + (tmp_path / "mine.py").read_text().splitlines().index('    raise ValueError("no such column")')
    assert lines == [
        "trainer ended with exit code 10: trainer: algorithm.loss mine:broken: "
        f"ValueError ({tmp_path / 'mine.py'}:{line_number}): no such column; {limit}",
        f"The logs are in {run.folder / 'logs'}",
    ]
    _, _, to_resume = to_do.partition("Correct the cause, then resume from step 0 with: nexrl run ")
    *given, last, _, root = shlex.split(to_resume)
    assert (given, root) == ([str(tmp_path / "copy-digits.yaml"), *overrides], str(tmp_path))
    policy_gradient = "-(inputs.weights_T * inputs.advantages_T * inputs.logprobs_T).sum()"
    correct = f"return LossOutputs({policy_gradient}, inputs.logprobs_T.isnan())"
    (tmp_path / "mine.py").write_text(ALGORITHM.replace('raise ValueError("no such column")', correct))
    async with running(tmp_path, *overrides, last) as run:
        await run.ends()
    assert len([line for line in metrics_of(run.folder) if "reward_mean" in line]) == STEPS


async def test_a_run_whose_data_raises_in_the_data_reader_ends_at_once_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\n\n"
        "def tasks(split):\n"
        "    if 'NEXRL_INSTANCE' in os.environ:  # not while `nexrl run` checks the file\n"
        "        raise ValueError('the file is gone')\n"
        "    return [{'prompt': '1', 'answer': '1'}] * 8\n"
    )
    async with running(tmp_path, *SHORT, "data.factory=mine:tasks") as run:
        await run.ends(10)
    output = (tmp_path / "output").read_text()
    assert "data-reader ended with exit code 2" in output
    assert "spec.data.factory: mine:tasks('train') raised ValueError: the file is gone" in output
