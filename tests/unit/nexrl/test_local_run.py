"""What a run on one machine leaves on disk, and that nothing of it outlives its launcher."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from nexrl import parent_death
from nexrl.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from nexrl.local import child as child_module
from nexrl.local import components
from nexrl.local.child import Child, Command, run_together
from nexrl.local.components import free_ports
from nexrl.local.launcher import RunOptions, _gangs, resume_command
from nexrl.local.report import Ending, samples_per_second, summarize, write_report
from nexrl.local.run_folder import RunFolder, is_running
from nexrl.local.status import ending_of, print_status
from nexrl.local.view import RunView
from nexrl.spec import load_experiment, yaml_core
from nexrl.spec.trainer import AutoResume, NoResume
from nexrl.v1 import activity_service_pb2 as activity_pb
from nexrl.v1 import controller_service_pb2 as pb
from nexrl.v1.trajectory_pool_service_pb2 import PoolState
from tests.support.kubelet import experiment_object
from tests.support.services import small_experiment

SCRATCH = {"alphabet": "0123456789", "hiddenSize": 16, "layers": 1, "heads": 2, "maxPositions": 32}
INTERRUPTED = Ending("Interrupted", "Signal", "Ctrl-C or SIGTERM", 130, {})

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", {parent_death!r}, str(os.getpid()), "sleep", "600"], stdout=1)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT.format(parent_death=parent_death.__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        pidfd = os.pidfd_open(child)
        # The pipe is also the child's standard output: its end is read when nobody holds it any more.
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b""
    os.close(pidfd)


def test_a_child_whose_parent_has_ended_before_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", parent_death.__file__, "1", "echo", "started"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "the parent process 1 has ended" in ended.stderr


async def test_a_childs_exit_code_and_log_are_kept_and_it_can_be_started_again(tmp_path: Path) -> None:
    script = "import os; print('line of', os.environ['WHO']); raise SystemExit(3)"
    child = Child(Command("rollout-0", [sys.executable, "-c", script], {"WHO": "me"}), tmp_path)
    assert [await child.run(), await child.run()] == [3, 3]
    assert child.pid is None
    assert child.last_words() == "line of me\nline of me"
    await child.stop(1.0)


async def test_a_child_that_is_just_being_started_is_stopped(tmp_path: Path) -> None:
    child = Child(Command("rollout-0", ["sleep", "600"], {}), tmp_path)
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)  # it has begun to start
    await child.stop(5.0)
    assert await running == -signal.SIGTERM


async def test_a_child_that_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    ready = f"open({str(tmp_path / 'ready')!r}, 'w').close()"
    script = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ready}; signal.pause()"
    child = Child(Command("stubborn", [sys.executable, "-c", script], {}), tmp_path)
    running = asyncio.create_task(child.run())
    await asyncio.to_thread((tmp_path / "ready").read_text)  # until it ignores the signal
    await child.stop(0.05)
    assert await running == -signal.SIGKILL


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Callable[..., RunFolder]]:
    """Opens folders of runs, and lets go of them at the end."""
    with ExitStack() as stack:

        def open_one(name: str = "test", **sections: Any) -> RunFolder:
            return stack.enter_context(closing(RunFolder(tmp_path, small_experiment(name, **sections))))

        yield open_one


OpenFolder = Callable[..., RunFolder]


@pytest.mark.guide("Q3")
def test_two_launchers_never_share_a_folder(tmp_path: Path, open_folder: OpenFolder) -> None:
    first = open_folder("mine")
    with pytest.raises(AlreadyExistsError, match="'mine' is running in"):
        open_folder("mine")
    open_folder("other")
    assert first.path == tmp_path / "mine"


def left_by_a_run(root: Path) -> None:
    with closing(RunFolder(root, small_experiment("mine"))) as folder:
        folder.write_json("summary.json", {"steps": 3})


def test_an_earlier_run_is_put_aside_whole(tmp_path: Path, open_folder: OpenFolder) -> None:
    left_by_a_run(tmp_path)
    folder = open_folder("mine")
    assert not (folder.path / "summary.json").exists()
    (aside,) = [path for path in tmp_path.glob("mine.*") if path.is_dir()]
    assert json.loads((aside / "summary.json").read_text()) == {"steps": 3}


@pytest.mark.guide("Q41")
def test_a_run_that_resumes_keeps_its_folder(tmp_path: Path, open_folder: OpenFolder) -> None:
    left_by_a_run(tmp_path)
    folder = open_folder("mine", resume={"mode": "auto"})
    assert (folder.path / "summary.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["mine"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"trajectoryPool": {"batchSize": 8, "groupSize": 2}},
            "spec.trajectoryPool.batchSize: 8; the run to be resumed has 4",
        ),
        (
            {"model": {"scratch": {**SCRATCH, "hiddenSize": 32}}},
            "spec.model.scratch.hiddenSize: 32; the run to be resumed has 16",
        ),
        ({"model": {"scratch": SCRATCH, "seed": 7}}, "spec.model.seed: 7; the run to be resumed has 0"),
        ({"model": {"path": "/models/a"}}, "spec.model.path: /models/a; the run to be resumed has nothing"),
    ],
)
def test_a_run_of_another_model_or_batch_is_not_resumed_and_nothing_is_touched(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    left_by_a_run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")}
    advice = "keep that value, or choose another metadata.name"
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(said)}; {advice}$"):
        RunFolder(tmp_path, small_experiment("mine", resume={"mode": "auto"}, **sections))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")} == before
    assert not is_running(tmp_path / "mine")


def test_metrics_are_by_step_and_a_replayed_step_counts_once(open_folder: OpenFolder) -> None:
    folder = open_folder()
    assert folder.metrics() == []
    lines: list[dict[str, float]] = [
        {"step": 2, "time": 10, "reward_mean": 0.1},
        {"step": 1, "time": 11, "reward_mean": 0.2},
        {"step": 2, "time": 12, "reward_mean": 0.3},
        {"step": 2, "time": 13, "val/exact": 0.5},
    ]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert folder.metrics() == [
        {"step": 1, "time": 11, "reward_mean": 0.2},
        {"step": 2, "time": 12, "reward_mean": 0.3, "val/exact": 0.5},
    ]


def steps(number: int) -> list[dict[str, float]]:
    return [
        {"step": step, "time": 100 + step / 2, "samples": 8, "reward_mean": step / number, "entropy": 1.0}
        for step in range(1, number + 1)
    ]


def test_the_summary_has_both_ends_and_the_rate_between_them() -> None:
    held_out = [
        {"step": 0, "val/exact": 0.1, "val/num_samples": 4},
        {"step": 40, "val/exact": 0.9, "val/num_samples": 4},
    ]
    made = steps(40)
    summary = summarize([held_out[0], *made, held_out[1]], made)
    assert (summary["steps"], summary["samples_per_second"]) == (40, 16.0)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1375, 0.8875)  # ten steps at each end
    assert (summary["heldout_exact_first"], summary["heldout_exact"]) == (0.1, 0.9)
    assert summary["heldout_reward"] is None


def test_one_validation_is_the_first_and_none_the_last() -> None:
    made = steps(3)
    summary = summarize([{"step": 0, "val/exact": 0.1, "val/num_samples": 4}, *made], made)
    assert (summary["heldout_exact_first"], summary["heldout_exact"]) == (0.1, None)


def test_a_run_without_a_step_has_a_summary_too() -> None:
    assert summarize([], [])["steps"] == 0
    assert samples_per_second(steps(1)) is None


def test_the_report_writes_summary_and_picture(open_folder: OpenFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder()
    earlier, now = steps(20), time.time()
    resumed = [line | {"step": line["step"] + 20, "time": now - 10 + line["step"] / 2} for line in earlier]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*earlier, *resumed]))
    write_report(folder, small_experiment(), [Child(Command("trainer", [], {}), folder.logs)], 12.3, INTERRUPTED)
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["name"], summary["processes"], summary["wall_seconds"]) == ("test", ["trainer"], 12.3)
    assert (summary["steps"], summary["samples_per_second"]) == (40, 16.0)  # of what was made since it was started
    assert (folder.path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (summary["steps_made"], summary["phase"], summary["exit_code"]) == (20, "Interrupted", 130)
    printed = capsys.readouterr().out
    assert "test: 20 steps in 12 s, after 20 earlier ones" in " ".join(printed.split())
    assert "\n16.0 samples/s" in printed


def test_a_run_without_rewards_shows_its_loss(open_folder: OpenFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder()
    lines = [{"loss": 0.25, **line} for line in steps(4)]
    for line in lines:
        del line["reward_mean"]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder, small_experiment(), [], 1.0, INTERRUPTED)
    printed = capsys.readouterr().out
    assert "0.250" in next(line for line in printed.splitlines() if "loss" in line)
    assert "│ reward" not in printed
    assert (folder.path / "reward.png").exists()
    with RunView(small_experiment(), []) as view:
        view.show(pb.Experiment(progress=pb.Progress(step=1, metrics={"loss": 0.25})))
    assert "loss 0.250" in capsys.readouterr().out


def test_a_start_that_made_no_step_has_no_rate(open_folder: OpenFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(open_folder(), small_experiment(), [], 1.0, INTERRUPTED)
    printed = capsys.readouterr().out
    assert "test: 0 steps in 1 s" in printed
    assert "\n- samples/s" in printed


@pytest.mark.parametrize(("made", "heading"), [(1, "first step"), (4, "first 2 steps"), (40, "first 10 steps")])
def test_no_step_is_at_both_ends_of_the_report(
    open_folder: OpenFolder, capsys: pytest.CaptureFixture[str], made: int, heading: str
) -> None:
    folder = open_folder()
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps(made)))
    write_report(folder, small_experiment(), [], 1.0, INTERRUPTED)
    assert heading in " ".join(capsys.readouterr().out.split())


async def test_the_status_of_a_run_that_is_not_on_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFoundError, match="not the folder of a run"):
        await print_status(tmp_path)
    with closing(RunFolder(tmp_path, small_experiment("mine"))) as folder:
        folder.write_json("endpoints.json", {})
    assert "its launcher was killed" in ending_of(folder.path)
    with closing(RunFolder(tmp_path, small_experiment("mine", resume={"mode": "auto"}))) as folder:
        assert not (folder.path / "endpoints.json").exists()
        ending = Ending("Failed", "BadConfiguration", "no data", 10, {"reward_error": 7, "stale": 1})
        write_report(folder, small_experiment("mine"), [], 1.0, ending)
    drops = "dropped samples: 7 reward_error, 1 stale; `nexrl logs RUN rollout-0` has the errors of those that failed"
    assert drops in capsys.readouterr().out
    await print_status(folder.path)
    told = capsys.readouterr().out
    assert told.startswith(f"mine: Failed (BadConfiguration), exit code 10: no data\n{drops}\nstep 0; more in")


def test_what_resumes_a_run_is_how_it_was_started_and_resume_mode_auto() -> None:
    overrides = ["trainer.steps=5", "data.path=my tasks.jsonl", "resume.mode=disable"]
    assert resume_command(Path("a.yaml"), overrides, RunOptions(Path("/tmp/r")), NoResume()) == (
        "nexrl run a.yaml trainer.steps=5 'data.path=my tasks.jsonl' resume.mode=auto --root /tmp/r"
    )
    assert resume_command(Path("a.yaml"), [], RunOptions(), NoResume()) == "nexrl run a.yaml resume.mode=auto"


def test_what_resumes_a_run_that_began_from_a_checkpoint_is_no_spec_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    start = {"mode": "from_path", "path": str(tmp_path / "global_step_3")}
    file = tmp_path / "a.yaml"
    file.write_text(yaml_core.dump(experiment_object("a", resume=start)))
    began = load_experiment(file).spec.resume
    *_, override = shlex.split(resume_command(file, ["resume={mode: disable}"], RunOptions(), began))
    assert load_experiment(file, [override]).spec.resume == AutoResume(mode="auto")


def test_lines_of_a_run_tell_of_trouble_only_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    def seen(step: int, reason: str, message: str) -> pb.Experiment:
        progress = pb.Progress(step=step, total_steps=4, policy_version=step)
        return pb.Experiment(phase=pb.PHASE_RUNNING, reason=reason, message=message, progress=progress)

    def last_line() -> str:
        return capsys.readouterr().out.splitlines()[-1]

    with RunView(small_experiment(), []) as view:
        view.show(seen(1, "Training", "policy version 0 was measured"))
        assert last_line().startswith("Running; step 1/4; policy version 1; samples/s")
        error = activity_pb.ErrorReport(module="rollout-0", message="no reward", unix_seconds=time.time())
        view.show_details(PoolState(), activity_pb.GetActivityResponse(recent_error_count=1, errors=[error]))
        view.show(seen(1, "Stalled", "no step for 61 s"))
        assert last_line().startswith("Running: no step for 61 s; step 1/4")
        view.show(seen(1, "Training", ""))
        assert last_line().endswith("; errors 1 in 5 minutes, newest from rollout-0: no reward")
        view.show(seen(2, "Training", "training goes on"))
        assert last_line().endswith("; errors 1 in 5 minutes, see `nexrl status`")
        view.show(pb.Experiment(phase=pb.PHASE_FAILED, reason="ComponentFailed", message="no reward"))
        assert re.fullmatch("Failed; step (?!.*no reward).*", last_line()), "the command prints what failed, at its end"
        view.say("error: mine:A: none of [/tmp/data]")
        assert last_line() == "error: mine:A: none of [/tmp/data]"
        view.say("stopping: soon")
        assert last_line() == "stopping: soon"


def test_free_ports_are_distinct_and_none_that_an_outgoing_connection_gets() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as outgoing:
        outgoing.bind(("127.0.0.1", 0))
        assert all(1024 < port < min(32768, outgoing.getsockname()[1]) for port in ports)


def test_a_port_on_which_a_process_listens_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(components, "PORTS", range(port, port + 1))
        with pytest.raises(FailedPreconditionError, match=f"fewer than 1 of {port} to {port} are free"):
            free_ports(1)


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (("sleep 0.1; exit 6", "kill -9 $$"), ("trainer-1", -9)),
        (("exit 10", "sleep 0.1; exit 6"), ("trainer-0", 10)),
        (("exit 7", "exit 7"), ("trainer-0", 7)),
        (("exit 6", "exit 0"), ("trainer-0", 6)),
        (("exit 0", "sleep 0.1"), ("trainer-0", 0)),
        (("kill -9 $$", "sleep 600"), ("trainer-0", -9)),
    ],
)
async def test_processes_that_end_together_end_for_the_reason_of_the_one_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: tuple[str, str], expected: tuple[str, int]
) -> None:
    monkeypatch.setattr(child_module, "GANG_END_SECONDS", 2.0)
    gang = [
        Child(Command(f"trainer-{number}", ["sh", "-c", each], {}), tmp_path) for number, each in enumerate(scripts)
    ]
    child, code = await run_together(gang)
    assert (child.name, code) == expected
    assert all(each.pid is None for each in gang)


def test_all_replicas_of_the_trainer_end_and_restart_together_and_each_other_process_alone(tmp_path: Path) -> None:
    names = ["redis", "weight-sync", "trainer-0", "trainer-1", "inference-0", "inference-1"]
    gangs = _gangs([Child(Command(name, [], {}), tmp_path) for name in names])
    assert [[child.name for child in gang] for gang in gangs] == [
        *(["redis"], ["weight-sync"], ["trainer-0", "trainer-1"], ["inference-0"], ["inference-1"])
    ]
