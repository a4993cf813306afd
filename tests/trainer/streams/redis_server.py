"""A real Redis on a port of its own, with its files in a folder of its own; can be killed, and started again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks._ports import own_port

PROGRAM = shutil.which("redis-server")
MISSING = "needs a Redis server: apt-get install redis-server"

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
"""What was answered is on disk: nothing that a writer or a run was told is lost with the server."""


class RedisServer:
    """Args:
    folder: for its files; created.
    options: beyond the port and the folder, as on the command line.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address, self.port = own_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://{self.address}:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        assert PROGRAM is not None, MISSING
        command = [PROGRAM, "--port", str(self.port), "--bind", self.address, "--dir", str(self._folder), "--save", ""]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        until_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError((self._folder / "redis.log").read_text()[-500:])
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, if it still lives."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
