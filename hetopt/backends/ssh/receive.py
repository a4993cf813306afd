"""The program that begins a host's part in a run: it takes the code, checks it, and becomes the node.

Standard library alone, sent like `look`. Everything it writes is in one folder, which it makes anew and which the node
removes when it ends; so is the environment that it installs where that is wanted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

MARK = "HETOPT-SAYS "
CONFIG = "host.json"
PID = "pid"
MADE = "made"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_GONE_S = 15.0


def main() -> None:
    """Take the code, say so, and become the node."""
    asked = json.loads(sys.stdin.buffer.readline().decode())
    folder = os.path.abspath(os.path.expanduser(asked["folder"]))
    names = (asked["run"], asked["host"])
    if not all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names):
        _say({"refused": "the run or the host is called as no folder is"})
        return
    root = "/".join((folder, "runs", *names))
    # What was made for the run goes with it, and nothing that was there before; a host that lost power has it still.
    made_folder = not os.path.exists(folder) or os.path.exists(f"{root}/{MADE}")
    asked["config"]["made"] = made_folder
    data = sys.stdin.buffer.read(asked["bytes"])
    if hashlib.sha256(data).hexdigest() != asked["sha256"]:
        _say({"refused": "the code did not arrive as it was sent"})
        return
    try:
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
            json.dump(asked["config"], file)
        with open(f"{root}/{PID}", "w") as file:
            file.write(str(os.getpid()))
        python = _installed(root, gpu=asked["gpu"]) if asked["install"] else sys.executable
    except (OSError, tarfile.TarError) as error:
        shutil.rmtree(root, ignore_errors=True)
        _say({"refused": f"{root} cannot be written ({getattr(error, 'strerror', None) or error})"})
        return
    except subprocess.CalledProcessError as error:
        shutil.rmtree(root, ignore_errors=True)
        last = (error.stdout or b"").decode(errors="replace").strip().splitlines()[-1:]
        _say({"refused": f"its packages cannot be installed ({''.join(last)[:200]})"})
        return
    os.chdir(f"{root}/code")  # where a task's file is found by the name that the run has for it
    os.environ["PYTHONPATH"] = f"{root}/code"
    _say({"ready": root})
    os.execv(python, [python, "-u", "-m", "hetopt.backends.ssh.node", root])


def _installed(root: str, *, gpu: bool) -> str:
    """Make an environment with the packages whose hashes the code names; return its interpreter.

    torch for CPUs has an index of its own. What pip keeps for another time would stay behind, so it keeps nothing.

    Raises:
        CalledProcessError: that cannot be done; what was said last says why.
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


def _say(what: dict[str, str]) -> None:
    sys.stdout.write("\n" + MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def _end_earlier(root: str) -> None:
    """End the node of an earlier connection that does not know yet that it was cut off; its children end with it."""
    try:
        with open(f"{root}/{PID}") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except (OSError, ValueError):
        return
    if b"hetopt.backends.ssh.node" not in words or root.encode() not in words:
        return  # the number is another process's by now
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _GONE_S
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    if os.path.exists(f"/proc/{pid}"):
        os.kill(pid, signal.SIGKILL)


if __name__ in ("hetopt_host", "__main__"):
    main()
