"""The launching machine's end of a connection to a host: the program sent there, its answers, and what goes wrong.

OpenSSH is as the system has it: the user's own configuration, agent, known hosts and jump hosts hold. Nothing is ever
asked (BatchMode), an unknown key is never accepted, no port, agent or display is forwarded. A host needs a shell and a
Python alone: the program, and all that is said in either direction, goes through that one connection.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from hetopt.backends.host import entry
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
from hetopt.core.artifact import AnyRecord, CleanText, Record, parse_from_peer
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.hosts import CPU, Host
from hetopt.core.paths import expanded
from hetopt.core.plain_text import one_line
from hetopt.core.search_path import INSTALLED_ONLY

SSH_VARIABLE = "HETOPT_SSH"
"""Environment variable with another command than ``ssh``, as git has GIT_SSH_COMMAND: ``ssh -F other_config``."""

CONNECT_S = 6
READ_BY_SHELL = "what its shell runs first reads the standard input, which is the program's"

OLDEST_PYTHON = "it is Python %d.%d, and training needs 3.11 or newer"

UNREACHED = 255
"""Exit code of ssh where it never came to run the command (ssh(1), exit status)."""

_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
    "ControlMaster": "no",  # one that is there is used; ours ends with the run, and must not end others' sessions
}


def ssh_argv(
    host: Host, command: str, environment: Mapping[str, str] = os.environ, *, options: Mapping[str, str] | None = None
) -> list[str]:
    """Return the ssh command line that runs ``command`` in a shell on a host, by its jump hosts and without a prompt.

    It has the same options at each host on the way: of ssh's own ``-J`` they would hold for the last alone.

    Args:
        host: host of which no field can be an option of ssh.
        command: command for the user's shell there.
        environment: environment of this process, which may name another command than ``ssh``.
        options: options of ssh, in the place of the usual ones or beside them; None: none.

    Raises:
        BadInput: the home folder of the private key is not known.
    """
    way: list[str] = []
    for hop in host.through:
        # The nearest hop's command stands in the next one's: ssh expands each once (ssh_config(5), TOKENS), and a shell
        # splits it once.
        words = [word.replace("%", "%%") for word in [*_words(hop, way, environment), "--", hop.address]]
        way = ["-o", f"ProxyCommand={shlex.join([*words[:-2], '-W', '[%h]:%p', *words[-2:]])}"]
    return [*_words(host, way, environment, options or {}), "--", host.address, command]


def _words(
    host: Host, way: Sequence[str], environment: Mapping[str, str], options: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return ssh and its options for a host, with the way to it: the command line up to the host itself."""
    words = shlex.split(environment.get(SSH_VARIABLE) or "ssh")
    for name, value in {**_OPTIONS, **options}.items():
        words += ["-o", f"{name}={value}"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    if host.key is not None:
        words += ["-i", str(expanded(host.key))]
    return [*words, *way]


def python_command(python: str, code: bytes) -> str:
    """Return the shell command by which a host's ``python`` runs ``code`` sent to its standard input, if it is whole.

    One that is too old to read the program says that. Neither it nor what it starts finds modules in the folder that
    the user begins in (`hetopt.core.search_path`).

    Args:
        python: path of the interpreter; a ``~/`` is the user's home there.
        code: program that will be sent; another than this is not run.
    """
    path = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    first = (
        "import sys,zlib;"
        f"sys.version_info>=(3,11) or sys.exit('{OLDEST_PYTHON}' % tuple(sys.version_info[:2]));"
        f"code=sys.stdin.buffer.read({len(code)});"
        f"zlib.crc32(code)=={zlib.crc32(code)} or sys.exit({READ_BY_SHELL!r});"
        "exec(compile(code, 'hetopt', 'exec'), {'__name__': 'hetopt_host'})"
    )
    script = (
        f"export {shlex.join(f'{name}={value}' for name, value in INSTALLED_ONLY.items())}; "
        f"exec {path} -u -c {shlex.quote(first)}"
    )
    return f"exec sh -c {shlex.quote(script)}"


def why_unreached(host: Host, complaint: str) -> RunFailed:
    """Return the error of a host that ssh did not reach, from the most telling line of ssh's standard error.

    Args:
        host: host that was to be reached.
        complaint: what ssh wrote to its standard error.
    """
    who = f"{host.user}@{host.address}" if host.user else host.address
    options = {"-p": host.port, "-i": host.key, "-J": host.jump}
    typed = shlex.join(["ssh", *(str(w) for name, value in options.items() if value for w in (name, value)), who])
    lines = [line.strip("@ ") for line in complaint.splitlines() if re.search("[A-Za-z]", line)]
    through, hint = "", "see what `{typed}` says"
    text = "; ".join(lines[-2:]) if lines else "ssh ended without saying why"
    if _JUMP.search("\n".join(lines[1:])):  # what is said of the jump host must not be taken for the host's own
        through, text, hint = " through its jump host", lines[0], "see that `{typed}` logs in by itself"
    else:
        worded = (
            (line, advice) for pattern, advice in _ADVICE for line in lines if re.search(pattern, line, re.IGNORECASE)
        )
        text, hint = next(worded, (text, hint))
    text = one_line(text)[:200].removeprefix("ssh: ").rstrip(".")
    return RunFailed(f"{host.name} is not reached{through}: {text}.", hint=hint.format(typed=typed, who=who))


_JUMP = re.compile(r"^(?:kex_exchange_identification|stdio forwarding failed)", re.MULTILINE)
"""What the ssh that goes through another says after that one's own words, where it has ended (OpenSSH, `kex.c`)."""

_ADVICE = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "it was installed anew, or is somebody else's; ask its owner, then `ssh-keygen -R` its name",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "log in once yourself, `{typed}`, and compare the fingerprint; hetopt accepts none by itself",
    ),
    (
        r"Permission denied \((?:password|keyboard-interactive|,)+\)",
        "copy a key once, `ssh-copy-id {who}`; hetopt types no password",
    ),
    (r"Permission denied", "see that `{typed}` logs in by itself: the user's name, the key, and `ssh-add -l`"),
    (r"Could not resolve hostname", "correct its address"),
    (r"Connection refused", "see that sshd runs there, and its port"),
    (r"timed out|timeout", "see that it is on, and on the network"),
    (r"No route to host|Network is unreachable", "join its network (VPN?)"),
    (r"password has expired|password change required|change your password", "log in once yourself, `{typed}`"),
)
"""What to do, by what ssh says (OpenSSH, `sshconnect.c`, `ssh.c`, `auth-pam.c`); the first that fits."""


