"""Rollout service: leases tasks, produces samples with the policy, puts trajectories. Keeps no state: kill it at any
moment."""
