"""One replica of the policy. Each folder in this package is an inference backend."""
