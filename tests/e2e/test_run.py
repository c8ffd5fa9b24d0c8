"""A run from beginning to end, as its user sees it: one run of 100 steps for all tests of this module."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from transformers import AutoModelForCausalLM, AutoTokenizer

from nexrl.errors import AlreadyExistsError
from nexrl.local.launcher import controller_address
from nexrl.rpc.client import call, connect
from nexrl.spec import load_resolved
from nexrl.v1 import trajectory_pool_service_pb2 as pool_pb
from nexrl.v1.trajectory_pool_service_pb2_grpc import TrajectoryPoolServiceStub
from tests.support.patience import LIMIT_SECONDS
from tests.support.runs import (
    EXPERIMENT,
    NAME,
    Run,
    batches_of,
    copy_experiment,
    metrics_of,
    nexrl,
    processes_in,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("one run")]  # one process makes the run, for all tests

STEPS = 100
BATCH_SIZE = 128
CHILDREN = {
    "redis",
    "controller",
    "data-reader",
    "trajectory-pool",
    "weight-sync",
    "trainer",
    "inference-0",
    "rollout-0",
}

Seen = Mapping[str, Any]


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What was seen of the run while it was on."""
    return asyncio.run(_run_and_look(tmp_path_factory.mktemp("one-run")))


@pytest.fixture
def folder(seen: Seen) -> Path:
    """Folder of the run, which has ended."""
    return Path(seen["folder"])


async def _run_and_look(root: Path) -> dict[str, Any]:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        running(root, f"trainer.steps={STEPS}", "checkpoint.everySteps=40") as run,
    ):
        await run.until_step(1)
        run.hold()
        facts = await _look(run)
        run.release()
        return facts | {"folder": str(run.folder), "exit_code": await run.launcher.wait()}


async def _look(run: Run) -> dict[str, Any]:
    activity = await run.activity()
    modules = {module.name: (module.address, module.metrics_url) for module in activity.modules}
    modules["controller"] = (controller_address(run.folder), _controller_metrics_url(run.folder))
    return {
        "pids": [run.launcher.pid, *(process.pid for process in run.processes.values())],
        "children": sorted(run.processes),
        "summary": activity.summary,
        "health": {name: await _health(address) for name, (address, _) in modules.items()},
        "metrics": {name: await _metrics(url) for name, (_, url) in modules.items()},
        "pool": await _pool(modules["trajectory-pool"][0]),
        "status": vars(await asyncio.to_thread(nexrl, run.root, "status", NAME)),
        "samples": vars(await asyncio.to_thread(nexrl, run.root, "traj", "list", NAME, "--json", "--limit", "9999")),
        "second": vars(await asyncio.to_thread(nexrl, run.root, "run", EXPERIMENT, "--root", ".")),
    }


def _controller_metrics_url(folder: Path) -> str:
    """From its log: the controller is no module of its own activity."""
    lines = map(json.loads, (folder / "logs" / "controller.log").read_text().splitlines())
    return next(f"http://127.0.0.1:{line['metrics_port']}/metrics" for line in lines if "metrics_port" in line)


async def _health(address: str) -> int:
    async with connect(address) as channel:
        health: Any = HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_SECONDS)
    return int(answer.status)


