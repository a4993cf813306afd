"""The launching machine's end of one host's part in a run: the connection, and what is asked over it."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetopt.backends.ssh import receive
from hetopt.backends.ssh.conversation import checked_python
from hetopt.backends.ssh.edge import MARK, let_go, start, why_unreached
from hetopt.backends.ssh.objects import MODELS, FolderObjects, answer, check_allowed, frame, read_frame
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.hosts import CPU, Host
from hetopt.core.plain_text import one_line
from hetopt.core.reading import decoded, read_bytes

BEGIN_WITHIN_S = 120.0
"""Connecting, and sending the code."""
INSTALL_WITHIN_S = 1800.0
"""Some gigabytes over a slow line, and their files."""
_END_S = 20.0
_MOST_LINE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a host is sent to begin with.

    Attributes:
        run: the run's name.
        code: the archive that it runs.
        sha256: of that.
        config: for its node.
    """

    run: str
    code: bytes
    sha256: str
    config: dict[str, Any]


@dataclass(kw_only=True)
class Link:
    """One host, from the moment that it is connected to until it is gone.

    Attributes:
        host: which.
        objects: what it may read and write of the run.
        models: what it may leave for the user.
        lock: held while an object is read or written: hosts ask at the same time.
        wrote: told the name and the bytes of every whole object that it has written.
        errors: the file that gets what it complains of.
        heard_s: when it said something last.
        speaks: whether it has asked for anything yet: before, it imports what it runs.
    """

    host: Host
    objects: FolderObjects
    models: FolderObjects
    lock: threading.Lock
    wrote: Callable[[str, bytes], None]
    errors: Path
    heard_s: float = 0.0
    speaks: bool = False
    gone: threading.Event = field(default_factory=threading.Event)
    _process: subprocess.Popen[bytes] | None = None

    def begin(self, part: Part) -> None:
        """Connect, send the code, and answer from then on in a thread of its own.

        Raises:
            HetoptError: the host is not reached, or does not take part.
        """
        self.errors.parent.mkdir(parents=True, exist_ok=True)
        with self.errors.open("ab") as errors:
            process = self._process = start(self.host, inspect.getsource(receive), errors=errors)
        late = threading.Timer(INSTALL_WITHIN_S if self.host.install else BEGIN_WITHIN_S, process.kill)
        late.start()
        try:
            checked_python(self.host, self._line())
            told = json.loads(self._offered(part))
        except ValueError:
            raise RunFailed(f"{self.host.name} says what cannot be read.") from None
        finally:
            late.cancel()
        if "refused" in told:
            raise RunFailed(
                f"{self.host.name} does not take part: {one_line(str(told['refused']))[:300]}.",
                hint="look at it with `hetopt hosts check`",
            )
        self.heard_s = time.monotonic()
        threading.Thread(target=self._serve, daemon=True).start()

    def _offered(self, part: Part) -> str:
        """Send the code; what the host says to that."""
        assert self._process is not None
        assert self._process.stdin is not None
        header = {
            "folder": self.host.folder,
            "run": part.run,
            "host": self.host.name,
            "bytes": len(part.code),
            "sha256": part.sha256,
            "install": self.host.install,
            "gpu": CPU not in self.host.devices,
            "config": part.config,
        }
        with suppress(OSError):  # why, it says
            self._process.stdin.write(json.dumps(header).encode() + b"\n" + part.code)
            self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        """The next thing that it says; what its shell prints beside is passed over.

        Raises:
            HetoptError: it ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MOST_LINE).decode(errors="replace"):
            if line.startswith(MARK):
                return line.removeprefix(MARK).rstrip("\n")
        self._process.wait()
        raise self.why_gone()

    def why_gone(self) -> HetoptError:
        """Why the connection ended."""
        said = decoded(read_bytes(self.errors).replace(b"\0", b"")[-2000:], origin="")
        return why_unreached(self.host, said)

    def end(self) -> None:
        """Let go: the host ends its part, and removes what it has."""
        if self._process is not None:
            let_go(self._process, _END_S)

    def cut(self) -> None:
        """End the connection at once: the host does not answer any more."""
        if self._process is not None:
            self._process.kill()

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended."""
        return self.gone.is_set() or self._process is None or self._process.poll() is not None

    def _serve(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            while (asked := read_frame(self._read)) is not None:
                self._process.stdin.write(frame(*self._answer(*asked)))
                self._process.stdin.flush()
        except (OSError, ValueError):
            self.cut()  # it is gone, or says what nobody understands
        finally:
            self.gone.set()

    def _read(self, count: int) -> bytes:
        """So many bytes, or fewer at the end; a part that comes over a slow line is heard while it does."""
        assert self._process is not None
        stream = self._process.stdout
        assert isinstance(stream, io.BufferedReader)
        data = bytearray()
        while len(data) < count and (piece := stream.read1(count - len(data))):
            data += piece
            self.heard_s, self.speaks = time.monotonic(), True
        return bytes(data)

    def _answer(self, asked: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        objects = self.models if asked.get("place") == MODELS else self.objects
        with self.lock:
            try:
                check_allowed(str(asked.get("what")), str(asked.get("place")), str(asked.get("name", "")))
                told = answer(objects, asked, body)
                if asked.get("what") == "put" and objects is self.objects:
                    self.wrote(str(asked["name"]), body)
            except (BadInput, KeyError, TypeError, OSError) as error:
                return {"refused": one_line(str(error))}, b""
        return told
