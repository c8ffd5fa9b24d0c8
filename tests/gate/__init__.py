"""The gate: everything that a change must pass, in parts, in at most 35 minutes. `make gate`."""
