"""What is learned with each loss and advantage that uses rewards, and with a critic.

Each row is a `nexrl run` of an example for each seed, with its other settings unchanged: examples/sort-digits, whose
samples are one completion, or examples/high-card, whose samples have six turns. The table has the mean of a metric over
the last 10 steps and over the seeds, with its standard error, and samples per second. Equal steps are equal samples.

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

from nexrl.spec import load_experiment

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "runs/bench-algorithms.json"
RUN_SECONDS = 1800.0
LAST_STEPS = 10
METRICS = {"sort-digits": "reward_mean", "high-card": "reward/larger"}
"""What is compared, by example: 1 is the best. The reward of high-card is mostly luck; `larger` is not."""
EACH_HAND = "rollout.worker=high_card:CountedAfterEachHand"
GROUPS = "trajectoryPool.groupSize=16"
OF_CRITIC = {"type", "gae_lambda", "critic_only_steps", "critic"}


def _without_critic(advantage: str, **settings: float) -> str:
    """Return what replaces `algorithm` of high-card: an advantage, and its settings that are not of a critic."""
    algorithm = load_experiment(ROOT / "examples/high-card/experiment.yaml").spec.algorithm
    same = algorithm.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=OF_CRITIC)
    return f"algorithm={json.dumps({**same, 'advantage': advantage, **settings})}"


CHOICES = {
    "sort-digits": {
        "ppo_clip": [],
        "dual clip": ["algorithm.dualClip=3"],
        "gspo": ["algorithm.loss=gspo", "algorithm.aggregation=sequence"],
        "cispo": ["algorithm.loss=cispo"],
        "dppo_tv": ["algorithm.loss=dppo_tv"],
        "sapo": ["algorithm.loss=sapo", "algorithm.aggregation=sequence"],
        "reinforce, sync": ["algorithm.loss=reinforce", "weightSync.mode=sync", "weightSync.stalenessThreshold=0"],
        "dpo": ["algorithm.loss=dpo"],
        "ppo_clip, 2 parts": ["algorithm.miniBatches=2"],
        "decoupled_ppo, 2 parts": ["algorithm.loss=decoupled_ppo", "algorithm.miniBatches=2"],
        "group_mean": ["algorithm.advantage=group_mean"],
        "rloo": ["algorithm.advantage=rloo"],
        "max_rl": ["algorithm.advantage=max_rl"],
        "group_mean_batch_std": ["algorithm.advantage=group_mean_batch_std"],
        "pass_at_k": ["algorithm.advantage=pass_at_k", "algorithm.passK=4"],
        "batch_mean_std": ["algorithm.advantage=batch_mean_std"],
        "token band": ["algorithm.correction={tokenBand: {low: 0.5, high: 5}}"],
        "cosine": ["algorithm.learningRateDecay=cosine"],
    },
    "high-card": {
        "ppo": [],
        "batch_mean_std, groups of 1": [_without_critic("batch_mean_std")],
        "group_mean_std, groups of 16": [_without_critic("group_mean_std"), GROUPS],
        "ppo, each hand": [EACH_HAND, "algorithm.discount=0"],
        "return_to_go, each hand": [_without_critic("return_to_go", discount=0), EACH_HAND],
        "turn_mean_std, each hand": [_without_critic("turn_mean_std"), EACH_HAND, GROUPS],
    },
}
"""What each row changes of its example: sort-digits has ppo_clip and group_mean_std, high-card a critic."""


def main() -> None:
    """Run each choice with each seed, and print a row when it has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for choices in CHOICES.values() for name in choices]
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    arguments = parser.parse_args()
    found = {}
    for example, choices in CHOICES.items():
        names = [name for name in choices if name in arguments.only]
        if names:
            print(f"{example:30} {METRICS[example]:>14} {'s.e.':>6} {'samples/s':>10}", flush=True)
        for name in names:
            runs = [run(example, choices[name], seed, arguments.steps) for seed in range(arguments.seeds)]
            figures, speeds = zip(*runs, strict=True)
            error = stdev(figures) / len(figures) ** 0.5 if len(figures) > 1 else float("nan")
            found[name] = {METRICS[example]: figures, "samples_per_second": speeds}
            print(f"{name:30} {fmean(figures):14.3f} {error:6.3f} {fmean(speeds):10.0f}", flush=True)
    machine = f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"steps": arguments.steps, "machine": machine, "choices": found}, indent=2) + "\n")
    print(f"{arguments.steps} steps, {arguments.seeds} seeds, mean of the last {LAST_STEPS} steps; {machine}")


def run(example: str, overrides: Sequence[str], seed: int, steps: int) -> tuple[float, float]:
    """One run: mean of the example's metric in its last steps, and samples per second after the first step."""
    file = ROOT / "examples" / example / "experiment.yaml"
    seeds = [f"{key}={seed}" for key in ("model.seed", "data.seed", "inference.seed")]
    nexrl = Path(sys.executable).with_name("nexrl")
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as root:
        ended = subprocess.run(
            [nexrl, "run", file, *overrides, *seeds, f"trainer.steps={steps}", "validation=null", "--root", root],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            sys.exit(f"{' '.join(overrides)} ended with code {ended.returncode}:\n{ended.stdout[-3000:]}")
        lines = [json.loads(line) for line in (Path(root) / example / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if METRICS[example] in line]
    seconds = trained[-1]["time"] - trained[0]["time"]
    figure = fmean(line[METRICS[example]] for line in trained[-LAST_STEPS:])
    return figure, sum(line["samples"] for line in trained[1:]) / seconds


if __name__ == "__main__":
    main()
