"""Processes that are forks of one that has imported what they need: torch takes seconds to import, a fork milliseconds.

A `ForkServer` is a process with one thread that has imported modules and does nothing but fork. What it forks runs
``-m MODULE ARGUMENTS`` as Python would, with an environment, files and a session of its own, and is a child of whoever
asked, as if that had started it: signals, exit codes and the end of its parent reach it in the same way. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from hetopt.core.search_path import begin_in

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_LENGTH_BYTES = 8
_MOST_FILES = 16
_OWN_FILES = 4
"""Of each request: standard input, output and error, and the pipe that the process's number comes back by."""
_ROOM = 4096
"""For the words of forks, which are shown where those of their server were."""
_SOON_S = 0.0005
_ENDING_S = 5.0
"""A server that is closed has nothing to do but to end: one that takes longer is frozen, or still imports."""
_LONGEST_IMPORT_S = 600.0
"""How long a fork may take: the first waits until torch was read, from whatever disk; later ones take milliseconds."""
_ENDED_BY_SIGNALS = (signal.SIGTERM, signal.SIGINT)

File = IO[Any] | int


WORKERS_NEED = ("hetopt.trainer.loop", "torch._dynamo")
"""Modules that a worker imports before its first step; the second is for DistributedDataParallel and for every
optimizer."""


class NoFork(OSError):
    """The error that no process can be forked, as there is no fork server (any more): start the process by itself."""


