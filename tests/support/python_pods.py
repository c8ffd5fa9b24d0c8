"""Pods of a test that run Python, in the operator's image and under its restrictions."""

from tests.support.cluster import Namespace, Object


def python_pod(namespace: Namespace, release: str, name: str, labels: dict[str, str], *arguments: str) -> Object:
    """Return a pod that runs `python` with these arguments, and is not restarted."""
    operator = namespace.get("deployment", f"{release}-operator")["spec"]["template"]["spec"]
    container = operator["containers"][0]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": operator["securityContext"],
            "containers": [
                {
                    "name": "python",
                    "image": container["image"],
                    "imagePullPolicy": container["imagePullPolicy"],
                    "command": ["python", *arguments],
                    "securityContext": container["securityContext"],
                }
            ],
        },
    }
