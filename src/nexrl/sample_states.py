"""Names of what becomes of a sample: its states in the ledger's counters, and a worker's attempt at it."""

IN_FLIGHT = ("open", "leased", "grouping", "ready", "batched")
"""Granted, and neither trained nor dropped yet; in the order in which a sample passes these states."""

ATTEMPT = "rollout"
"""The activity of a worker that attempts samples. Its waits are activities of their own, within it."""
