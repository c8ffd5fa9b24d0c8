"""Rewards of the quickstart's task with each loss and each advantage: do they learn, and how fast?

Each choice is a `nexrl run` of examples/sort-digits for each seed, with its other settings unchanged. The table has the
mean reward of the last 10 steps over the seeds with its standard error, and samples per second. Equal steps are equal
samples.

    python benchmarks/algorithms.py [--steps 150] [--seeds 5] [--only gspo rloo ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "examples/sort-digits/experiment.yaml"
RESULT = ROOT / "runs/bench-algorithms.json"
RUN_SECONDS = 1800.0
LAST_STEPS = 10
CHOICES = {
    "ppo_clip": [],
    "dual clip": ["algorithm.dualClip=3"],
    "gspo": ["algorithm.loss=gspo", "algorithm.aggregation=sequence"],
    "cispo": ["algorithm.loss=cispo"],
    "dppo_tv": ["algorithm.loss=dppo_tv"],
    "sapo": ["algorithm.loss=sapo", "algorithm.aggregation=sequence"],
    "reinforce, sync": ["algorithm.loss=reinforce", "weightSync.mode=sync", "weightSync.stalenessThreshold=0"],
    "group_mean": ["algorithm.advantage=group_mean"],
    "rloo": ["algorithm.advantage=rloo"],
    "max_rl": ["algorithm.advantage=max_rl"],
    "group_mean_batch_std": ["algorithm.advantage=group_mean_batch_std"],
    "batch_mean_std": ["algorithm.advantage=batch_mean_std"],
    "token band": ["algorithm.correction={tokenBand: {low: 0.5, high: 5}}"],
    "cosine": ["algorithm.learningRateDecay=cosine"],
}
"""What each row changes. The example itself has ppo_clip and group_mean_std."""


def main() -> None:
    """Run each choice with each seed, and print a row when it has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CHOICES, default=list(CHOICES))
    arguments = parser.parse_args()
    print(f"{'choice':22} {'reward':>7} {'s.e.':>6} {'samples/s':>10}")
    found = {}
    for name in arguments.only:
        runs = [run(CHOICES[name], seed, arguments.steps) for seed in range(arguments.seeds)]
        rewards, speeds = zip(*runs, strict=True)
        error = stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else float("nan")
        found[name] = {"rewards": rewards, "samples_per_second": speeds}
        print(f"{name:22} {fmean(rewards):7.3f} {error:6.3f} {fmean(speeds):10.0f}", flush=True)
    machine = f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"steps": arguments.steps, "machine": machine, "choices": found}, indent=2) + "\n")
    print(f"{arguments.steps} steps, {arguments.seeds} seeds, reward of the last {LAST_STEPS} steps; {machine}")


def run(overrides: Sequence[str], seed: int, steps: int) -> tuple[float, float]:
    """One run: mean reward of its last steps, and samples per second after the first step."""
    seeds = [f"{key}={seed}" for key in ("model.seed", "data.seed", "inference.seed")]
    nexrl = Path(sys.executable).with_name("nexrl")
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as root:
        ended = subprocess.run(
            [nexrl, "run", EXPERIMENT, *overrides, *seeds, f"trainer.steps={steps}", "validation=null", "--root", root],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            sys.exit(f"{' '.join(overrides)} ended with code {ended.returncode}:\n{ended.stdout[-3000:]}")
        lines = [json.loads(line) for line in (Path(root) / "sort-digits/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "reward_mean" in line]
    seconds = trained[-1]["time"] - trained[0]["time"]
    reward = fmean(line["reward_mean"] for line in trained[-LAST_STEPS:])
    return reward, sum(line["samples"] for line in trained[1:]) / seconds


if __name__ == "__main__":
    main()
