"""Writes the report of a run: summary.json, reward.png, and a table of its first and last steps."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from nexrl.local.child import Child
from nexrl.local.run_folder import RunFolder
from nexrl.run_layout import REWARD_FILE, SUMMARY_FILE
from nexrl.spec import Experiment

ENDS_STEPS = 10
"""Most steps averaged at either end of the run: one batch alone is noisy. A short run has half of its steps at each."""
AT_ENDS = {
    "reward": "reward_mean",
    "loss": "loss",
    "entropy": "entropy",
    "degenerate groups": "zero_variance_group_fraction",
}

Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Ending:
    """How a run ended, or this part of a run that was resumed."""

    phase: str
    """A phase of nexrl.v1.Phase, for example 'Succeeded'; 'Interrupted' after Ctrl-C or SIGTERM."""
    reason: str
    message: str
    exit_code: int
    dropped: Mapping[str, int]
    """Samples that were dropped, by reason."""


def write_report(
    folder: RunFolder, experiment: Experiment, children: Sequence[Child], wall_seconds: float, ending: Ending
) -> None:
    """Write summary.json and reward.png, and print the table."""
    metrics = folder.metrics()
    steps = [line for line in metrics if "samples" in line]
    began = time.time() - wall_seconds
    made = [line for line in steps if line["time"] >= began]  # a resumed run also has steps from before it was resumed
    summary = (
        asdict(ending)
        | summarize(metrics, steps)
        | {
            "name": experiment.metadata.name,
            "steps_made": len(made),
            "wall_seconds": round(wall_seconds, 2),
            "samples_per_second": samples_per_second(made),
            "processes": [child.name for child in children],
        }
    )
    folder.write_json(SUMMARY_FILE, summary)
    if steps:
        plot(folder, metrics, steps)
    print_report(folder, summary)


def summarize(metrics: Metrics, steps: Metrics) -> dict[str, Any]:
    """Return the steps made, rewards at either end, held-out scores and samples per second."""
    held_out = [line for line in metrics if "val/num_samples" in line]
    averaged = max(1, min(ENDS_STEPS, len(steps) // 2))
    summary: dict[str, Any] = {"steps": int(steps[-1]["step"]) if steps else 0, "steps_averaged": averaged}
    for name, key in AT_ENDS.items():
        summary[f"{name.replace(' ', '_')}_first"] = _mean(steps[:averaged], key)
        summary[f"{name.replace(' ', '_')}_last"] = _mean(steps[-averaged:], key)
    for score in ("exact", "reward"):
        summary[f"heldout_{score}_first"] = _mean(held_out[:1], f"val/{score}")
        summary[f"heldout_{score}"] = _mean(held_out[1:][-1:], f"val/{score}")
    summary["samples_per_second"] = samples_per_second(steps)
    return summary


def samples_per_second(steps: Metrics) -> float | None:
    """Return the samples trained after the first step, divided by the time from the first step to the last."""
    if len(steps) < 2:
        return None
    return round(sum(line["samples"] for line in steps[1:]) / (steps[-1]["time"] - steps[0]["time"]), 1)


def plot(folder: RunFolder, metrics: Metrics, steps: Metrics) -> None:
    """Write reward.png: the reward of each step, or the loss of demonstrations, and the held-out scores."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    name, key = ("reward", "reward_mean") if "reward_mean" in steps[0] else ("loss", "loss")
    axes.plot([m["step"] for m in steps], [m[key] for m in steps], linewidth=1, label=f"{name} (training)")
    for score in ("exact", "reward"):
        points = [(m["step"], m[f"val/{score}"]) for m in metrics if f"val/{score}" in m]
        if points:
            axes.plot(*zip(*points, strict=True), "o--", label=f"held-out {score}")
    axes.set(xlabel="step (policy version)", ylabel="mean per step", title=folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder.path / REWARD_FILE, dpi=120)
    pyplot.close(figure)


def print_report(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Print the table of first and last steps, and the folder with the results."""
    console = Console(markup=False, emoji=False)  # messages may contain [brackets]
    earlier = summary["steps"] - summary["steps_made"]
    title = f"{summary['name']}: {summary['steps_made']} steps in {summary['wall_seconds']:.0f} s"
    table = Table(title=title + (f", after {earlier} earlier ones" if earlier > 0 else ""))
    averaged = "step" if summary["steps_averaged"] == 1 else f"{summary['steps_averaged']} steps"
    for column in ("", f"first {averaged}", f"last {averaged}"):
        table.add_column(column)
    hidden = "reward" if summary["reward_first"] is None else "loss"  # a policy loss says little
    for name in AT_ENDS:
        key = name.replace(" ", "_")
        if name != hidden:
            table.add_row(name, *_cells([summary[f"{key}_first"], summary[f"{key}_last"]]))
    for score in ("exact", "reward"):
        ends = [summary[f"heldout_{score}_first"], summary[f"heldout_{score}"]]
        if ends[0] is not None:
            table.add_row(f"held-out {score}", *_cells(ends))
    console.print(table)
    if told := described_drops(summary["dropped"]):
        console.print(told, highlight=False, soft_wrap=True)
    rate = "-" if summary["samples_per_second"] is None else summary["samples_per_second"]
    console.print(f"{rate} samples/s; results, logs and checkpoints: {folder.path}", highlight=False, soft_wrap=True)


def described_drops(dropped: Mapping[str, int]) -> str:
    """Return how many samples were dropped, and why, for people; empty if none was."""
    if not dropped:
        return ""
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return f"dropped samples: {counts}; `nexrl logs RUN rollout-0` has the errors of those that failed"


def _cells(values: Iterable[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.3f}" for value in values]


def _mean(lines: Metrics, key: str) -> float | None:
    found = [line[key] for line in lines if key in line]
    return round(fmean(found), 4) if found else None