class Link:
    """The way to run commands on hosts: by ssh here, and by subclasses for other machines.

    Attributes:
        RETURN_WITHIN_S: seconds that a run without any host waits for one.
        MISSING: what to do where the command is not installed here.
    """

    RETURN_WITHIN_S: ClassVar[float] = 600.0
    MISSING: ClassVar[str] = (
        f"install OpenSSH's client, such as `apt install openssh-client`, or correct {SSH_VARIABLE}"
    )

    def argv(self, host: Host, command: str) -> list[str]:
        """Return the local command line that runs a shell command on a host; start nothing.

        Raises:
            HetoptError: the host cannot be reached now.
        """
        return ssh_argv(host, command)

    def why_unreached(self, host: Host, code: int, complaint: str) -> RunFailed | None:
        """Return the error if a command never ran on a host; None: it ran.

        Args:
            host: host of the command.
            code: exit code of ssh.
            complaint: what ssh wrote to its standard error.
        """
        reached = code != UNREACHED and not re.search("password", complaint, re.IGNORECASE)
        return None if reached else why_unreached(host, complaint)

    def host_lines(self, complaint: str) -> list[str]:
        """Return the lines of a standard error (``complaint``) that were written on the host."""
        return complaint.strip().splitlines()

    def why_lost(self, host: Host, complaint: str) -> str | None:
        """Return why a connection ended, by its standard error (``complaint``); None: not known, as ever by ssh."""
        return None

    def address(self, host: Host) -> str | None:
        """Return a host's IP address among the others, where the way to it tells; None: as ever by ssh."""
        return None

    def may_be_used(self, host: Host) -> bool:
        """Return whether a host is there for long enough to begin something on it; by ssh always True."""
        return True


