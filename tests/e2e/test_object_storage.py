"""`nexrl run` with storage.uri: the run's folder is lost, and its copy continues and is fetched."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexrl.run_layout import CHECKPOINT_MARKER
from nexrl.storage import run_id
from tests.support.object_storage import BUCKET, CREDENTIALS, KEY, SECRET, S3Server, running_s3
from tests.support.runs import OUTPUT, metrics_of, nexrl, running

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort-digits" / "experiment.yaml"
SORT_DIGITS = "sort-digits"
FOLDER = f"lab/{SORT_DIGITS}"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with running_s3(tmp_path / "s3") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)  # also for `nexrl get results`
        yield server


async def run_to_its_end(root: Path, *overrides: str) -> int:
    given = (f"storage.uri=s3://{BUCKET}/lab", "checkpoint.everySteps=2", *overrides)
    async with running(root, *given, file=EXAMPLE) as run:
        return await run.launcher.wait()


async def test_results_survive_the_folder_of_the_run(s3: S3Server, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(EXAMPLE.with_name("sort_digits.py"), root)
    assert await run_to_its_end(root, "trainer.steps=4") == 0
    assert f"copy of the results, with checkpoint of step 4: s3://{BUCKET}/{FOLDER}" in (root / OUTPUT).read_text()
    local = root / SORT_DIGITS
    records = f"{FOLDER}/records/{run_id(local)}"
    expected = {"experiment.yaml", "metrics.jsonl", "summary.json", "reward.png"}
    expected |= {f"trajectories/batch_{number:06d}.pb" for number in range(4)}
    expected |= {f"logs/{path.name}" for path in (local / "logs").iterdir()}
    assert expected <= s3.names(records)
    for name in ("summary.json", "metrics.jsonl", "logs/controller.log"):
        assert (s3.bucket / records / name).read_bytes() == (local / name).read_bytes(), "the copy is the last state"
    for path in local.rglob("*"):
        if path.is_file():
            assert not any(secret.encode() in path.read_bytes() for secret in (KEY, SECRET)), path

    first = {name: (s3.bucket / records / name).read_bytes() for name in s3.names(records)}
    shutil.rmtree(local)
    refused = await asyncio.to_thread(nexrl, root, "run", str(EXAMPLE), f"storage.uri=s3://{BUCKET}/lab")
    assert refused.returncode == 3
    assert "has the results of an earlier run" in refused.stderr
    assert await run_to_its_end(root, "trainer.steps=6", "resume.mode=auto") == 0
    assert {int(line["step"]) for line in metrics_of(local) if "loss" in line} == {5, 6}, "it resumed from step 4"
    assert first == {name: (s3.bucket / records / name).read_bytes() for name in s3.names(records)}

    got = await asyncio.to_thread(nexrl, root, "get", "results", f"s3://{BUCKET}/{FOLDER}", "fetched")
    assert got.returncode == 0, got.stderr
    fetched = root / "fetched"
    assert "checkpoint of step 6" in got.stdout
    assert {path.name for path in (fetched / "checkpoints").iterdir()} == {"global_step_6"}
    for name in ("model.safetensors", CHECKPOINT_MARKER):
        kept = local / "checkpoints" / "global_step_6" / name
        assert (fetched / "checkpoints" / "global_step_6" / name).read_bytes() == kept.read_bytes()
    assert not (fetched / "trajectories").exists()
