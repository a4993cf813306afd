"""What a program on a host says, line by line, with whatever its shell prints beside that told apart."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hetopt.backends.ssh.edge import MARK, NO_PYTHON, UNREACHED, Program, let_go, say, start, why_unreached
from hetopt.core.artifact import AnyRecord, read_words
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.hosts import Host
from hetopt.core.paths import shown
from hetopt.core.plain_text import one_line

OLDEST_PYTHON = (3, 11)
"""That training runs with."""

_MOST_BYTES = 4_000_000
"""Of a program's words, of its shell's and of complaints: 64 GPUs and what earlier runs left take some thousands."""


def words_of(stream: IO[bytes], printed: Callable[[str], None]) -> Iterator[str]:
    """Yield each line that a program says, up to some megabytes.

    Args:
        stream: of its standard output.
        printed: takes each line that its shell prints beside.
    """
    left = _MOST_BYTES
    while left > 0 and (data := stream.readline(left)):
        left -= len(data)
        line = data.decode(errors="replace")
        if line.startswith(MARK):
            yield line.removeprefix(MARK).rstrip("\n")
        elif line.strip():
            printed(one_line(line))


def check_version(said: str, host: Host) -> None:
    """Refuse a host by the version of its interpreter, which is the first thing that it says.

    Raises:
        RunFailed: there is none, or it is too old.
    """
    hint = 'name another interpreter there: python = "~/venv/bin/python"'
    if said == NO_PYTHON:
        raise RunFailed(f"{host.name} has no {host.python}.", hint=f"install Python there, or {hint}")
    version = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", said)
    if version is None:
        raise RunFailed(f"{host.name} calls its Python {shown(said)}, which is no version.", hint=hint)
    if (int(version[1]), int(version[2])) < OLDEST_PYTHON:
        least = ".".join(map(str, OLDEST_PYTHON))
        raise RunFailed(
            f"{host.name} has Python {said} as {host.python}, and training needs {least} or newer.", hint=hint
        )


@dataclass(kw_only=True)
class Conversation:
    """One program on one host.

    Attributes:
        host: which.
        source: of the program.
        errors: the file that gets what it complains of, as far as that is read; None: none.
        asked_s: when the program was started here, seconds since the epoch.
        end_s: how long the program may take to end once it is let go.
    """

    host: Host
    source: str
    errors: Path | None = None
    asked_s: float = 0.0
    end_s: float = 5.0
    _complaints: bytearray = field(default_factory=bytearray)
    _printed: list[str] = field(default_factory=list)
    _silent: threading.Event = field(default_factory=threading.Event)
    _program: Program | None = None

    @property
    def program(self) -> Program:
        """The program, once it was begun."""
        assert self._program is not None
        return self._program

    def begin(self, question: bytes, kind: type[AnyRecord], patience_s: float) -> AnyRecord:
        """Start the program, hand it what it asks for first, and hear its first answer.

        Args:
            question: for the program, as it reads it.
            kind: of the answer.
            patience_s: for each of both.

        Raises:
            HetoptError: the host is not reached, has no Python that can run the program, or says what cannot be.
        """
        self.asked_s = time.time()
        if self.errors is not None:
            self.errors.parent.mkdir(parents=True, exist_ok=True)
        program = self._program = start(self.host, self.source)
        self._words = words_of(program.stdout, self._printed.append)
        threading.Thread(target=self._hear_complaints, args=(program.ssh.stderr,), daemon=True).start()
        check_version(self._next(b"", patience_s), self.host)
        return self.ask(question, kind, patience_s)

    def ask(self, question: bytes, kind: type[AnyRecord], patience_s: float) -> AnyRecord:
        """Hand the program a question, and hear what it says to that.

        Raises:
            HetoptError: it ended, says nothing in time, or says what cannot be.
        """
        return read_words(kind, self._next(question, patience_s), self.host.name)

    def end(self) -> None:
        """Let go of the host, of which nothing more is heard."""
        if self._program is not None:
            let_go(self._program, self.end_s)
            self._program.stdout.close()

    def cut(self) -> None:
        """End the connection at once: the host does not answer any more."""
        if self._program is not None:
            self._program.ssh.kill()

    def _next(self, question: bytes, patience_s: float) -> str:
        """Return the next thing that the program says; one that says nothing in time is cut off."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.cut()

        timer = threading.Timer(patience_s, give_up)
        timer.start()
        try:
            say(self.program, question)
            word = next(self._words, None)
        finally:
            timer.cancel()
        if word is None:
            raise self._why_ended(is_late=late.is_set())
        self._printed.clear()
        return word

    def _why_ended(self, *, is_late: bool) -> HetoptError:
        code = let_go(self.program, self.end_s)
        self._silent.wait(self.end_s)
        complaint = self._complaints.replace(b"\0", b"").decode(errors="replace")
        if code == UNREACHED or re.search("password", complaint, re.IGNORECASE):
            return why_unreached(self.host, complaint)
        if is_late:
            return RunFailed(
                f"{self.host.name} has begun to answer and says nothing more.", hint="see whether it is overloaded"
            )
        # A shell that lets nobody in says so where others greet: nologin, for one.
        said = complaint.strip().splitlines() or self._printed or [f"it ends with {code} and says nothing"]
        return RunFailed(
            f"{self.host.name} cannot run a program ({one_line(said[-1])[:200].rstrip('.')}).",
            hint='see that its shell runs one, or name another interpreter there: python = "~/venv/bin/python"',
        )

    def _hear_complaints(self, stream: IO[bytes]) -> None:
        with stream:
            for data in iter(lambda: stream.readline(_MOST_BYTES), b""):
                if len(self._complaints) < _MOST_BYTES:
                    self._complaints += data
                    if self.errors is not None:
                        with suppress(OSError), self.errors.open("ab") as file:
                            file.write(data)
        self._silent.set()
