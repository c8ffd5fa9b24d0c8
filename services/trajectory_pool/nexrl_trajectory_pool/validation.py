"""Metrics of a validation round."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from nexrl.v1 import trajectory_pb2 as pb


def validation_metrics(payloads: Sequence[bytes], failed: int) -> Mapping[str, float]:
    """Return the mean of the reward and of each component over the scored samples, as `val/<name>`, and their number.

    A component that only some samples report is averaged over those. Samples whose metadata has `data_source` are
    also reported by source, as `val/<source>/<name>`.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for payload in payloads:
        trajectory = pb.SampleResult.FromString(payload).trajectories[-1]
        source = trajectory.metadata.get("data_source")
        for prefix in ["val", f"val/{source}"] if source else ["val"]:
            for name, value in [("reward", trajectory.reward), *trajectory.reward_components.items()]:
                values[f"{prefix}/{name}"].append(value)
    means = {name: fmean(found) for name, found in values.items()}
    return means | {"val/num_samples": float(len(payloads)), "val/num_failed": float(failed)}