SSH = Link()


BEGIN_WITHIN_S = 120.0
"""Seconds that connecting and sending the code may take."""
INSTALL_WITHIN_S = 1800.0
"""Seconds that installing packages may take: some gigabytes over a slow line, and their files."""


class Begun(Record):
    """A host's answer once it has the code.

    Attributes:
        ready: folder that it runs in; None: it refuses.
        refused: why it refuses; None: it does not.
    """

    ready: CleanText | None = None
    refused: CleanText | None = None


_MOST_BYTES = 4_000_000
"""Of a program's words, of its shell's and of complaints: 64 GPUs and what earlier runs left take some thousands."""


@cache
def _program() -> bytes:
    return inspect.getsource(entry).encode()


@dataclass(kw_only=True)
class Conversation:
    """The connection to the program on a host (`hetopt.backends.host.entry`), with questions and answers.

    Making one starts the connecting command, and raises BadInput where that cannot be started here.

    Attributes:
        host: host at the other end.
        link: the way to it.
        errors: file for the connection's standard error, in a folder that exists; None: a temporary file.
        end_s: seconds that the program may take to end once its input is closed.
    """

    host: Host
    link: Link = SSH
    errors: Path | None = None
    end_s: float = 5.0
    _printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the program; nothing is waited for.

        Raises:
            HetoptError: there is no ssh here, or the host cannot be reached now.
        """
        argv = self.link.argv(self.host, python_command(self.host.python, _program()))
        self._complaints = open(self.errors, "w+b") if self.errors else tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        try:
            self.ssh = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=self._complaints, bufsize=-1, start_new_session=True
            )
        except OSError as error:
            raise BadInput(f"{argv[0]} cannot be started here: {error.strerror}.", hint=self.link.MISSING) from None
        assert isinstance(self.ssh.stdout, io.BufferedReader)
        self.incoming = self.ssh.stdout
        self._words = self._lines()

    def begin(self, question: bytes, kind: type[AnyRecord], patience_s: float) -> AnyRecord:
        """Send the program's code and a first question; return its answer, a ``kind``, within ``patience_s`` seconds.

        Args:
            question: bytes for the program, which must answer before it waits for more.
            kind: the record class of the answer.
            patience_s: seconds to wait for it; then the connection is cut.

        Raises:
            RunFailed: the host is not reached, has no Python that can run the program, is too late, or answers
                something else.
        """
        return self.ask(_program() + question, kind, patience_s)

    def ask(self, question: bytes, kind: type[AnyRecord], patience_s: float) -> AnyRecord:
        """Send the program a question; return its answer, a record ``kind``, within ``patience_s`` seconds.

        Later, the connection is cut.

        Args:
            question: bytes for the program.
            kind: record class of the answer.
            patience_s: seconds to wait for it.

        Raises:
            RunFailed: the connection ended or was cut, or the answer is no such record.
        """
        begun_s, timer = time.monotonic(), threading.Timer(patience_s, self.cut)
        timer.start()
        try:
            self.say(question)
            word = next(self._words, None)
        finally:
            timer.cancel()
        if word is None:
            raise self._why_ended(is_late=time.monotonic() - begun_s >= patience_s)
        self._printed.clear()
        return parse_from_peer(kind, word, self.host.name)

    def say(self, data: bytes) -> None:
        """Write bytes to the program's input and wait for no answer; if that fails, the next `ask` tells why."""
        assert self.ssh.stdin is not None
        with suppress(OSError, ValueError):  # it may be let go of meanwhile
            self.ssh.stdin.write(data)
            self.ssh.stdin.flush()

    def end(self) -> None:
        """Close the connection; a program that has not ended after ``end_s`` seconds is cut off."""
        self._let_go()
        self.incoming.close()
        self._complaints.close()

    def cut(self) -> None:
        """Kill the connection at once, as a host does not answer any more."""
        self.ssh.kill()

    def _let_go(self) -> int:
        """Close the program's input, cut it off if it has not ended after a while; return ssh's exit code."""
        assert self.ssh.stdin is not None
        with suppress(OSError):  # it may have gone already
            self.ssh.stdin.close()
        try:
            return self.ssh.wait(self.end_s)
        except subprocess.TimeoutExpired:
            self.ssh.kill()
            return self.ssh.wait()

    def _lines(self) -> Iterator[str]:
        """Yield each line that the program says, up to some megabytes; what its shell prints beside is kept."""
        left = _MOST_BYTES
        while left > 0 and (data := self.incoming.readline(left)):
            left -= len(data)
            line = data.decode(errors="replace")
            if line.startswith(entry.MARK):
                yield line.removeprefix(entry.MARK).rstrip("\n")
            elif line.strip():
                self._printed.append(one_line(line))

    def complaint(self) -> str:
        """Return what the connection has written to its standard error so far, up to 4 MB."""
        self._complaints.seek(0)
        return self._complaints.read(_MOST_BYTES).replace(b"\0", b"").decode(errors="replace")

    def _why_ended(self, *, is_late: bool) -> HetoptError:
        """End the conversation; return why: the host is not reached, runs no program, or is too slow (``is_late``)."""
        code, complaint = self._let_go(), self.complaint()
        unreached = self.link.why_unreached(self.host, code, complaint)
        if unreached is not None:
            return unreached
        if is_late:
            return RunFailed(
                f"{self.host.name} has begun to answer and says nothing more.", hint="see whether it is overloaded"
            )
        # A shell that lets nobody in says so where others greet: nologin, for one.
        complaints = self.link.host_lines(complaint) or self._printed or [f"it ends with {code} and says nothing"]
        return RunFailed(
            f"{self.host.name} cannot run a program ({one_line(complaints[-1])[:200].rstrip('.')}).",
            hint='see that its shell runs one, or name another interpreter there: python = "~/venv/bin/python"',
        )


