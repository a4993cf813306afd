"""Free ports for servers that are told theirs before they listen, which no other process takes meanwhile.

All of 127.0.0.0/8 is this machine on Linux: an address there by the process's own number shares its ports with nobody.
"""

from __future__ import annotations

import os
import socket
import sys


def own_port() -> tuple[str, int]:
    """Return an address of this process alone, and a free port there."""
    number = os.getpid()
    address = "127.0.0.1"
    if sys.platform == "linux":
        address = f"127.{64 + (number >> 16) % 64}.{number >> 8 & 255}.{number & 255}"
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])
