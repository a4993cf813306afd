"""How a command ends by signals, shares a machine's processors, and reports progress.

SIGTERM and SIGHUP do what Ctrl-C does. The first signal becomes an exception, so that every ``finally`` and ``except
BaseException`` on the way is run: what the command has started is stopped, and what it has made for itself is removed.
Further signals only print a line until the command has ended. Processes that it starts end with it
(`die_with_parent`), and share the cores that the machine or its control group has (`openmp_environment`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """The exception that SIGTERM and SIGHUP raise inside `ends_by_signals`; it is no KeyboardInterrupt, on purpose.

    Nobody may take it for the wish to go on with less.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: KeyboardInterrupt | Terminated) -> int:
    """Return the shell's exit code of a command that a signal ended: 130 (SIGINT), 143 (SIGTERM) or 129 (SIGHUP)."""
    return 128 + (error.number if isinstance(error, Terminated) else int(signal.SIGINT))


class _Command:
    """The signal handler of this process, and whether it is ending."""

    def __init__(self) -> None:
        """Make the state of a process that no signal has reached."""
        self.is_ending = False
        self.in_the_way = ""
        self.terminals: list[int] = []

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise the first signal's exception; answer further ones by a line; let go of a terminal that hung up.

        Raises:
            KeyboardInterrupt: the first signal is SIGINT.
            Terminated: the first signal is another.
        """
        if number == signal.SIGHUP:
            self._let_go_of_terminals()
        if self.is_ending:
            _write(f"still ending, please wait{self.in_the_way}\n")
            return
        self.is_ending = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def _let_go_of_terminals(self) -> None:
        """Redirect a terminal that has gone to /dev/null, so that writing to it does not end the tidying up."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self.terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        self.terminals.clear()


_COMMAND = _Command()


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP inside a with block into an exception; signals ignored by nohup stay so.

    After the first, further signals only print "still ending, please wait". Behind a block that a signal has ended,
    they are ignored; behind any other, earlier handlers are back. Only the main thread can do this.

    Raises:
        KeyboardInterrupt: SIGINT came.
        Terminated: SIGTERM or SIGHUP came.
    """
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    _COMMAND.is_ending, _COMMAND.in_the_way = False, ""
    _COMMAND.terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            before[number] = handler
            signal.signal(number, _COMMAND.on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if _COMMAND.is_ending else handler)
        _COMMAND.is_ending = False


def ends_at_once() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end the process at once from now on, untidied, with exit code 128 + number.

    Python would print a traceback there, and end as if the signal had killed it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP until the process exits, once its exit code is decided.

    Python drops its handlers before it ends, and a signal would then kill it with another code.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Where Ctrl-C comes while a text is executed, as a dataclass is made by one, CPython remembers that
    # although the exception is caught, and kills `python -m` by SIGINT in the end, whatever its exit code. Each text
    # that is executed lets it forget (Python/pythonrun.c, `unhandled_keyboard_interrupt`).
    exec("")


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP to the end of a with block; in threads but the main one, do nothing.

    For a block that starts a process and records its id.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waiting in dict.fromkeys(came):
            os.kill(os.getpid(), waiting)


def goes_on() -> None:
    """Let the next signal interrupt again inside `ends_by_signals`, after a Ctrl-C that only meant to end a part."""
    _COMMAND.is_ending = False


@contextmanager
def stopping(what: str, command: str | None, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Answer signals by "still ending, please wait" alone, while the block stops ``what``, such as a run.

    It does so inside `ends_by_signals`; elsewhere signals act as usual. Where the block raises, the last line on
    standard error says what may still run and how to end it.

    Args:
        what: thing that the block stops, such as "run 2026-1-digits".
        command: shell command that would end it; None: it ends with this process, however that ends, so that nothing is
            told.
        tell: receives the line that it is being stopped; None: nobody.
    """
    before = _COMMAND.is_ending
    _COMMAND.is_ending = True
    _COMMAND.in_the_way = f"; should this process be killed, `{command}` ends {what}" if command else ""
    if tell is not None:
        with suppress(OSError, ValueError):  # a terminal that is gone, or a closed stream
            tell(f"stopping {what}")
    try:
        yield
    except BaseException:
        if command:
            _write(f"{what} may still run; `{command}` ends that\n")
        raise
    finally:
        _COMMAND.is_ending, _COMMAND.in_the_way = before, ""


