"""One connection to a host: OpenSSH as the system has it, a program there, and what goes wrong in one sentence.

The user's own configuration, agent, known hosts and jump hosts hold. Nothing is ever asked (BatchMode), an unknown key
is never accepted, no port, agent or display is forwarded. The program is Python, sent over the connection itself: on
the host nothing needs to be there but a shell and an interpreter, and all that is said in either direction goes through
that one connection.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.hosts import Host
from hetopt.core.paths import expanded
from hetopt.core.plain_text import one_line
from hetopt.core.search_path import INSTALLED_ONLY

SSH_VARIABLE = "HETOPT_SSH"
"""Another command than ``ssh``, as git has GIT_SSH_COMMAND: ``ssh -F other_config``."""

CONNECT_S = 6
MARK = "HETOPT-SAYS "
"""What a program says begins so; whatever a shell prints before is passed over."""
NO_PYTHON = "no-python"
READ_BY_SHELL = "what its shell runs first reads the standard input, which is the program's"

UNREACHED = 255
"""ssh's own exit code where it never came to run the command (ssh(1), exit status)."""

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


def ssh_argv(host: Host, command: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ssh command line that runs a command on a host.

    It has the same options at each host on the way: of ssh's own ``-J`` they would hold for the last alone.

    Args:
        host: of whose fields none can be an option.
        command: for the user's shell there.
        environment: of this process.
    """
    way: list[str] = []
    for hop in host.through:
        # The nearest hop's command stands in the next one's: ssh expands each once (ssh_config(5), TOKENS), and a shell
        # splits it once.
        words = [word.replace("%", "%%") for word in [*_words(hop, way, environment), "--", hop.address]]
        way = ["-o", f"ProxyCommand={shlex.join([*words[:-2], '-W', '[%h]:%p', *words[-2:]])}"]
    return [*_words(host, way, environment), "--", host.address, command]


def _words(host: Host, way: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return ssh and its options for a host that is reached so, as far as the host itself."""
    words = shlex.split(environment.get(SSH_VARIABLE) or "ssh")
    for name, value in _OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    if host.key is not None:
        words += ["-i", str(expanded(host.key))]
    return [*words, *way]


def python_command(python: str, code: bytes) -> str:
    """The command that runs Python from its standard input; what follows that is the program's own.

    It first says which Python it is, so that one that is too old to read the program says that. Neither it nor what it
    starts finds modules in the folder that the user begins in (`hetopt.core.search_path`).

    Args:
        python: interpreter; a ``~/`` is the user's home there.
        code: of the program; another than this is not run.
    """
    path = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    first = (
        "import sys,zlib;"
        # Whatever a shell printed before may lack the end of its line.
        f"sys.stdout.write('\\n{MARK}%d.%d\\n' % tuple(sys.version_info[:2]));sys.stdout.flush();"
        f"code=sys.stdin.buffer.read({len(code)});"
        f"zlib.crc32(code)=={zlib.crc32(code)} or sys.exit({READ_BY_SHELL!r});"
        "exec(compile(code, 'hetopt', 'exec'), {'__name__': 'hetopt_host'})"
    )
    script = (
        f"command -v {path} >/dev/null 2>&1 || {{ echo; echo {shlex.quote(MARK + NO_PYTHON)}; exit 0; }}; "
        f"export {shlex.join(f'{name}={value}' for name, value in INSTALLED_ONLY.items())}; "
        f"exec {path} -u -c {shlex.quote(first)}"
    )
    return f"exec sh -c {shlex.quote(script)}"


class Program(NamedTuple):
    """A program on a host, as the ssh that runs it here."""

    ssh: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: io.BufferedReader


def start(host: Host, source: str) -> Program:
    """Run a program on a host.

    Args:
        host: which.
        source: of the program. It must not wait for more input before it has said something.

    Raises:
        BadInput: there is no ssh here.
    """
    code = source.encode()
    argv = ssh_argv(host, python_command(host.python, code))
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise BadInput(
            f"{argv[0]} cannot be started here: {error.strerror}.",
            hint=f"install OpenSSH's client, such as `apt install openssh-client`, or correct {SSH_VARIABLE}",
        ) from None
    assert process.stdin is not None
    assert isinstance(process.stdout, io.BufferedReader)
    program = Program(process, process.stdin, process.stdout)
    say(program, code)
    return program


def say(program: Program, data: bytes) -> None:
    """Hand a program its next bytes; where it has ended, its exit code and its complaints say why."""
    with suppress(OSError):
        program.stdin.write(data)
        program.stdin.flush()


def let_go(program: Program, within_s: float) -> int:
    """Say to a program on a host that nothing more comes; one that has not ended after so long is cut off.

    Returns:
        ssh's exit code.
    """
    with suppress(OSError):  # it may have gone already
        program.stdin.close()
    try:
        return program.ssh.wait(within_s)
    except subprocess.TimeoutExpired:
        program.ssh.kill()
        return program.ssh.wait()


def why_unreached(host: Host, complaint: str) -> RunFailed:
    """Return ssh's own words, of its complaint the line that tells most, and what to do.

    Args:
        host: that was to be reached.
        complaint: what ssh wrote to its standard error.
    """
    who = f"{host.user}@{host.address}" if host.user else host.address
    options = {"-p": host.port, "-i": host.key, "-J": host.jump}
    typed = shlex.join(["ssh", *(str(w) for name, value in options.items() if value for w in (name, value)), who])
    lines = [line.strip("@ ") for line in complaint.splitlines() if re.search("[A-Za-z]", line)]
    through, hint = "", "see what `{typed}` says"
    said = "; ".join(lines[-2:]) if lines else "ssh ended without saying why"
    if _JUMP.search("\n".join(lines[1:])):  # what is said of the jump host must not be taken for the host's own
        through, said, hint = " through its jump host", lines[0], "see that `{typed}` logs in by itself"
    else:
        worded = ((line, advice) for pattern, advice in _ADVICE for line in lines if re.search(pattern, line, _ANY))
        said, hint = next(worded, (said, hint))
    said = one_line(said)[:200].removeprefix("ssh: ").rstrip(".")
    return RunFailed(f"{host.name} is not reached{through}: {said}.", hint=hint.format(typed=typed, who=who))


_JUMP = re.compile(r"^(?:kex_exchange_identification|stdio forwarding failed)", re.MULTILINE)
"""What the ssh that goes through another says after that one's own words, where it has ended (OpenSSH, `kex.c`)."""

_ANY = re.IGNORECASE
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
