"""The trainer: turns leased trajectories into optimizer updates and published policy versions."""
