"""Samples per second in the modes sync, batch-async and fully-async, with rollouts of long-tailed length.

Each mode is a `nexrl run` of long_tail/experiment.yaml: the same steps, seeds and room for rollouts. What takes time is
simulated, so that the cores of this machine are not what decides: an episode lasts a log-normal time after its answer
(long_tail/long_tail.py), a training step a fixed one (long_tail/sitecustomize.py). All else is real: processes, gRPC,
Redis, sampling, gradients, weight syncs.

Samples per second are those of all steps but the first, over the time from its end to the end of the last. Busy is the
share of that time in which the trainer was in a step; what it does between two, weight sync included, is not. Dropped
are samples that had become too stale, which are the long ones: the mean length of what was trained shows how much.

    python benchmarks/async_vs_sync.py [--steps 100] [--train-seconds 1.2] [--staleness 4]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks/long_tail"
RESULT = ROOT / "runs/bench-async.json"
NAME = "long-tail"
MODES = ("sync", "batch-async", "fully-async")
RUN_SECONDS = 1800.0
LAST_STEPS = 10
COLUMNS = ("samples_per_second", "ratio", "reward", "busy", "staleness", "episode_seconds", "dropped")


def main() -> None:
    """Run each mode once and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--train-seconds", type=float, default=1.2, help="of one training step")
    parser.add_argument("--staleness", type=int, default=4, help="weightSync.stalenessThreshold where there is one")
    arguments = parser.parse_args()
    found = {mode: run_mode(mode, arguments) for mode in MODES}
    for figures in found.values():
        figures["ratio"] = figures["samples_per_second"] / found["sync"]["samples_per_second"]
    machine = f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(vars(arguments) | {"machine": machine, "modes": found}, indent=2) + "\n")
    print(f"{'mode':11}  " + "  ".join(COLUMNS))
    for mode, figures in found.items():
        print(f"{mode:11}  " + "  ".join(f"{figures[column]:{len(column)}.3g}" for column in COLUMNS))
    print(f"{arguments.steps} steps of {arguments.train_seconds:g} s, reward of the last {LAST_STEPS}; {machine}")


def run_mode(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One run; its figures."""
    staleness = 0 if mode == "sync" else arguments.staleness
    overrides = (
        f"weightSync.mode={mode}",
        f"weightSync.stalenessThreshold={staleness}",
        f"trainer.steps={arguments.steps}",
    )
    environment = os.environ | {
        "PYTHONPATH": str(FOLDER),
        "LONG_TAIL_TRAIN_SECONDS": str(arguments.train_seconds),
        "OMP_NUM_THREADS": "1",
    }
    nexrl = Path(sys.executable).with_name("nexrl")
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as root:
        ended = subprocess.run(
            [nexrl, "run", FOLDER / "experiment.yaml", *overrides, "--root", root],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            sys.exit(f"mode {mode} ended with code {ended.returncode}:\n{ended.stdout[-3000:]}")
        lines = [json.loads(line) for line in (Path(root) / NAME / "metrics.jsonl").read_text().splitlines()]
    dropped = re.findall(r"dropped (\d+) stale", ended.stdout)
    return figures_of([line for line in lines if "reward_mean" in line]) | {"dropped": float((dropped or [0])[-1])}


def figures_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """What the steps' metrics say of a run."""
    seconds, later = steps[-1]["time"] - steps[0]["time"], steps[1:]
    return {
        "samples_per_second": sum(step["samples"] for step in later) / seconds,
        "busy": sum(step["train_seconds"] for step in later) / seconds,
        "reward": fmean(step["reward_mean"] for step in steps[-LAST_STEPS:]),
        "staleness": fmean(step["staleness_steps"] for step in steps),
        "episode_seconds": fmean(step["reward/seconds"] for step in steps),
    }


if __name__ == "__main__":
    main()
