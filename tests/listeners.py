"""Who listens where: every process of a launcher is looked at while it runs, in whatever network namespace it is."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_LISTENS = "0A"  # <net/tcp_states.h>


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of each TCP socket that a process listens with."""
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(entry)
                if name.startswith("socket:["):
                    inodes.add(name[8:-1])
    found = set()
    for table, family, words in (("tcp", socket.AF_INET, 1), ("tcp6", socket.AF_INET6, 4)):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in inodes:
                    raw, port = fields[1].split(":")
                    packed = b"".join(bytes.fromhex(raw[8 * n : 8 * n + 8])[::-1] for n in range(words))
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


class Listeners:
    """All that processes were seen to listen on, with the command that did."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], str] = {}

    @property
    def addresses(self) -> set[str]:
        return {address for address, _ in self.seen}

    def outside_of(self, *allowed: str) -> dict[tuple[str, int], str]:
        """Those on any other address."""
        return {where: who for where, who in self.seen.items() if not where[0].startswith(allowed)}

    def assert_all_on_loopback(self) -> None:
        assert self.seen, "nothing was seen to listen, so nothing was tested"
        assert not self.outside_of("127."), "another machine could reach these"

    def look(self, root: int) -> None:
        with suppress(psutil.Error):
            first = psutil.Process(root)
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.Error):
                    for where in listening(process.pid) - self.seen.keys():
                        self.seen[where] = " ".join(process.cmdline())[:200]


@contextmanager
def watched(root: int, every_s: float = 0.2) -> Iterator[Listeners]:
    """Look at a process and all that it has started, until the block ends and once more at its end.

    The last look makes sure that what still listens when the block ends is seen, however slow the looking thread was.
    What this process itself listened on before is not counted.
    """
    listeners, over = Listeners(), threading.Event()
    before = listening(os.getpid()) if root == os.getpid() else set()

    def look() -> None:
        while not over.wait(every_s):
            listeners.look(root)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield listeners
    finally:
        over.set()
        thread.join()
        listeners.look(root)
        for where in before:
            listeners.seen.pop(where, None)
