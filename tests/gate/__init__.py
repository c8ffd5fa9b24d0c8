"""The gate: everything that a change must pass, in parts: `make gate`. And what is too long for it: `make soak`."""
