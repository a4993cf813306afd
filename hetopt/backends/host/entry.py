"""The program that is sent to a host: it reports on the host and tries its links, or takes part in a run.

Standard library alone: it is sent to machines as they are. To look, it writes nothing to any disk. After its report it
waits for the others' addresses on standard input, and listens on its own private address for those that know the
round's token. A link's rate is the bytes that arrived over the time between the first and the last of them, while all
hosts send to their neighbours at once, as a ring does.

To take part, it takes the code, checks it, and becomes the node. Everything it writes, the environment that it installs
included, is in one folder, which it makes anew and which the node removes when it ends.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import io
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from typing import Any, BinaryIO

MARK = "HETOPT-SAYS "
PACKAGES = ("torch", "numpy", "pydantic", "psutil", "safetensors", "scikit-learn")
CONNECT_S = 2.0
SEND_S = 0.3
CHUNK = 65536
MOST_WAITING_S = 30.0
RATE = struct.Struct("!Q")
CONFIG = "host.json"
PID = "pid"
MADE = "made"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # `hetopt.core.search_path`, which is not sent
_GONE_S = 15.0


def main() -> None:
    """Read a request from standard input; report on this host and its links, or become a run's node in this process.

    The report and the answer go to standard output. A node replaces this process, so that the call does not return.
    """
    asked = json.loads(sys.stdin.buffer.readline().decode())
    if "run" in asked:
        _take_part(asked)
    else:
        _look(asked)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write("\n" + MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def _look(asked: dict[str, Any]) -> None:
    """Report on this host, listen for the others, and try the links to hosts that each later line of input names."""
    address, token = asked["address"] or _reached_as(), asked["token"].encode()
    facts = {**_facts(asked), "address": address, "port": None, "listen_trouble": None}
    try:
        if address is None:
            raise OSError("it cannot be seen by which address it was reached")
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family, backlog=64)
        facts["port"] = listener.getsockname()[1]
        threading.Thread(target=_serve, args=(listener, token), daemon=True).start()
    except OSError as error:
        facts["listen_trouble"] = str(error.strerror or error)
    _say(facts)
    for line in iter(sys.stdin.buffer.readline, b""):
        _say(_try_ways(json.loads(line.decode()), token))


def _reached_as() -> str | None:
    """Return the address by which ssh came here; None: not known."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and words[2] != "UNKNOWN" else None


def _serve(listener: socket.socket, token: bytes) -> None:
    """Answer every connection, each in a thread, for as long as this process lives."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    """Serve a connection from another host that knows the token: receive, report the rate, and send as much back.

    A connection that tells another token is closed; a broken one is no error here.
    """
    with connection, connection.makefile("rb") as stream, suppress(OSError):  # the other end says what was wrong
        connection.settimeout(MOST_WAITING_S)
        if stream.read(len(token)) != token:
            return
        connection.sendall(b"y")
        if stream.read(1) == b"r":
            connection.sendall(RATE.pack(_receive(stream)))
            _send(connection)


def _send(connection: socket.socket) -> None:
    """Send chunks for `SEND_S` seconds, then a last one that begins with ``0``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)
    end = time.monotonic() + SEND_S
    chunk = b"1" + bytes(CHUNK - 1)
    while time.monotonic() < end:
        connection.sendall(chunk)
    connection.sendall(b"0" + bytes(CHUNK - 1))


def _receive(stream: BinaryIO) -> int:
    """Receive until the sender ends or the stream breaks off; return the rate of what came, in bits per second."""
    chunk = stream.read(CHUNK)
    begun, total = time.monotonic(), 0
    while chunk[:1] == b"1":
        chunk = stream.read(CHUNK)
        total += len(chunk)
    return int(8 * total / max(1e-6, time.monotonic() - begun))


