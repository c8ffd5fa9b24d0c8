"""The address and the network interface by which this process reaches another: Gloo listens at an interface."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from nexrl.errors import FailedPreconditionError, UnavailableError

REACH_SECONDS = 30.0
_SIOCGIFADDR = 0x8915
"""ioctl of Linux: the IPv4 address of an interface (netdevice(7))."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def local_address(host: str, port: int) -> str:
    """Return the address of this machine in a connection to host:port. Raises UnavailableError without one."""
    try:
        with socket.create_connection((host, port), REACH_SECONDS) as connection:
            address: str = connection.getsockname()[0]
            return address
    except OSError as error:
        raise UnavailableError(f"trainer: cannot reach the ranks' store at {host}:{port}: {error}") from None


def interface_of(address: str) -> str:
    """Return the name of the interface with this IP address. Raises FailedPreconditionError if there is none."""
    wanted = ipaddress.ip_address(address)
    for name, found in _addresses():
        if found == wanted:
            return name
    raise FailedPreconditionError(
        f"NEXRL_ADVERTISE: no network interface has the address {address}; use the first address of an interface"
    )


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            yield name, ipaddress.IPv4Address(answer[20:24])
    if _IPV6_ADDRESSES.exists():
        for address, *_, name in map(str.split, _IPV6_ADDRESSES.read_text().splitlines()):
            yield name, ipaddress.IPv6Address(int(address, 16))