@dataclass(kw_only=True)
class Part(Conversation):
    """The connection to a host that takes part in a run, and the answers to its requests for objects.

    Attributes:
        end_s: seconds that the host's node may take to end once the connection is closed.
        objects: what it may read and write of the run.
        models: folder where it may leave models and outputs for the user.
        lock: held while an object is read or written: hosts ask at the same time.
        wrote: called with the name and the bytes of every whole object that it has written.
        heard_s: when the host last sent something, by the monotonic clock; 0: never.
    """

    end_s: float = 20.0
    objects: FolderObjects
    models: FolderObjects
    lock: threading.Lock
    wrote: Callable[[str, bytes], None]
    heard_s: float = 0.0

    def take_part(self, run: str, code: bytes, sha256: str, config: Mapping[str, object]) -> None:
        """Connect and send the code; return once the host has begun, whose requests a thread answers from then on.

        Args:
            run: name of the run.
            code: archive of the code that it runs.
            sha256: hash of that archive.
            config: settings for its node, as JSON takes them.

        Raises:
            RunFailed: the host is not reached, is too late (2 minutes, or 30 where it installs), or refuses.
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
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    @property
    def is_over(self) -> bool:
        """True if the connection has ended, and all that came through it was answered."""
        return not self._server.is_alive()

    def _serve(self) -> None:
        """Answer the host's requests until the connection ends; cut it where one cannot be read or answered."""

        def read(count: int) -> bytes:
            """Read ``count`` bytes, fewer at the end; each piece that arrives counts as a sign of life."""
            data = bytearray()
            while len(data) < count and (piece := self.incoming.read1(count - len(data))):
                data += piece
                self.heard_s = time.monotonic()
            return bytes(data)

        try:
            while (asked := read_frame(read)) is not None:
                self.say(frame(*self._answer(*asked)))
        except (OSError, ValueError):
            self.cut()  # it is gone, or has a frame that is none

    def _answer(self, header: bytes, body: bytes) -> tuple[Answer, bytes]:
        """Carry out a host's request, tell `wrote` of a whole object, and return answer and body.

        A refusal is empty.
        """
        try:
            request = parse_from_peer(Request, header, self.host.name)
            objects = self.objects if request.place == OBJECTS else self.models
            check_allowed(request)
            with self.lock:
                answered = answer(objects, request, body)
                if request.what == "put_part" and request.last and request.place == OBJECTS:
                    self.wrote(request.name, body)
        except (HetoptError, OSError):
            return Answer(), b""
        return answered
