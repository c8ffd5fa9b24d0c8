"""Prometheus metrics of the rollout service."""

from prometheus_client import Counter, Gauge, Histogram

SAMPLES = Counter("nexrl_rollout_samples_total", "Samples put, by purpose and verdict.", ["purpose", "verdict"])
TOKENS = Counter("nexrl_rollout_completion_tokens_total", "Tokens that the policy generated in samples put.")
IN_FLIGHT = Gauge("nexrl_rollout_samples_in_flight", "Samples being produced.")
ROLLOUT_SECONDS = Histogram(
    "nexrl_rollout_seconds",
    "Time from a lease to its results.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
LEASES_LOST = Counter("nexrl_rollout_leases_lost_total", "Samples whose lease was lost while they were being produced.")
CONTIGUITY_VIOLATIONS = Counter(
    "nexrl_rollout_contiguity_violations_total", "Requests whose history was not what the session had been served."
)
