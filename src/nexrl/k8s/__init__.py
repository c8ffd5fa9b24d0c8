"""The Kubernetes API for the operator and the command line, with plain mappings instead of generated models."""

from importlib.util import find_spec

from nexrl.errors import FailedPreconditionError

if find_spec("kubernetes") is None:
    raise FailedPreconditionError(
        "experiments on a cluster need the extra kubernetes of this package; in a checkout: "
        "pip install -e '.[kubernetes]'"
    )
