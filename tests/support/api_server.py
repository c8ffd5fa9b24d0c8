"""A bare API server: etcd and kube-apiserver, without kubelet and controllers. Requires KUBEBUILDER_ASSETS."""

import datetime
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nexrl import parent_death
from nexrl.local.components import free_ports
from tests.support.patience import PatienceError, eventually_blocking


def assets() -> Path | None:
    """Return the folder of the binaries; None if a binary or openssl is missing."""
    given = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
    is_complete = all((given / name).exists() for name in ("kube-apiserver", "etcd"))
    return given if is_complete and shutil.which("openssl") else None


@contextmanager
def api_server(folder: Path) -> Iterator[Path]:
    """Run an API server with RBAC. Yields the path of its administrator's kubeconfig."""
    found = assets()
    assert found is not None
    etcd, peer, secure = free_ports(3)
    _certificates(folder)
    commands = [
        [
            *(str(found / "etcd"), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
            *(
                "--listen-client-urls",
                f"http://127.0.0.1:{etcd}",
                "--advertise-client-urls",
                f"http://127.0.0.1:{etcd}",
            ),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
        ],
        [
            *(str(found / "kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={secure}"),
            *("--bind-address=127.0.0.1", f"--cert-dir={folder}", "--service-cluster-ip-range=10.0.0.0/24"),
            *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount", "--allow-privileged"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--client-ca-file={folder}/ca.crt"),
            *(f"--service-account-key-file={folder}/sa.pub", f"--service-account-signing-key-file={folder}/sa.key"),
        ],
    ]
    processes = []
    try:
        for command in commands:
            # The servers end with this process: a killed test must leave none behind.
            bound = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]
            with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
                processes.append(subprocess.Popen(bound, stdout=log, stderr=log))
        kubeconfig = _kubeconfig(folder, secure)
        _wait(secure, processes, folder)
        yield kubeconfig
    finally:
        for process in processes:
            process.kill()  # its data is not needed any more, and SIGTERM would take 20 s
            process.wait()


def _certificates(folder: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None
    lines = (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=ca -days 2",
        "req -new -newkey rsa:2048 -nodes -keyout admin.key -out admin.csr -subj /O=system:masters/CN=admin",
        "x509 -req -in admin.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out admin.crt",
        "genrsa -out sa.key 2048",
        "rsa -in sa.key -pubout -out sa.pub",
    )
    for line in lines:
        subprocess.run([openssl, *line.split()], cwd=folder, check=True, capture_output=True)


def _kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{client-certificate: {folder}/admin.crt, client-key: {folder}/admin.key}}}}]
contexts: [{{name: test, context: {{cluster: test, user: admin, namespace: default}}}}]
current-context: test
"""
    )
    return path


def _wait(port: int, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    log = folder / "kube-apiserver.log"

    def is_ready() -> bool:
        assert all(process.poll() is None for process in processes), log.read_text()[-2000:]
        return _is_ready(port, context)

    try:
        eventually_blocking(is_ready, "kube-apiserver is ready")
    except PatienceError as error:
        error.add_note(log.read_text()[-2000:])
        raise


def _is_ready(port: int, context: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/readyz", context=context, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def rfc3339(moment: float) -> str:
    """Return a time in the format of the Kubernetes API."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
