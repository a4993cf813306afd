"""The launching machine's end of one host's part in a run: the connection, and what is asked over it."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from hetopt.backends.ssh import receive
from hetopt.backends.ssh.conversation import Conversation
from hetopt.backends.ssh.objects import (
    OBJECTS,
    Answer,
    FolderObjects,
    Request,
    answer,
    check_allowed,
    frame,
    read_frame,
)
from hetopt.core.artifact import Record, Told, read_words
from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.hosts import CPU

BEGIN_WITHIN_S = 120.0
"""Connecting, and sending the code."""
INSTALL_WITHIN_S = 1800.0
"""Some gigabytes over a slow line, and their files."""


class Begun(Record):
    """What a host says once it has the code: the folder that it runs in, or why it does not."""

    ready: Told | None = None
    refused: Told | None = None


@dataclass(kw_only=True)
class Link(Conversation):
    """One host, from the moment that it is connected to until it is gone.

    Attributes:
        objects: what it may read and write of the run.
        models: what it may leave for the user.
        lock: held while an object is read or written: hosts ask at the same time.
        wrote: told the name and the bytes of every whole object that it has written.
        heard_s: when it said something last.
        speaks: whether it has asked for anything yet: before, it imports what it runs.
    """

    source: str = field(default_factory=partial(inspect.getsource, receive))
    end_s: float = 20.0
    objects: FolderObjects
    models: FolderObjects
    lock: threading.Lock
    wrote: Callable[[str, bytes], None]
    heard_s: float = 0.0
    speaks: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def take_part(self, run: str, code: bytes, sha256: str, config: Mapping[str, object]) -> None:
        """Connect, send the code, and answer from then on in a thread of its own.

        Args:
            run: the run's name.
            code: the archive that it runs.
            sha256: of that.
            config: for its node.

        Raises:
            HetoptError: the host is not reached, or does not take part.
        """
        header = {
            "folder": self.host.folder,
            "run": run,
            "host": self.host.name,
            "bytes": len(code),
            "sha256": sha256,
            "install": self.host.install,
            "gpu": CPU not in self.host.devices,
            "config": config,
        }
        within_s = INSTALL_WITHIN_S if self.host.install else BEGIN_WITHIN_S
        begun = self.begin(json.dumps(header).encode() + b"\n" + code, Begun, within_s)
        if begun.refused is not None:
            raise RunFailed(
                f"{self.host.name} does not take part: {begun.refused[:300]}.",
                hint="look at it with `hetopt hosts check`",
            )
        self.heard_s = time.monotonic()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended."""
        return self.gone.is_set() or self.ssh.poll() is not None

    def _serve(self) -> None:
        def read(count: int) -> bytes:
            """Return so many bytes, or fewer at the end; a part that comes over a slow line is heard while it does."""
            data = bytearray()
            while len(data) < count and (piece := self.incoming.read1(count - len(data))):
                data += piece
                self.heard_s, self.speaks = time.monotonic(), True
            return bytes(data)

        try:
            while (asked := read_frame(read)) is not None:
                self.say(frame(*self._answer(*asked)))
        except (OSError, ValueError):
            self.cut()  # it is gone, or has a frame that is none
        finally:
            self.gone.set()

    def _answer(self, header: bytes, body: bytes) -> tuple[Answer, bytes]:
        try:
            request = read_words(Request, header, self.host.name)
            objects = self.objects if request.place == OBJECTS else self.models
            check_allowed(request)
            with self.lock:
                answered = answer(objects, request, body)
                if request.what == "put_part" and request.last and request.place == OBJECTS:
                    self.wrote(request.name, body)
        except (HetoptError, OSError):
            return Answer(), b""
        return answered
