"""Certificates for tests: an authority in memory, and folders with the layout of a Secret's volume."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from nexrl.tls import Tls, experiment_name
from nexrl_operator.authority import Issued, issue, new_ca

OURS = experiment_name("team", "ours")
OTHERS = experiment_name("team", "others")


class Authority:
    """A certificate authority that writes the certificates it issues into folders."""

    def __init__(self) -> None:
        self.ca = new_ca()

    def write(self, folder: Path, name: str = OURS, *, names: Sequence[str] = (), days: float = 1) -> Tls:
        """Write a new certificate for `name` into `folder`. Replaces an existing certificate."""
        return write(folder, self.ca, issue(self.ca, names, name, days=days), name)


def write(folder: Path, ca: Issued, issued: Issued, name: str = OURS) -> Tls:
    """Write the certificate's files into `folder`, all at once as the kubelet does. Returns their paths."""
    folder.mkdir(exist_ok=True, parents=True)
    version = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    (version / "new").symlink_to(version.name)
    files = {"ca.crt": ca.certificate, "tls.crt": issued.certificate, "tls.key": issued.key}
    for file, content in files.items():
        (version / file).write_bytes(content)
        if not (folder / file).is_symlink():
            (folder / file).symlink_to(f"..data/{file}")
    (version / "new").replace(folder / "..data")
    return Tls(folder / "ca.crt", name, folder / "tls.crt", folder / "tls.key")


def environment(tls: Tls) -> dict[str, str]:
    """Return the environment variables for these TLS settings."""
    values = {"NEXRL_TLS_CERT": tls.certificate, "NEXRL_TLS_KEY": tls.key, "NEXRL_TLS_CA": tls.ca}
    files = {**values, "NEXRL_TOKEN_FILE": tls.token}
    return {"NEXRL_TLS_NAME": tls.name, **{name: str(path) for name, path in files.items() if path}}
