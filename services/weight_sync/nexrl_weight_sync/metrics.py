"""Prometheus metrics of weight sync."""

from prometheus_client import Counter, Gauge, Histogram

from nexrl.weights.metrics import POLICY_VERSION

PHASE_SECONDS = Histogram(
    "nexrl_weight_sync_seconds",
    "Time of one phase of a weight sync: prepare (waits included), transfer, verify, commit.",
    ["phase"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
WEIGHT_BYTES = Gauge("nexrl_weight_bytes", "Size of the newest weights that were offered.")
COMMITTED_VERSION = POLICY_VERSION.labels("committed")
DIGEST_MISMATCHES = Counter("nexrl_weight_digest_mismatch_total", "Replicas that held other bytes than were sent.")
ABORTED = Counter("nexrl_weight_sync_aborted_total", "Syncs that ended without a commit.", ["reason"])
