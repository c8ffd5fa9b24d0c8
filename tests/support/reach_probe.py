"""What a process in a container can reach: connections, secrets, files, processes, rights in the cluster.

Runs inside the pods of a cluster, so it needs only the standard library. Where code of a user runs, it is imported as a
module of `spec.code`, and answers from within that process, on a socket in /tmp.
"""

import base64
import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONNECT_SECONDS = 3.0
MAX_FILE_BYTES = 1_000_000
USER_CODE = "/tmp/reach-probe.sock"
"""Exists in containers that have imported code of the user."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NOT_FILES = ("/proc", "/sys", "/dev/pts", "/dev/mqueue")


def probe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this process reaches.

    `asked` has `addresses`, as host:port; `secrets`, lists in base64 by name; `others`, the services of `nexrl serve`
    in other containers.
    """
    others = dict(processes_of(asked["others"]))
    return {
        "open": connections(asked["addresses"]),
        "secrets": sorted(found_secrets(asked["secrets"])),
        "writes": sorted(filter(is_writable, {*mounts(), "/"})),
        "user": os.getuid(),
        "capabilities": int(status("CapEff"), 16) | int(status("CapBnd"), 16),
        "may_gain_rights": status("NoNewPrivs") != "1",
        "rights": sorted(rights()),
        "sees": sorted(set(others.values())),
        "reads_environment_of": sorted({service for pid, service in others.items() if environment(pid)}),
        "may_end": sorted({service for pid, service in others.items() if may_end(pid)}),
    }


def connections(addresses: list[str]) -> list[str]:
    """Return the addresses, each host:port, to which a connection opens."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return [address for address, opens in zip(addresses, pool.map(is_open, addresses), strict=True) if opens]


def is_open(address: str) -> bool:
    """Return whether a connection opens within CONNECT_SECONDS."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def found_secrets(secrets: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the names of which a secret is in an environment of the pod, or in a file of a volume."""
    texts = [environment(pid) for pid in pids()]
    texts += [content(path) for folder in mounts() for path in files(Path(folder))]
    for name, encoded in secrets.items():
        if any(base64.b64decode(secret) in text for secret in encoded for text in texts):
            yield name


def pids() -> list[int]:
    """Return the processes that this one sees."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def environment(pid: int) -> bytes:
    """Return the environment of a process; b"" if this one may not read it."""
    return content(Path(f"/proc/{pid}/environ"))


def content(path: Path) -> bytes:
    """Return what is in a file; b"" if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def mounts() -> set[str]:
    """Return where volumes are mounted: all but the root, and what the kernel makes."""
    found = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return {path for path in found if path != "/" and not path.startswith(NOT_FILES)}


def files(folder: Path) -> Iterator[Path]:
    """Yield the small files in a folder, or the file itself."""
    for path in (folder, *folder.rglob("*")):
        try:
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                yield path
        except OSError:
            continue


def is_writable(mount: str) -> bool:
    """Return whether this process can write a file, or create one in a folder."""
    try:
        if Path(mount).is_file():
            Path(mount).open("ab").close()
        else:
            tempfile.TemporaryFile(dir=mount).close()
    except OSError:
        return False
    return True


def status(field: str) -> str:
    """Return a field of this process in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(field))


def rights() -> set[str]:
    """Return the resources that the token of the ServiceAccount may touch, besides reviews of its own rights."""
    if not (token := content(ACCOUNT / "token").decode()):
        return set()
    host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": content(ACCOUNT / "namespace").decode()},
    }
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
        rules = json.load(answer)["status"]["resourceRules"]
    return {name for rule in rules for name in rule["resources"] if not name.startswith("selfsubject")}


def processes_of(services: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the processes of these services that this one sees, each with its service."""
    for pid in pids():
        words = content(Path(f"/proc/{pid}/cmdline")).decode(errors="replace").split("\0")
        if "serve" in words and (found := {*words} & {*services}):
            yield pid, found.pop()


def may_end(pid: int) -> bool:
    """Return whether this process may send signals to another."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True


def answer_as_user_code() -> None:
    """Answer `probe` on USER_CODE from a thread of this process, which has imported this module as code of the user."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(USER_CODE)
    except OSError:
        return  # another process of this container, or a container that was restarted
    server.listen()
    threading.Thread(target=_answer, args=(server,), daemon=True).start()


def _answer(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as stream:
            stream.write(json.dumps(probe(json.loads(stream.readline()))))


def _from_user_code(asked: Mapping[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(USER_CODE)
        with client.makefile("rw") as stream:
            stream.write(json.dumps(asked) + "\n")
            stream.flush()
            return json.loads(stream.read())


def main() -> None:
    """Print the answer to the question on stdin: that of user code where it runs, else that of this process."""
    asked = json.load(sys.stdin)
    is_user_code = Path(USER_CODE).exists()
    found = _from_user_code(asked) if is_user_code else probe(asked)
    json.dump(found | {"is_user_code": is_user_code}, sys.stdout)


if __name__ == "__main__":
    main()
