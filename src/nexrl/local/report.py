"""What a run leaves for people: summary.json, reward.png, and the table of before and after."""

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
from nexrl.spec import Experiment

ENDS_STEPS = 10
"""Steps averaged for 'before' and 'after': one batch alone is noisy."""
SUMMARY_FILE = "summary.json"
AT_ENDS = {"reward": "reward_mean", "entropy": "entropy", "degenerate groups": "zero_variance_group_fraction"}

Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Ending:
    """How one start of a run ended."""

    phase: str
    """As in nexrl.v1.Phase, as 'Succeeded'; 'Interrupted' by Ctrl-C or SIGTERM."""
    reason: str
    message: str
    exit_code: int


def write_report(
    folder: RunFolder, experiment: Experiment, children: Sequence[Child], wall_seconds: float, ending: Ending
) -> None:
    """Write the summary and the picture, and print before and after."""
    metrics = folder.metrics()
    steps = [line for line in metrics if "reward_mean" in line]
    began = time.time() - wall_seconds
    made = [line for line in steps if line["time"] >= began]  # a run that goes on has steps from before its pause
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
    """Steps made, reward and the like at both ends, held-out scores, samples per second."""
    held_out = [line for line in metrics if "val/num_samples" in line]
    summary: dict[str, Any] = {"steps": int(steps[-1]["step"]) if steps else 0}
    for name, key in AT_ENDS.items():
        summary[f"{name.replace(' ', '_')}_first"] = _mean(steps[:ENDS_STEPS], key)
        summary[f"{name.replace(' ', '_')}_last"] = _mean(steps[-ENDS_STEPS:], key)
    for score in ("exact", "reward"):
        summary[f"heldout_{score}_first"] = _mean(held_out[:1], f"val/{score}")
        summary[f"heldout_{score}"] = _mean(held_out[1:][-1:], f"val/{score}")
    summary["samples_per_second"] = samples_per_second(steps)
    return summary


def samples_per_second(steps: Metrics) -> float | None:
    """Samples trained after the first step, by the time between the first step's end and the last one's."""
    if len(steps) < 2:
        return None
    return round(sum(line["samples"] for line in steps[1:]) / (steps[-1]["time"] - steps[0]["time"]), 1)


def plot(folder: RunFolder, metrics: Metrics, steps: Metrics) -> None:
    """reward.png: reward of each step, and held-out scores where they were measured."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([m["step"] for m in steps], [m["reward_mean"] for m in steps], linewidth=1, label="reward (training)")
    for score in ("exact", "reward"):
        points = [(m["step"], m[f"val/{score}"]) for m in metrics if f"val/{score}" in m]
        if points:
            axes.plot(*zip(*points, strict=True), "o--", label=f"held-out {score}")
    axes.set(xlabel="step (policy version)", ylabel="mean per step", title=folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder.path / "reward.png", dpi=120)
    pyplot.close(figure)


def print_report(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """The table of before and after, and where everything is."""
    console = Console()
    earlier = summary["steps"] - summary["steps_made"]
    title = f"{summary['name']}: {summary['steps_made']} steps in {summary['wall_seconds']:.0f} s"
    table = Table(title=title + (f", after {earlier} earlier ones" if earlier > 0 else ""))
    for column in ("", f"first {ENDS_STEPS} steps", f"last {ENDS_STEPS} steps"):
        table.add_column(column)
    for name in AT_ENDS:
        key = name.replace(" ", "_")
        table.add_row(name, *_cells([summary[f"{key}_first"], summary[f"{key}_last"]]))
    for score in ("exact", "reward"):
        ends = [summary[f"heldout_{score}_first"], summary[f"heldout_{score}"]]
        if ends[0] is not None:
            table.add_row(f"held-out {score}", *_cells(ends))
    console.print(table)
    rate = "-" if summary["samples_per_second"] is None else summary["samples_per_second"]
    console.print(f"{rate} samples/s; results, logs and checkpoints: {folder.path}", highlight=False, soft_wrap=True)


def _cells(values: Iterable[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.3f}" for value in values]


def _mean(lines: Metrics, key: str) -> float | None:
    found = [line[key] for line in lines if key in line]
    return round(fmean(found), 4) if found else None
