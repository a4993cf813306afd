"""The program that `hetopt hosts check` runs on a host: it says what is there, tries the ways to the others, and ends.

Standard library alone: it is sent to machines as they are. It writes nothing to
any disk. After what it found it waits for the others' addresses on its standard input, and listens meanwhile on its own
private address for those that know the round's token. The equation of a rate: bytes that arrived over the time between
the first and the last of them, while all hosts send to their neighbours at once, as a ring does.
"""

from __future__ import annotations

import glob
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib import metadata
from typing import Any

MARK = "HETOPT-SAYS "
PACKAGES = ("torch", "numpy", "pydantic", "psutil", "safetensors", "scikit-learn")
CONNECT_S = 2.0
SEND_S = 0.3
CHUNK = 65536
MOST_WAITING_S = 30.0
RATE = struct.Struct("!Q")


def main() -> None:
    """Report on this host, then answer the round."""
    asked = json.loads(sys.stdin.buffer.readline().decode())
    address = asked["address"] or _reached_as()
    listener, trouble = _listen(address)
    facts = _facts(asked)
    facts.update(address=address, port=listener.getsockname()[1] if listener else None, listen_trouble=trouble)
    if listener is not None:
        threading.Thread(target=_serve, args=(listener, asked["token"].encode()), daemon=True).start()
    _say(facts)
    line = sys.stdin.buffer.readline()
    while line:
        wish = json.loads(line.decode())
        _say(_try_ways(wish, asked["token"].encode()))
        line = sys.stdin.buffer.readline()


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write("\n" + MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def _reached_as() -> str | None:
    """Return the address by which ssh came here; None: not known."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and words[2] != "UNKNOWN" else None


def _listen(address: str | None) -> tuple[socket.socket | None, str | None]:
    if address is None:
        return None, "it cannot be seen by which address it was reached"
    try:
        family, kind, proto, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.bind(where)
        listener.listen(64)
        return listener, None
    except OSError as error:
        return None, str(error.strerror or error)


def _serve(listener: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    """Accept whoever knows the token; then receive, say how fast, and send as much."""
    try:
        connection.settimeout(MOST_WAITING_S)
        if _exactly(connection, len(token)) != token:
            return
        connection.sendall(b"y")
        if _exactly(connection, 1) == b"r":
            connection.sendall(RATE.pack(_receive(connection)))
            _send(connection)
    except OSError:
        pass  # the other end says what was wrong
    finally:
        connection.close()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data


def _send(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)
    end = time.monotonic() + SEND_S
    chunk = b"1" + bytes(CHUNK - 1)
    while time.monotonic() < end:
        connection.sendall(chunk)
    connection.sendall(b"0" + bytes(CHUNK - 1))


def _receive(connection: socket.socket) -> int:
    """Receive until the sender ends; return its rate, bits per second."""
    chunk = _exactly(connection, CHUNK)
    begun, total = time.monotonic(), 0
    while chunk[:1] == b"1":
        chunk = _exactly(connection, CHUNK)
        total += CHUNK
    return int(8 * total / max(1e-6, time.monotonic() - begun))


def _try_ways(wish: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Connect to every other host, all at once; measure the way to one of them, both directions."""
    said: dict[str, Any] = {"reached": {}, "rates": {}}
    threads = []
    for name, address, port in wish["others"]:
        way = (said, name, address, port, token, name in wish["measure"])
        threads.append(threading.Thread(target=_try_way, args=way, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_WAITING_S)
    return said


def _try_way(said: dict[str, Any], name: str, address: str, port: int, token: bytes, measures: bool) -> None:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(MOST_WAITING_S)
            connection.sendall(token)
            said["reached"][name] = "yes" if _exactly(connection, 1) == b"y" else "somebody else answers"
            if measures:
                connection.sendall(b"r")
                _send(connection)
                there = RATE.unpack(_exactly(connection, RATE.size))[0]
                said["rates"][name] = [there, _receive(connection)]
            else:
                connection.sendall(b"q")
    except OSError as error:
        said["reached"].setdefault(
            name, "timed out" if isinstance(error, TimeoutError) else str(error.strerror or error)
        )


def _facts(asked: dict[str, Any]) -> dict[str, Any]:
    folder = os.path.expanduser(asked["folder"])
    there = folder
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    return {
        "python": list(sys.version_info[:2]),
        "executable": sys.executable,
        "identity": identity(),
        "time_s": time.time(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "writable": os.access(there, os.W_OK | os.X_OK),
        "there": there,
        "free_bytes": disk.f_bavail * disk.f_frsize,
        "shared_bytes": shared_bytes(),
        "open_files": open_files(),
        "packages": _packages(),
        "installs": _installs() if asked["install"] else None,
        "gpus": _gpus(),
        "cuda": _cuda(),
        "left": _left(folder),
    }


def _left(folder: str) -> list[str]:
    """Return the folders of runs whose node is gone: a machine that lost power could not remove its own."""
    folders = []
    for pid_file in glob.glob(glob.escape(folder) + "/runs/*/*/pid"):
        try:
            with open(pid_file) as file:
                pid = int(file.read())
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                lives = os.path.dirname(pid_file).encode() in file.read().split(b"\0")
        except (OSError, ValueError):
            lives = False
        if not lives:
            folders.append(os.path.dirname(pid_file))
    return sorted(folders)


def identity() -> str:
    """Return the identity that two names for one machine share: this boot of its kernel, this view of its network."""
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:
        parts.append(socket.gethostname())
    return " ".join(parts)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def shared_bytes() -> int | None:
    """Return the size of /dev/shm, in which processes hand each other tensors."""
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize


def open_files() -> int | None:
    """Return how many files a process of this user may have open; None: as many as it wants."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def _packages() -> dict[str, str | None]:
    """Return the versions of packages that training needs, without importing any; null where one is not there."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _installs() -> str | None:
    """Return why packages cannot be installed here; None: this Python lacks nothing for it."""
    try:
        import ensurepip  # noqa: F401  # Debian has it in a package of its own
        import venv  # noqa: F401
    except ImportError as error:
        return f"its Python has no {error.name}"
    return None


def _nvidia(*arguments: str) -> tuple[int | None, str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=10,
        )
        return done.returncode, done.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None, ""


def _gpus() -> list[list[str]] | str:
    """Return name, MiB and driver of each GPU; a sentence where the driver does not answer; nothing without one."""
    code, text = _nvidia("--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
    if code is None:
        return []
    if code != 0:
        return text.strip()[:200] or "nvidia-smi fails"
    return [[word.strip() for word in line.split(",")] for line in text.strip().splitlines()]


def _cuda() -> str | None:
    """Return the newest CUDA version that the driver runs, as nvidia-smi heads its table."""
    _, text = _nvidia()
    match = re.search(r"CUDA\b[^:|]*Version:\s*([0-9.]+)", text)
    return match[1] if match else None


if __name__ in ("hetopt_host", "__main__"):
    main()
