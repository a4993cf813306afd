"""What a program on a host says, line by line, with whatever its shell prints beside that told apart."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from hetopt.backends.ssh.edge import MARK, NO_PYTHON, UNREACHED, let_go, start, why_unreached
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.hosts import Host
from hetopt.core.plain_text import one_line

OLDEST_PYTHON = (3, 11)
"""That training runs with; `tests/packaging` holds it to pyproject.toml."""

_MOST_LINE = 1_000_000
_END_S = 5.0


def checked_python(host: Host, said: str) -> tuple[int, ...]:
    """The version of a host's interpreter, by the first thing that it says.

    Raises:
        RunFailed: there is none, or it is too old.
    """
    if said == NO_PYTHON:
        raise RunFailed(
            f"{host.name} has no {host.python}.",
            hint='install Python there, or name an interpreter: python = "~/venv/bin/python"',
        )
    version = tuple(int(part) for part in said.split(".") if part.isdigit())
    if version < OLDEST_PYTHON:
        least = ".".join(map(str, OLDEST_PYTHON))
        raise RunFailed(
            f"{host.name} has Python {said} as {host.python}, and training needs {least} or newer.",
            hint='name another interpreter there: python = "~/venv/bin/python"',
        )
    return version


@dataclass(kw_only=True)
class Conversation:
    """One program on one host.

    Attributes:
        host: which.
        banner: what its shell printed of its own, if anything.
        asked_s: when the program was started here, seconds since the epoch.
        python: of its interpreter.
    """

    host: Host
    source: str
    banner: str = ""
    asked_s: float = 0.0
    python: tuple[int, ...] = ()
    _said: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _complaints: list[bytes] = field(default_factory=list)
    _printed: list[str] = field(default_factory=list)
    _silent: threading.Event = field(default_factory=threading.Event)
    _process: subprocess.Popen[bytes] | None = None

    def begin(self, question: object, patience_s: float) -> Any:
        """Start the program, hand it what it asks for first, and hear its first answer.

        Raises:
            HetoptError: the host is not reached, or has no Python that can run the program.
        """
        self.asked_s = time.time()
        process = self._process = start(self.host, self.source)
        assert process.stdout is not None
        assert process.stderr is not None
        threading.Thread(target=self._hear, args=(process.stdout,), daemon=True).start()
        threading.Thread(target=self._hear_complaints, args=(process.stderr,), daemon=True).start()
        version = self._next(time.monotonic() + patience_s)
        self.python = checked_python(self.host, version)
        return self.ask(question, patience_s)

    def ask(self, question: object, patience_s: float) -> Any:
        """Hand the program a line, and hear what it says to that.

        Raises:
            HetoptError: it ended, or says nothing in time.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it may have ended, which what it says next tells
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        text = self._next(time.monotonic() + patience_s)
        try:
            return json.loads(text)
        except ValueError:
            raise RunFailed(f"{self.host.name} says what cannot be read: {one_line(text)[:80]!r}.") from None

    def end(self) -> None:
        """Let go of the host."""
        if self._process is not None:
            let_go(self._process, _END_S)

    def _next(self, deadline: float) -> str:
        try:
            line = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RunFailed(
                f"{self.host.name} has begun to answer and says nothing more.", hint="see whether it is overloaded"
            ) from None
        if line is None:
            raise self._why_ended()
        return line

    def _why_ended(self) -> HetoptError:
        assert self._process is not None
        code = self._process.wait()
        self._silent.wait(_END_S)
        complaint = b"".join(self._complaints).decode(errors="replace")
        if code == UNREACHED or re.search("password", complaint, re.IGNORECASE):
            return why_unreached(self.host, complaint)
        # A shell that lets nobody in says so where others greet: nologin, for one.
        said = complaint.strip().splitlines() or self._printed or [f"it ends with {code} and says nothing"]
        return RunFailed(
            f"{self.host.name} cannot run a program ({one_line(said[-1])[:200].rstrip('.')}).",
            hint='see that its shell runs one, or name another interpreter there: python = "~/venv/bin/python"',
        )

    def _hear(self, stream: IO[bytes]) -> None:
        """Tell what the program says from what its shell prints before."""
        before = self._printed
        with stream:
            for data in iter(lambda: stream.readline(_MOST_LINE), b""):
                line = data.decode(errors="replace").rstrip("\n")
                if line.startswith(MARK):
                    self.banner = self.banner or " ".join(before)[:200]
                    self._said.put(line.removeprefix(MARK))
                    before.clear()
                elif line.strip() and not self.python:
                    before.append(one_line(line.strip()))
        self._said.put(None)

    def _hear_complaints(self, stream: IO[bytes]) -> None:
        with stream:
            for data in iter(lambda: stream.readline(_MOST_LINE), b""):
                if sum(map(len, self._complaints)) < _MOST_LINE:
                    self._complaints.append(data)
        self._silent.set()
