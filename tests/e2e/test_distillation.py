"""Runs whose policy learns from a teacher, as their user sees them."""

import shutil
from pathlib import Path
from statistics import fmean

import pytest

from nexrl.models import build_model, save_architecture
from nexrl.spec import load_experiment
from tests.support.runs import Run, metrics_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort-digits" / "distillation.yaml"
TEACHER_STEPS, STUDENT_STEPS = 120, 160
LAST = 10
"""Steps over which a reward is averaged."""


async def test_the_example_of_distillation_runs(tmp_path: Path) -> None:
    """With random weights as the teacher: it teaches nothing, and is asked in each step."""
    shutil.copy(EXAMPLE.parent / "sort_digits.py", tmp_path)
    source = load_experiment(EXAMPLE.with_name("experiment.yaml")).spec.model
    teacher = tmp_path / "teacher"
    save_architecture(source, teacher)
    build_model(source, seed=3).save_pretrained(teacher)
    changes = (
        "trainer.steps=2",
        "trajectoryPool.batchSize=8",
        "rollout.workers=8",
        f"algorithm.teacher.path={teacher}",
    )
    async with running(tmp_path, *changes, file=EXAMPLE) as run:
        await run.ends()
    steps = [line for line in metrics_of(tmp_path / "sort-digits-student") if "teacher_kl" in line]
    assert len(steps) == 2
    assert all(line["teacher_kl"] != 0 for line in steps)


async def test_a_student_without_rewards_reaches_the_reward_of_its_teacher(tmp_path: Path) -> None:
    """The teacher learns from rewards. The student, from other random weights, from the teacher alone."""
    for folder in ("teacher", "student"):
        (tmp_path / folder).mkdir()
    of_teacher = await learned(tmp_path / "teacher", f"trainer.steps={TEACHER_STEPS}")
    weights = of_teacher.folder / "checkpoints" / f"global_step_{TEACHER_STEPS}"
    of_student = await learned(
        tmp_path / "student",
        f"trainer.steps={STUDENT_STEPS}",
        "algorithm.advantage=distillation",
        f"algorithm.teacher.path={weights}",
        "algorithm.entropyCoefficient=0",
        "trajectoryPool.groupSize=1",
        "model.seed=1",
        "algorithm.learningRate=8e-3",
        "algorithm.finalLearningRateRatio=0.1",
    )
    teacher, student = rewards_of(of_teacher), rewards_of(of_student)
    assert fmean(teacher[-LAST:]) > 0.7
    assert student[0] < 0.2
    assert fmean(student[-LAST:]) > 0.95 * fmean(teacher[-LAST:])


async def learned(root: Path, *changes: str) -> Run:
    async with running(root, "validation=null", "weightSync.mode=sync", *changes) as run:
        await run.ends()
    return run


def rewards_of(run: Run) -> list[float]:
    return [line["reward_mean"] for line in metrics_of(run.folder) if "reward_mean" in line]
