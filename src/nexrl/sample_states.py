"""States of a sample in the ledger's counters."""

IN_FLIGHT = ("open", "leased", "grouping", "ready", "batched")
"""Granted, and neither trained nor dropped yet; in the order in which a sample passes these states."""
