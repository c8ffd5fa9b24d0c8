"""The Kubernetes API, as far as the operator and the command line need it: plain mappings, no generated models."""
