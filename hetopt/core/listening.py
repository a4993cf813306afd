"""Sockets that listen on one address of this machine, never on all that it has, and who may connect to them."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import psutil

from hetopt.core.errors import RunFailed

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024
_TCP_MD5SIG_EXT, _EVERY_PEER = 32, 1  # <linux/tcp.h>: a key for all peers whose first 0 bits are alike
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"  # ::ffff:0:0/96 as /proc/net/tcp6 writes it


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address of this machine.

    Args:
        address: of this machine, as a number or a name.
        port: 0: any that is free.

    Raises:
        RunFailed: this machine does not have that address, or something else has the port.
    """
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RunFailed(
            f"the address must be an IP address, got {address!r}: {error.strerror}.", hint="for example 127.0.0.1"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RunFailed(
            f"nothing can listen on {address} port {port} of this machine: {error.strerror}.",
            hint="give an address that this machine has, and a port that is free",
        ) from None
    return listener


def is_loopback(address: str) -> bool:
    """Whether an address, or the first that a name stands for, reaches this machine alone."""
    try:
        found = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return False
    return found.startswith("127.") or found == "::1"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the socket at the other end of an accepted loopback connection belongs to this process's user.

    The kernel's tables name the owner of every socket; one that its process has closed has no inode and no owner. While
    our end is connected, no other socket can have the addresses of the other end: they are asked for again after the
    tables were read, so that the row is that of the one who connected.
    """
    try:
        ends = connection.getpeername(), connection.getsockname()
        tables = [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        connection.getpeername()
    except OSError:
        return False
    peer, here = (_as_listed(connection.family, *end[:2]) for end in ends)
    for row in (line.split() for table in tables for line in table.splitlines()[1:]):
        if [end.removeprefix(_IPV4_IN_IPV6) for end in row[1:3]] == [peer, here]:
            return int(row[7]) == os.geteuid() and row[9] != "0"
    return False


def _as_listed(family: int, address: str, port: int) -> str:
    packed = socket.inet_pton(family, address)
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{port:04X}"


def require_signatures(endpoint: socket.socket, key: bytes) -> bool:
    """Have the kernel drop every TCP segment that is not signed with a key (RFC 2385); false where it cannot.

    Args:
        endpoint: an IPv4 socket that neither listens nor is connected yet; both ends of a connection need the same key.
        key: at most 80 bytes.
    """
    told = struct.pack("@H126xBBHi80s", socket.AF_INET, _EVERY_PEER, 0, len(key), 0, key)
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, told)
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has an address; None: no interface has it."""
    wanted = LOOPBACK if address.startswith("127.") else address  # it has all of them, and is listed with one
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == wanted for one in addresses):
            return name
    return None


def collectives_on(address: str) -> dict[str, str]:
    """The environment by which gloo and NCCL listen on the interface that has an address.

    Raises:
        RunFailed: this machine has no such address.
    """
    name = interface_of(address)
    if name is None:
        raise RunFailed(
            f"this machine has no network interface with the address {address}.",
            hint="name the address by which the other machines reach this one",
        )
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
