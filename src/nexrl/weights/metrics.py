"""The gauge of the policy version, which several processes report under their role."""

from prometheus_client import Gauge

POLICY_VERSION = Gauge(
    "nexrl_policy_version", "Policy version by role: committed, or served by a replica; -1 for none.", ["role"]
)
