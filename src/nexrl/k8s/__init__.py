"""The Kubernetes API, as far as the operator and the command line need it: plain mappings, no generated models."""

from importlib.util import find_spec

from nexrl.errors import FailedPreconditionError

if find_spec("kubernetes") is None:
    raise FailedPreconditionError("experiments on a cluster need more packages: pip install 'nexrl[kubernetes]'")
