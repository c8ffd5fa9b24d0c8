"""The operator: runs experiments on a Kubernetes cluster, as `nexrl run` runs them on one machine."""
