"""Results and logs can be had after the end, when no pod of the experiment is left."""

import json
from pathlib import Path

from safetensors import safe_open

from tests.support.cluster import WAIT, Namespace, command, eventually
from tests.support.experiments import NEXRL, applied, slow
from tests.support.pages import HOW_TO, write_files

STEPS = 3


def test_results_and_logs_are_fetched_while_it_runs_and_after_the_end(namespace: Namespace, tmp_path: Path) -> None:
    with applied(namespace, slow("kept", trainer__steps=STEPS, checkpoint__everySteps=1)) as kept:
        kept.until_step(1)
        while_running = get_results(namespace, tmp_path / "running")
        assert {"experiment.yaml", "status.json", "code", "logs"} <= {path.name for path in while_running.iterdir()}

        kept.until("Complete")
        eventually(lambda: not kept.pods(), "no pod is left")
        taken = get_results(namespace, tmp_path / "taken")
        weights = taken / f"checkpoints/global_step_{STEPS}/model.safetensors"
        with safe_open(weights, framework="numpy") as tensors:
            assert [*tensors.keys()]
        assert (taken / "code/sort_digits.py").is_file()
        steps = [json.loads(line) for line in (taken / "metrics.jsonl").read_text().splitlines()]
        assert {line["step"] for line in steps if "reward_mean" in line} == {*range(1, STEPS + 1)}
        lines = command(NEXRL, "logs", "kept", "trainer", "--namespace", namespace.name)
        assert "begins at step 0" in lines
        assert lines == (taken / "logs/trainer.log").read_text()
        assert not namespace.pods("app.kubernetes.io/component=reader")

        results = namespace.get("experiment", "kept")["status"]["results"]
        write_files((HOW_TO / "kubernetes.md").read_text(), tmp_path)
        pod = (tmp_path / "results.yaml").read_text()
        namespace.apply(pod.replace("CLAIM", results["claim"]).replace("IMAGE", results["image"]))
        namespace.kubectl("wait", "--for=condition=Ready", "pod/results", WAIT)
        namespace.kubectl("cp", "results:/volume", str(tmp_path / "by-kubectl"))
        namespace.kubectl("delete", "pod", "results", WAIT)
        assert (tmp_path / "by-kubectl/logs/trainer.log").read_text() == lines


def get_results(namespace: Namespace, folder: Path) -> Path:
    command(NEXRL, "get", "results", "kept", str(folder), "--namespace", namespace.name)
    return folder
