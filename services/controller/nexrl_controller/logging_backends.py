"""Sends the metrics of an experiment to a file, to Prometheus and to Weights & Biases.

The launcher draws the live view on the console from WatchExperiment.
"""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Gauge

from nexrl.errors import InvalidArgumentError
from nexrl.metrics_file import MetricsFile
from nexrl.run_layout import METRICS_FILE
from nexrl.spec import Experiment

PROMETHEUS_NAMES = frozenset(
    {
        "advantage_std",
        "entropy",
        "grad_norm",
        "loss",
        "lr",
        "mismatch_kl",
        "response_tokens",
        "reward_mean",
        "staleness_steps",
        "truncated_fraction",
        "val/reward",
        "zero_variance_group_fraction",
    }
)
"""Metrics that Prometheus gets. The list is fixed: names that users choose would create labels without limit."""

METRIC = Gauge("nexrl_metric", "Newest value of a training metric.", ["name"])


class LoggingBackend(Protocol):
    """Records the metrics of an experiment."""

    def post(self, step: int, unix_seconds: float, metrics: Mapping[str, float]) -> None:
        """Record metrics that were measured after `step` optimizer steps."""

    def close(self) -> None:
        """Write what has not been written yet."""


def open_backends(experiment: Experiment, run_dir: Path) -> list[LoggingBackend]:
    """Open the backends of the experiment. Raises InvalidArgumentError if the package of one is not installed."""
    backends: list[LoggingBackend] = [PrometheusBackend()]
    if "jsonl" in experiment.spec.logger.backends:
        backends.append(MetricsFile(run_dir / METRICS_FILE))
    if "wandb" in experiment.spec.logger.backends:
        backends.append(WandbBackend(experiment.spec.project, experiment.metadata.name, run_dir))
    return backends


class PrometheusBackend:
    """Sets the gauge nexrl_metric{name} for the names in PROMETHEUS_NAMES."""

    def post(self, step: int, unix_seconds: float, metrics: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name in PROMETHEUS_NAMES & metrics.keys():
            METRIC.labels(name).set(metrics[name])

    def close(self) -> None:
        """Nothing to do."""


class WandbBackend:
    """A Weights & Biases run that a restarted controller continues. WANDB_MODE=offline works as with any run."""

    def __init__(self, project: str, experiment: str, run_dir: Path) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise InvalidArgumentError(
                "logger.backends: wandb is not installed; run `pip install wandb`, or remove wandb from the list"
            ) from None
        self._run = wandb.init(project=project, name=experiment, id=experiment, resume="allow", dir=os.fspath(run_dir))
        # W&B drops metrics with an older step than the newest. With the step as a metric, it keeps those of a step that
        # the trainer replays.
        self._run.define_metric("*", step_metric="step")

    def post(self, step: int, unix_seconds: float, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
