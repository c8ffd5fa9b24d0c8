"""The one metric that several processes report: each under its own role."""

from prometheus_client import Gauge

POLICY_VERSION = Gauge(
    "nexrl_policy_version", "Policy version, by role: committed, or what a replica serves; -1 for none.", ["role"]
)
