"""Which addresses a run's processes listen on, never all that a machine has, and the secret that its hosts share."""

from __future__ import annotations

import re
import secrets
import socket

import psutil

from hetopt.core.errors import BadInput, RunFailed

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether a host name's first address, or an address, is loopback; False also if it does not resolve."""
    try:
        ip_address = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return False
    return ip_address.startswith("127.") or ip_address == "::1"


def collectives_on(address: str) -> dict[str, str]:
    """Return the environment variables that bind gloo and NCCL to the network interface with IP ``address``.

    Any loopback address means 127.0.0.1.

    Raises:
        RunFailed: no network interface of this machine has that address.
    """
    wanted = LOOPBACK if address.startswith("127.") else address  # the interface has all of them, and lists one
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == wanted for entry in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    raise RunFailed(
        f"this machine has no network interface with the address {address}.",
        hint="name the address by which the other machines reach this one",
    )


SECRET_VARIABLE = "HETOPT_GROUP_SECRET"
"""Environment variable with the run's secret, of the process that hosts workers; not in theirs."""

SECRET_PATTERN = r"[0-9a-f]{64}"


def new_secret() -> str:
    """Return a new random secret for the hosts of one run, 64 hexadecimal digits."""
    return secrets.token_hex(32)


def checked_secret(secret: str | None) -> bytes:
    """Return a run's secret as 32 bytes.

    Args:
        secret: 64 hexadecimal digits in lower case; None: the variable is not set, which is refused.

    Raises:
        BadInput: the secret is None or not 64 such digits.
    """
    if secret is None or not re.fullmatch(SECRET_PATTERN, secret):
        raise BadInput(
            f"{SECRET_VARIABLE} must be 64 hexadecimal digits, the same on all machines of the run.",
            hint=f"for example {SECRET_VARIABLE}=$(openssl rand -hex 32), once, and copied to all",
        )
    return bytes.fromhex(secret)