async def _metrics(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return await response.text()


async def _pool(address: str) -> dict[str, int]:
    async with connect(address) as channel:
        request = pool_pb.GetTrajectoryPoolStateRequest()
        stub = TrajectoryPoolServiceStub(channel)
        answer = await call(stub.GetTrajectoryPoolState, request, timeout_seconds=LIMIT_SECONDS)
    return {"granted": answer.pools[0].granted, "imbalance": answer.pools[0].imbalance}


@pytest.mark.guide("A1", "Q1", "R1")
def test_a_run_that_makes_all_its_steps_ends_with_exit_code_zero(seen: Seen) -> None:
    assert seen["exit_code"] == 0


@pytest.mark.guide("A2", "A7", "Q1")
def test_every_service_is_an_operating_system_process_of_its_own(seen: Seen) -> None:
    assert set(seen["children"]) == CHILDREN
    assert len(set(seen["pids"])) == len(CHILDREN) + 1


@pytest.mark.guide("C5", "S7")
def test_every_process_answers_health_checks_with_serving(seen: Seen) -> None:
    assert set(seen["health"]) == CHILDREN - {"redis"}
    assert set(seen["health"].values()) == {health_pb2.HealthCheckResponse.SERVING}


@pytest.mark.guide("S8")
def test_every_process_serves_metrics_of_its_build_and_of_its_calls(seen: Seen) -> None:
    assert set(seen["metrics"]) == CHILDREN - {"redis"}
    for name, metrics in seen["metrics"].items():
        assert "nexrl_build_info{" in metrics, name
        assert "# TYPE grpc_server_handled_total counter" in metrics, name


def test_the_ledger_is_balanced_in_the_middle_of_the_run(seen: Seen) -> None:
    assert 'nexrl_ledger_imbalance{model_tag="default"} 0.0' in seen["metrics"]["trajectory-pool"]
    assert seen["pool"]["imbalance"] == 0
    assert seen["pool"]["granted"] > 0


@pytest.mark.guide("A5", "M7", "S12", "S13")
def test_a_live_run_tells_what_each_module_does(seen: Seen) -> None:
    assert seen["status"]["returncode"] == 0
    for name in CHILDREN - {"redis", "controller"}:
        assert name in seen["summary"]
        assert name in seen["status"]["stdout"]
    assert "health healthy" in seen["status"]["stdout"]


def test_a_second_run_of_the_same_name_is_refused(seen: Seen) -> None:
    assert seen["second"]["returncode"] == AlreadyExistsError.exit_code
    assert seen["second"]["stderr"].count("\n") == 1
    assert "metadata.name: 'copy-digits' is running in" in seen["second"]["stderr"]


def test_the_summary_has_the_figures_of_the_run(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == summary["steps_made"] == STEPS
    assert (summary["phase"], summary["reason"], summary["exit_code"]) == ("Succeeded", "Completed", 0)
    assert set(summary["processes"]) == CHILDREN
    assert 0 <= summary["heldout_exact"] <= 1
    assert summary["samples_per_second"] > 0
    assert summary["wall_seconds"] > 0


@pytest.mark.guide("M15", "Q43")
def test_every_step_is_logged_once(folder: Path) -> None:
    assert [line["step"] for line in metrics_of(folder) if "reward_mean" in line] == [*range(1, STEPS + 1)]


@pytest.mark.guide("D10", "R6", "Q38")
def test_the_first_and_the_last_version_are_validated(folder: Path) -> None:
    assert [line["step"] for line in metrics_of(folder) if "val/num_samples" in line] == [0, STEPS]


@pytest.mark.guide("L7", "L13")
def test_in_mode_sync_every_trained_token_is_of_the_newest_version(folder: Path) -> None:
    assert {line["staleness_steps_max"] for line in metrics_of(folder) if "reward_mean" in line} == {0.0}


def test_the_reward_rises(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["heldout_reward"] > summary["heldout_reward_first"] + 0.2


def test_the_run_leaves_its_picture_its_logs_and_its_resolved_experiment(folder: Path) -> None:
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "endpoints.json").exists()
    assert {log.stem for log in (folder / "logs").glob("*.log")} == CHILDREN
    experiment = load_resolved(folder / "experiment.yaml")
    assert experiment.spec.trainer.steps == STEPS
    assert experiment.spec.algorithm.learning_rate == 4e-3


def test_the_run_leaves_every_trajectory_that_it_trained_on(folder: Path) -> None:
    batches = batches_of(folder)[:STEPS]  # one more may have been prepared
    assert [batch.batch_id for batch in batches] == [*range(STEPS)]
    for batch in batches:
        samples = [sample for group in batch.groups for sample in group.samples]
        assert len({sample.sample_id for sample in samples}) == BATCH_SIZE
        assert all(span.policy_version == batch.batch_id for s in samples for t in s.trajectories for span in t.spans)


def test_the_samples_of_a_live_run_are_listed_with_where_they_are(seen: Seen) -> None:
    assert seen["samples"]["returncode"] == 0, seen["samples"]["stderr"]
    samples = [json.loads(line) for line in seen["samples"]["stdout"].splitlines()]
    trained = [sample for sample in samples if sample["state"] == "trained"]
    assert {sample["batch"] for sample in trained} >= {0}
    assert {(sample["step"], sample["policy_versions"][0][2]) for sample in trained if sample["batch"] == 0} == {(1, 0)}
    assert {sample["state"] for sample in samples if sample["batch"] is None} >= {"leased"}


def test_a_trained_sample_is_found_in_its_batch_and_drawn_again_alike(folder: Path) -> None:
    number = 80  # whose policy version a checkpoint holds
    listed = nexrl(folder.parent, "traj", "list", NAME, "--batch", str(number), "--json")
    assert listed.returncode == 0, listed.stderr
    lines = {line["sample"]: line for line in map(json.loads, listed.stdout.splitlines())}
    samples = {sample.sample_id: sample for group in batches_of(folder)[number].groups for sample in group.samples}
    assert {(line["state"], line["step"]) for line in lines.values()} == {("durable", number + 1)}
    assert {name: line["token_ids"] for name, line in lines.items()} == {
        name: list(sample.trajectories[0].token_ids) for name, sample in samples.items()
    }
    longest = max(lines.values(), key=lambda line: len(line["token_ids"]))["sample"]
    shown = nexrl(folder.parent, "traj", "get", NAME, longest, "--json")
    assert json.loads(shown.stdout)["trajectories"][0]["token_ids"] == lines[longest]["token_ids"]
    replayed = nexrl(folder.parent, "traj", "replay", NAME, longest)
    assert replayed.returncode == 0, replayed.stderr
    assert f"policy version {number}" in replayed.stdout
    assert "equal" in replayed.stdout


@pytest.mark.guide("L4", "L16", "S11", "Q23")
def test_checkpoints_are_kept_as_the_experiment_says(folder: Path) -> None:
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}  # and those of the last ten seconds
    assert checkpoints - {"global_step_40"} == {"global_step_80", f"global_step_{STEPS}"}


@pytest.mark.guide("S11")
def test_a_trained_checkpoint_is_a_hugging_face_model_that_generates(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / f"global_step_{STEPS}"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = tokenizer(["012=", "314="], return_tensors="pt", return_token_type_ids=False)
    generated = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    assert tokenizer.batch_decode(generated[:, :5], skip_special_tokens=True) == ["012=", "314="]
    completions = tokenizer.batch_decode(generated[:, 5:], skip_special_tokens=True)
    assert all(completion and set(completion) <= set("01234=") for completion in completions)


def test_an_evaluation_of_a_checkpoint_finds_what_the_run_has_measured_and_keeps_its_samples(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = folder / "checkpoints" / f"global_step_{STEPS}"
    arguments = ("eval", str(copy_experiment(tmp_path)), "--checkpoint", str(checkpoint), "--out", "measured")
    ended = nexrl(tmp_path, *arguments)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "measured" / "eval.json").read_text())
    expected = metrics_of(folder)[-1]
    assert expected["step"] == results["policy_version"] == STEPS
    assert {f"val/{name}": pytest.approx(score["mean"]) for name, score in results["scores"].items()} == {
        name: expected[name] for name in ("val/reward", "val/exact")
    }
    assert (results["tasks"], results["samples"], results["failed_samples"]) == (16, 16, 0)
    assert "standard error" in ended.stdout
    listed = nexrl(tmp_path, "traj", "list", "./measured", "--json")
    rewards = [json.loads(line)["reward"] for line in listed.stdout.splitlines()]
    assert sum(rewards) / 16 == pytest.approx(results["scores"]["reward"]["mean"])
    assert not processes_in(tmp_path)
