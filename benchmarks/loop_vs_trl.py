"""Samples per second of the whole loop, across processes, against TRL's GRPOTrainer in one process.

Both train the "sort digits" example: the same initial weights, tokenizer, tasks, reward code, batch, group, completion
length and hyper-parameters, read from the example's experiment file. They take turns on the same machine; TRL runs with
one and with two threads, and the better of the two counts. Samples per second are those of all steps but the first,
over the time from the end of the first step to the end of the last: start-up of either side does not count.

    python benchmarks/loop_vs_trl.py [--rounds 3] [--steps 60]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from nexrl.models import build_model
from nexrl.spec import Experiment, load_experiment
from nexrl.spec.algorithm import PpoClip
from nexrl.tokenizers import build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "examples/sort-digits/experiment.yaml"
TASK_MODULE = ROOT / "examples/sort-digits/sort_digits.py"
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
TRL_SCRIPT = ROOT / "benchmarks/trl_sort_digits.py"
TRL_THREADS = (1, 2)
RESULT = ROOT / "runs/bench-loop.json"
RUN_SECONDS = 900.0
# As TRL does it: every row is trained on, nothing is validated or saved on the way.
SAME_WORK = (
    "algorithm.zeroVarianceGroups=keep",
    "validation=null",
    "checkpoint.everySteps=0",
    "metadata.name=bench-loop",
)


def main() -> None:
    """Run both sides in turn and print the ratio of each round and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        sys.exit("TRL is not installed: run `make bench-loop`")
    overrides = [*SAME_WORK, f"trainer.steps={arguments.steps}"]
    with tempfile.TemporaryDirectory(prefix="nexrl-bench-") as folder:
        recipe = write_recipe(load_experiment(EXPERIMENT, overrides), Path(folder))
        rounds = [run_round(number, recipe, overrides) for number in range(1, arguments.rounds + 1)]
    report(rounds, arguments.steps)


def write_recipe(experiment: Experiment, folder: Path) -> Path:
    """Write what TRL needs: the initial model as a folder, hyper-parameters as JSON. Returns the JSON's path."""
    spec = experiment.spec
    assert isinstance(spec.algorithm, PpoClip)
    build_model(spec.model, spec.model.seed).save_pretrained(folder / "model")
    build_tokenizer(spec.model).save_pretrained(folder / "model")
    recipe = {
        "model": str(folder / "model"),
        "task_module": str(TASK_MODULE),
        "steps": spec.trainer.steps,
        "batch_size": spec.trajectory_pool.batch_size,
        "group_size": spec.trajectory_pool.group_size,
        "max_new_tokens": spec.rollout.max_new_tokens,
        "learning_rate": spec.algorithm.learning_rate,
        "warmup_steps": spec.algorithm.warmup_steps,
        "final_learning_rate_ratio": spec.algorithm.final_learning_rate_ratio,
        "betas": spec.algorithm.betas,
        "clip_low": spec.algorithm.clip_low,
        "clip_high": spec.algorithm.clip_high,
        "entropy_coefficient": spec.algorithm.entropy_coefficient,
        "gradient_clip": spec.algorithm.gradient_clip,
        "seed": spec.trainer.seed,
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def run_round(number: int, recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """One run of ours, and one of TRL with each number of threads: samples per second, last rewards, the ratio."""
    ours = run_ours(recipe.parent / f"round-{number}", overrides)
    trl = {threads: run_trl(recipe, threads) for threads in TRL_THREADS}
    best = max(trl.values(), key=lambda result: result["samples_per_second"])
    ratio = ours["samples_per_second"] / best["samples_per_second"]
    shown = ", ".join(f"{result['samples_per_second']:.0f} ({threads} threads)" for threads, result in trl.items())
    print(
        f"round {number}: samples/s ours {ours['samples_per_second']:.0f}, TRL {shown}; ratio {ratio:.2f}", flush=True
    )
    return {"ours": ours, "trl_by_threads": trl, "ratio": ratio}


def run_ours(root: Path, overrides: list[str]) -> dict[str, float]:
    """`nexrl run` with all its processes; figures from its summary."""
    nexrl = Path(sys.executable).with_name("nexrl")
    _run([nexrl, "run", EXPERIMENT, *overrides, "--root", root], threads=1)
    summary = json.loads((root / "bench-loop/summary.json").read_text())
    return {"samples_per_second": summary["samples_per_second"], "reward_last": summary["reward_last"]}


def run_trl(recipe: Path, threads: int) -> dict[str, float]:
    """TRL's trainer in its own virtual environment."""
    result = recipe.with_name("trl.json")
    _run([TRL_PYTHON, TRL_SCRIPT, recipe, result, "--threads", threads], threads=threads)
    measured = json.loads(result.read_text())
    ends, batch_size = measured["step_end_seconds"], json.loads(recipe.read_text())["batch_size"]
    last_rewards = measured["reward"][-10:]  # as many as summary.json averages
    return {
        "samples_per_second": batch_size * (len(ends) - 1) / (ends[-1] - ends[0]),
        "reward_last": sum(last_rewards) / len(last_rewards),
    }


def report(rounds: list[dict[str, Any]], steps: int) -> None:
    """Print the median ratio and what it ran on; keep everything in runs/bench-loop.json."""
    ratio = median(entry["ratio"] for entry in rounds)
    machine = f"{os.cpu_count()} CPUs ({_cpu_model()}), load average {os.getloadavg()[0]:.1f} at the end"
    RESULT.parent.mkdir(exist_ok=True)
    result = {"ratio": ratio, "steps": steps, "machine": machine, "rounds": rounds}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    rewards = f"ours {rounds[-1]['ours']['reward_last']:.2f}, TRL {rounds[-1]['trl_by_threads'][1]['reward_last']:.2f}"
    print(f"mean reward of the last 10 of {steps} steps: {rewards}")
    print(f"samples per second, ours to TRL's: {ratio:.2f} (median of {len(rounds)} rounds); {machine}; {RESULT}")


def _run(command: list[object], threads: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    ended = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    if ended.returncode != 0:
        sys.exit(f"{command[0]} ended with code {ended.returncode}:\n{ended.stdout[-3000:]}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