class ForkedProcess:
    """A child process that a `ForkServer` has forked, with the methods that `subprocess.Popen` has without pipes.

    Its attributes are ``pid`` and ``returncode`` (None: not known to have ended), as of `subprocess.Popen`.

    Args:
        pid: number of the process, a child of this one.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the process's exit code, or -N if signal N ended it; None while it runs. Does not wait."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, ``timeout`` seconds at most (None: for ever), and return its code as `poll`.

        Raises:
            subprocess.TimeoutExpired: it has not within so many seconds.
        """
        until_s = None if timeout is None else time.monotonic() + timeout
        pause_s = _SOON_S
        while (code := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal ``number`` to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A connection to a process that has imported modules and forks others on request; it ends with its clients.

    Args:
        connection: socket to the server.
        process: the server itself.
    """

    def __init__(self, connection: socket.socket, process: ForkedProcess | subprocess.Popen[bytes]) -> None:
        self._connection, self._process = connection, process
        connection.settimeout(_LONGEST_IMPORT_S)

    @classmethod
    def of_this_process(cls) -> ForkServer:
        """Return a fork server that is a fork of this process, with all its imports.

        Raises:
            NoFork: the system is not Linux, or this process has a second thread, which a fork would lose.
        """
        _check_system()
        gc.freeze()  # looking for cycles among what is imported would copy it
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _serve(theirs.detach())
        theirs.close()
        server = cls(ours, ForkedProcess(pid))
        # Counted afterwards: those of numpy's OpenBLAS end before a fork, and start again when they are needed.
        if _threads() > 1:
            server.close()
            raise NoFork("threads run in this process.")
        return server

    @classmethod
    def importing(cls, modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """Return a fork server that is a new Python process, which imports modules first; does not wait for that.

        Args:
            modules: names of the modules to import first, in order.
            environment: environment of the server. What libraries read as they are loaded (the number of OpenMP's
                threads) holds for all that it forks.

        Raises:
            NoFork: the system is not Linux.
        """
        _check_system()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules, " " * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return cls(ours, process)

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: File,
        stderr: File = subprocess.STDOUT,
        stdin: File = subprocess.DEVNULL,
        folder: Path | None = None,
        network: Path | None = None,
        keep: Iterable[int] = (),
    ) -> ForkedProcess:
        """Fork a child of this process that runs Python with ``arguments``, in a session of its own, and return it.

        Args:
            arguments: arguments of Python: ``-m MODULE`` or a file, then those that the program sees.
            environment: whole environment of the child.
            stdout: file that it writes to.
            stderr: file that it writes errors to; `subprocess.STDOUT`: the same as ``stdout``.
            stdin: file that it reads from; `subprocess.DEVNULL`: nothing.
            folder: folder that it starts in; None: this process's.
            network: file of a network namespace that it enters; None: this process's.
            keep: files that the child's server passes on to it open.

        Raises:
            NoFork: the server has ended or is frozen (it is closed then), or the child could not enter the network.
        """
        request = {
            "arguments": [*arguments],
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
            "network": network and str(network),
            "parent": os.getpid(),
        }
        reading, writing = os.pipe()
        with (
            open(os.devnull, "rb") as nothing,
            open(reading, "rb") as reader,
            open(writing, "wb") as telling,
            _adopting(),
        ):
            files = [nothing if stdin == subprocess.DEVNULL else stdin, stdout]
            files.append(stdout if stderr == subprocess.STDOUT else stderr)
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            body = json.dumps(request).encode()
            try:
                length = len(body).to_bytes(_LENGTH_BYTES, "big")
                socket.send_fds(self._connection, [length], [*numbers, telling.fileno(), *keep])
                self._connection.sendall(body)
            except OSError as error:
                raise NoFork("the process to fork from has ended.") from error
            telling.close()
            if not select.select([reader], [], [], _LONGEST_IMPORT_S)[0]:
                self.close()  # it is frozen, and would fork when nobody waits for that any more
            pid = reader.read()
        if not pid:
            raise NoFork("the process to fork from has ended.")
        return ForkedProcess(int(pid))

    def close(self) -> None:
        """End the server, after 5 s by SIGKILL; the processes that it has forked live on."""
        self._connection.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _check_system() -> None:
    if sys.platform != "linux":
        raise NoFork("only on Linux.")


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


_one_adopts = threading.Lock()


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt descendants inside whose parent, a fork of the server, has ended; one thread at a time, others wait.

    Raises:
        NoFork: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _one_adopts:
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise NoFork(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) was refused")
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(descriptor: int) -> NoReturn:
    """Fork a process for each request over the socket ``descriptor``; end once the socket's other end is closed.

    All other files but the standard ones are closed first, and signals that would end this process are ignored. The
    processes become children of whoever asked, not of this one.
    """
    for low, high in ((3, descriptor), (descriptor + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(low, high)
    # They are for those that it forks, or for whoever asks, who ends this process by ending.
    handled = [number for number in _ENDED_BY_SIGNALS if signal.signal(number, signal.SIG_IGN) != signal.SIG_IGN]
    connection = socket.socket(fileno=descriptor)
    _show_in_process_list(["-m", "hetopt.trainer.host.forks", *sys.argv[1:]])
    while True:
        length, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        if not length:
            os._exit(0)
        body = connection.recv(size := int.from_bytes(length, "big"), socket.MSG_WAITALL)
        if len(body) < size:
            os._exit(0)
        request = json.loads(body)
        between = os.fork()
        if between == 0:
            # The parent of the one that is wanted ends at once, so that the kernel gives it to whoever asked.
            parent = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            connection.close()
            _become(request, files, handled, orphan_of=parent)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _become(request: Mapping[str, Any], files: Sequence[int], handled: Sequence[int], *, orphan_of: int) -> NoReturn:
    """Become the process that was asked for, run its program and end with its code; never return as a second server.

    Args:
        request: as `ForkServer.start` sends it.
        files: descriptors of standard input, output and error, of the pipe that takes this process's number, and to
            keep.
        handled: signals that the server ignores and this process is to hear.
        orphan_of: parent whose end is waited for, so that whoever asked is the parent then.
    """
    code = 1
    try:
        _reset_signals(handled)
        os.setsid()
        if request["network"] is not None:
            _enter_network(Path(request["network"]))
        for standard, file in enumerate(files[: _OWN_FILES - 1]):
            os.dup2(file, standard)
            os.close(file)
        _open_streams()
        os.chdir(request["folder"])
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # what was found when libraries were loaded, by another environment
        _show_in_process_list(request["arguments"], before)
        while os.getppid() == orphan_of:
            time.sleep(_SOON_S)
        if os.getppid() != request["parent"]:
            os._exit(1)  # nobody waits for it
        os.write(files[_OWN_FILES - 1], str(os.getpid()).encode())
        os.close(files[_OWN_FILES - 1])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # no two draw the same numbers; Python's own generator sees to itself
        code = _run(request["arguments"])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code)


def _reset_signals(ignored_meanwhile: Sequence[int]) -> None:
    """Reset signals with a Python handler, and ``ignored_meanwhile``, to the defaults of a program that begins.

    As with ``exec``, other signals that are ignored stay so.

    Args:
        ignored_meanwhile: numbers of signals that the server ignored for itself alone.
    """
    listened_to = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    for number in listened_to.union(ignored_meanwhile):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _open_streams() -> None:
    """Open the standard streams anew: Python remembers properties of their old files, such as whether they seek.

    Their files stay open when the new streams are closed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        usual = getattr(sys, f"__{name}__")
        buffering = 1 if usual.line_buffering or os.isatty(number) else -1
        stream = open(  # noqa: SIM115  # stays
            number, mode, buffering, encoding=usual.encoding, errors=usual.errors, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _enter_network(network: Path) -> None:
    """Enter the network namespace of the file ``network``; OSError: the kernel refuses."""
    with network.open("rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{network} was not entered")


def _show_in_process_list(arguments: Sequence[str], before: Mapping[str, str] | None = None) -> None:
    """Show these arguments and variables in the list of processes, instead of the ones that the fork began with.

    The kernel shows what lies where a process's words and variables lay when it began (see proc(5)). A secret that was
    among the variables is overwritten in any case. What does not fit is left out.

    Args:
        arguments: arguments of Python.
        before: variables before; new and changed ones are shown first. None: variables stay.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()  # the third and all after it
    words, words_end, variables, variables_end = (int(text) for text in fields[45:49])
    _overwrite(words, words_end, [sys.executable, *arguments])
    if before is not None:
        ordered = sorted(os.environ.items(), key=lambda item: before.get(item[0]) == item[1])
        _overwrite(variables, variables_end, [f"{name}={value}" for name, value in ordered])


def _overwrite(start: int, end: int, texts: Iterable[str]) -> None:
    """Overwrite the memory from ``start`` to ``end`` with texts, each ended by a zero byte, cut or filled up to fit."""
    room = end - start
    if room > 0:
        body = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(start, body[: room - 1].ljust(room, b"\0"), room)


def _run(arguments: Sequence[str]) -> int:
    """Run what Python runs with these arguments, then its exit handlers; return the exit code, -2 after an interrupt.

    Any other exception is printed and raised again.
    """
    with suppress(AttributeError):
        # Logs follow what it does line by line, and being killed takes none of them.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # unless something has replaced it
    try:
        _run_as_main(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # As Python does before it ends.
        threading._shutdown()  # type: ignore[attr-defined]  # no other name for it
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def _run_as_main(arguments: Sequence[str]) -> None:
    """Run ``-m MODULE`` or a file, with its arguments, as the main program; its exceptions are raised.

    ``sys.argv`` and the module search path become the program's.
    """
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        begin_in(os.getcwd())
        sys.modules.pop(arguments[1], None)  # it is __main__ now
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        begin_in(os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def only_imports() -> Iterator[None]:
    """Disable garbage collection inside, for quicker imports; afterwards exempt all objects so far from it.

    What is imported stays, and to search it takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_all(modules: Iterable[str]) -> None:
    """Import modules by name, with garbage collection off; it never searches their objects later.

    Raises:
        ImportError: a module is not to be found.
    """
    with only_imports():
        for name in modules:
            import_module(name)


def main(descriptor: int, modules: Sequence[str]) -> NoReturn:
    """Import modules, then fork processes on request over the socket ``descriptor``, until its other end closes.

    The process exits with a message where a thread runs after the imports.

    Raises:
        ImportError: a module is not to be found.
    """
    import_all(modules)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    if _threads() > 1:
        sys.exit("threads run after these imports: " + ", ".join(modules))
    _serve(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:-1])