def _try_ways(wish: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Return which of the ``others`` are reached and, of those in ``measure``, both directions' bits/s, by host name.

    All are tried at once; it returns when the last is done. There must be another host.
    """
    outcome: dict[str, Any] = {"reached": {}, "rates": {}}
    with ThreadPoolExecutor(max_workers=len(wish["others"])) as pool:
        for name, address, port in wish["others"]:
            pool.submit(_try_way, outcome, name, address, port, token, name in wish["measure"])
    return outcome


def _try_way(outcome: dict[str, Any], name: str, address: str, port: int, token: bytes, measures: bool) -> None:
    """Write into ``outcome`` whether a host is reached, or why not, and, if ``measures``, both directions' bits/s.

    Never raises on a connection that fails. Rates are there, then back.
    """
    try:
        with (
            socket.create_connection((address, port), timeout=CONNECT_S) as connection,
            connection.makefile("rb") as stream,
        ):
            connection.settimeout(MOST_WAITING_S)
            connection.sendall(token)
            outcome["reached"][name] = "yes" if stream.read(1) == b"y" else "somebody else answers"
            if measures:
                connection.sendall(b"r")
                _send(connection)
                there = RATE.unpack(stream.read(RATE.size))[0]
                outcome["rates"][name] = [there, _receive(stream)]
    except (OSError, struct.error) as error:
        trouble = "timed out" if isinstance(error, TimeoutError) else str(getattr(error, "strerror", None) or error)
        outcome["reached"].setdefault(name, trouble)


def _facts(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what this host is and has: processors, memory, disk, packages, GPUs, and what earlier runs have left."""
    folder = os.path.expanduser(asked["folder"])
    there = folder
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    return {
        "python": list(sys.version_info[:2]),
        "executable": sys.executable,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "writable": os.access(there, os.W_OK | os.X_OK),
        "there": there,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "packages": _packages(),
        "installs": _installs() if asked["install"] else None,
        "gpus": _gpus(),
        "torch_trouble": _torch_trouble() if asked["gpu"] else None,
        "left": _left(folder),
    }


def _left(folder: str) -> list[str]:
    """Return the folders of runs whose node is gone: a machine that lost power could not remove its own."""
    files = glob.glob(f"{glob.escape(folder)}/runs/*/*/{PID}")
    return sorted(root for root in map(os.path.dirname, files) if _node_of(root) is None)


def _node_of(root: str) -> int | None:
    """Return the number of the process that takes part in a run from a folder; None: it is gone."""
    try:
        with open(f"{root}/{PID}") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if b"hetopt.backends.ssh.node" in words and root.encode() in words else None


def _packages() -> dict[str, str | None]:
    """Return the versions of packages that training needs, without importing any; None where one is not there."""
    installed = {name: next(iter(metadata.distributions(name=name)), None) for name in PACKAGES}
    return {name: None if there is None else there.version for name, there in installed.items()}


def _installs() -> str | None:
    """Return why packages cannot be installed here; None: this Python lacks nothing for it."""
    # Debian has the first in a package of its own.
    lacks = [name for name in ("ensurepip", "venv") if importlib.util.find_spec(name) is None]
    return f"its Python has no {lacks[0]}" if lacks else None


def _printed(*command: str) -> tuple[int | None, str]:
    """Run a command; return its exit code and all that it printed; None: it does not start, or takes over 30 s."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30
        )
        return done.returncode, done.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None, ""


def _gpus() -> list[list[str]] | str:
    """Return name, MiB, driver and compute capability of each GPU; a sentence where the driver fails.

    Empty without one.
    """
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    code, text = _printed("nvidia-smi", query, "--format=csv,noheader,nounits")
    if code is None:
        return []
    if code != 0:
        return text.strip()[:200] or "nvidia-smi fails"
    return [[word.strip() for word in line.split(",")] for line in text.strip().splitlines()]


def _torch_trouble() -> str | None:
    """Return why torch here cannot compute on this host's GPUs, in its own words; None: it can, or is not there."""
    code, text = _printed(sys.executable, "-c", "import torch; torch.cuda.init()")
    return (text.strip().splitlines() or ["it does not say why"])[-1][:300] if code else None


def _take_part(asked: dict[str, Any]) -> None:
    """Unpack code from standard input, and replace this process by the run's node; on failure clean up and say why."""
    folder = os.path.abspath(os.path.expanduser(asked["folder"]))
    root = "/".join((folder, "runs", asked["run"], asked["host"]))
    try:
        python = _prepare(asked, folder, root)
    except subprocess.CalledProcessError as error:
        last = (error.stdout or b"").decode(errors="replace").strip().splitlines()[-1:]
        refused = f"its packages cannot be installed ({''.join(last)[:200]})"
    except (OSError, tarfile.TarError) as error:
        refused = f"{root} cannot be written ({getattr(error, 'strerror', None) or error})"
    else:
        os.chdir(f"{root}/code")  # where a task's file is found by the name that the run has for it
        os.environ["PYTHONPATH"] = f"{root}/code"
        _say({"ready": root})
        os.execv(python, [python, "-u", "-m", "hetopt.backends.ssh.node", root])
    shutil.rmtree(root, ignore_errors=True)
    _say({"refused": refused})


def _prepare(asked: dict[str, Any], folder: str, root: str) -> str:
    """Put all that the node needs into its folder; return the path of the Python that will run it.

    Args:
        asked: the request to take part, whose code follows on standard input.
        folder: folder of the user's inventory.
        root: the run's own folder below it, made anew.

    Raises:
        OSError: the folder cannot be written, or the code is not what was sent.
        CalledProcessError: its packages cannot be installed.
    """
    # What was made for the run goes with it, and nothing that was there before; a host that lost power has it still.
    made_folder = not os.path.exists(folder) or os.path.exists(f"{root}/{MADE}")
    data = sys.stdin.buffer.read(asked["bytes"])
    if hashlib.sha256(data).hexdigest() != asked["sha256"]:
        raise OSError("the code did not arrive as it was sent")
    _end_earlier(root)
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(f"{root}/run", mode=0o700)
    if made_folder:
        open(f"{root}/{MADE}", "w").close()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for entry in archive.getmembers():
            if not entry.isreg() or entry.name.startswith("/") or ".." in entry.name.split("/"):
                raise OSError("the code holds what is no file of it")
        archive.extractall(f"{root}/code")
    descriptor = os.open(f"{root}/{CONFIG}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({**asked["config"], "made": made_folder}, file)
    with open(f"{root}/{PID}", "w") as file:
        file.write(str(os.getpid()))
    return _installed(root, gpu=asked["gpu"]) if asked["install"] else sys.executable


def _installed(root: str, *, gpu: bool) -> str:
    """Make an environment with the packages that the code's locks and the task's own requirements pin by hash.

    torch for CPUs comes from an index of its own. pip keeps nothing for another time, which would stay behind.

    Returns:
        The path of the environment's Python.

    Raises:
        CalledProcessError: the environment or a package cannot be made; its output says why.
        OSError: the folder cannot be written, or an earlier attempt has left its temporary folder.
    """
    python = f"{root}/venv/bin/python"
    temporary = f"{root}/tmp"
    os.mkdir(temporary)
    locks = f"{root}/code/locks/{platform.machine()}"
    wanted = [["--requirement", f"{locks}-{'gpu' if gpu else 'cpu'}.txt"]]
    if not gpu:
        wanted.append(["--index-url", CPU_TORCH_INDEX, "--requirement", f"{locks}-cpu-torch.txt"])
    task_requirements = f"{root}/code/task/requirements.txt"
    if os.path.exists(task_requirements):
        wanted.append(["--requirement", task_requirements])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    safe = ["--only-binary", ":all:", "--require-hashes"]
    for command in ([sys.executable, "-m", "venv", f"{root}/venv"], *([*pip, *safe, *options] for options in wanted)):
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": temporary},
        )
    shutil.rmtree(temporary)
    return python


def _end_earlier(root: str) -> None:
    """End the node of an earlier connection, which may not know that it was cut off, and return once it is gone.

    Its children end with it. A node that does not end within `_GONE_S` seconds is killed.
    """
    pid, until_s = _node_of(root), time.monotonic() + _GONE_S
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    while pid is not None and _node_of(root) == pid:
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ in ("hetopt_host", "__main__"):
    main()