def _write(text: str) -> None:
    """Write to standard error, also from within a signal handler."""
    with suppress(OSError):
        os.write(2, text.encode())


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int, death_signal: signal.Signals) -> None:
    """Ask the Linux kernel to send this process ``death_signal`` when its parent process ends; elsewhere do nothing.

    The kernel counts the *thread* that started this process as the parent, so start processes from a thread that lives
    as long as the run. Where the parent has ended already, this process gets the signal at once.

    Args:
        parent_pid: the process that this one must not outlive; it must be the direct parent. 0: it may outlive any.
        death_signal: SIGTERM lets this process end its own children first, SIGKILL is certain.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux" or not parent_pid:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)


class StopSignal:
    """A recorder of the first SIGTERM or SIGINT after `listen`, for a process that ends where it can end well.

    Calling it returns the signal's number, or None.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def listen(self) -> None:
        """Record SIGTERM and SIGINT from now on, instead of being ended by them; only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __call__(self) -> int | None:
        """Return the number of the first signal that came since `listen`; None: none came."""
        return self._number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number


THREADS_VARIABLE = "OMP_NUM_THREADS"
SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN = {"GOMP_SPINCOUNT": "20000"}
"""OpenMP variable that keeps threads from spinning for long. OpenMP threads wait for each other by spinning, for
milliseconds by default. Whenever something else wants a processor, they then spin where the awaited thread should
run, and a step takes ten times as long. A short spin (some 0.1 ms) still bridges the gaps between operators: alone a
step is as quick, beside another worker six times as quick."""

_MOUNTED = Path("/sys/fs/cgroup")


def openmp_environment(workers: int, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the OpenMP variables to add to ``given`` for each of ``workers`` worker processes on this machine.

    The processors are shared out equally, at least one thread a worker, because every worker would otherwise start a
    thread for each of them. They must be set before torch is loaded. A variable that is in ``given`` is left as it is.

    Args:
        workers: number of worker processes, at least 1.
        given: environment that the workers have already.
    """
    threads = {} if THREADS_VARIABLE in given else {THREADS_VARIABLE: str(max(1, usable_processors() // workers))}
    return threads if any(name in given for name in SPIN_VARIABLES) else threads | SPIN


def usable_processors(mounted: Path = _MOUNTED) -> int:
    """Return the number of processors that this process may use: its affinity, or fewer by its control group's quota.

    A quota is rounded down, as by Rust's ``available_parallelism``: a team of more threads is stopped in every period.

    Args:
        mounted: folder of control groups (version 2 or 1); in a container its own is the first.
    """
    allowed = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such group here, or "max"
            words = [word for name in names for word in (mounted / name).read_text(encoding="utf-8").split()]
            quota_us, period_us = map(int, words)
            if quota_us > 0:
                allowed = min(allowed, max(1, quota_us // period_us))
    return allowed


PIECES = " · "
"""Separator between the phrases of a progress: a line of a terminal may break there."""


def _silent(text: str, done: float | None = None) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """The callbacks that a long call reports its progress and remarks to; silent by default.

    Attributes:
        progress: called with what is going on, and the part of it that is done (0 to 1; None: nobody knows).
        note: called with a remark that is worth keeping.
    """

    progress: Callable[[str, float | None], None] = _silent
    note: Callable[[str], None] = _silent

    def __call__(self, text: str, done: float | None = None) -> None:
        """Report what is going on, and the part of it that is done (0 to 1; None: nobody knows)."""
        self.progress(text, done)
