"""Sockets that listen on one address of this machine, never on all that it has."""

from __future__ import annotations

import socket

import psutil

from hetopt.core.errors import RunFailed

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024


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
