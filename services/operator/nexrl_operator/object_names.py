"""Checks that the names of the objects that an experiment needs are free or its own."""

from collections.abc import Sequence

from nexrl.errors import FailedPreconditionError, UnavailableError
from nexrl.k8s.api import CERTIFICATE, EXPERIMENT, KINDS, SECRET, Api
from nexrl_operator.api_objects import is_deleted, owner_uid
from nexrl_operator.objects import Object
from nexrl_operator.observed import Observed


class NameTakenError(FailedPreconditionError):
    """An object that the experiment needs exists, and belongs to someone else."""


async def require_free_names(api: Api, observed: Observed, items: Sequence[Object]) -> None:
    """Check the names of objects that are about to be applied.

    Raises NameTakenError for the object of another owner, UnavailableError while one of a deleted experiment of this
    name is left.
    """
    metadata = observed.resource["metadata"]
    for item in items:
        if observed.has(item):
            continue  # its own: `observed` contains no other objects
        kind, name = KINDS[item["kind"]], item["metadata"]["name"]
        found = await api.get(kind, metadata["namespace"], name)
        if found is None and kind is CERTIFICATE:  # cert-manager would overwrite the Secret
            await _require_own_secret(api, item)
        if found is None or owner_uid(found) == metadata["uid"]:
            continue
        if is_deleted(found) or _is_of_predecessor(found, metadata["name"]):
            raise UnavailableError(f"{kind.kind} {name}: belongs to a deleted experiment of this name; waiting")
        raise NameTakenError(f"{kind.kind} {name} exists and is not of this experiment: delete or rename one")


async def _require_own_secret(api: Api, certificate: Object) -> None:
    metadata, name = certificate["metadata"], certificate["spec"]["secretName"]
    found = await api.get(SECRET, metadata["namespace"], name)
    made_for = (found or {}).get("metadata", {}).get("annotations", {}).get("cert-manager.io/certificate-name")
    if found is not None and made_for != metadata["name"]:
        raise NameTakenError(f"Secret {name} exists and is not of this experiment: delete or rename one")


def _is_of_predecessor(item: Object, name: str) -> bool:
    """Return whether an experiment of this name controls the object."""
    owners = item["metadata"].get("ownerReferences", [])
    return any((owner["kind"], owner["name"]) == (EXPERIMENT.kind, name) for owner in owners if owner.get("controller"))
