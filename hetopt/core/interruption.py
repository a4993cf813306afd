"""Signals that end a command: SIGTERM and SIGHUP do what Ctrl-C does, and none of them cuts the tidying up short.

A signal becomes an exception, so that every ``finally`` and ``except BaseException`` on the way is run: what the
command has started is stopped, and what it has made for itself is removed. From then on further signals are only told
of, until the command has ended.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """SIGTERM or SIGHUP came. No KeyboardInterrupt: nobody may take it for the wish to go on with less."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: KeyboardInterrupt | Terminated) -> int:
    """What a shell gives for a command that the signal ended: 130 (SIGINT), 143 (SIGTERM) or 129 (SIGHUP)."""
    return 128 + (error.number if isinstance(error, Terminated) else int(signal.SIGINT))


class _Command:
    """What this process does when a signal comes."""

    def __init__(self) -> None:
        self.is_ending = False
        self.in_the_way = ""
        self.terminals: list[int] = []

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._let_go_of_terminals()
        if self.is_ending:
            _write(f"still ending, please wait{self.in_the_way}\n")
            return
        self.is_ending = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def _let_go_of_terminals(self) -> None:
        """A terminal that has gone refuses what is written to it, and that must not end the tidying up."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self.terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        self.terminals.clear()


_COMMAND = _Command()


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end what is inside by an exception; those that are ignored (nohup) stay so.

    After one of them has ended it, nothing is left but this process's own end, and its exit code: further ones are
    ignored.

    Raises:
        KeyboardInterrupt: SIGINT came.
        Terminated: one of the others did.
    """
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    _COMMAND.is_ending, _COMMAND.in_the_way = False, ""
    _COMMAND.terminals = [descriptor for descriptor in (0, 1, 2) if _is_terminal(descriptor)]
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
    """Before `ends_by_signals` and after it there is nothing to tidy up: a signal ends the process with its exit code.

    Python would print a traceback there, and end as if the signal had killed it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def hears_nothing_more() -> None:
    """All is done and said, and the exit code is decided: while Python takes itself apart, it would let go of its
    handlers first, and a signal would kill it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Where Ctrl-C comes while a text is executed, as a dataclass is made by one, CPython remembers that
    # although the exception is caught, and kills `python -m` by SIGINT in the end, whatever its exit code. Each text
    # that is executed lets it forget (Python/pythonrun.c, `unhandled_keyboard_interrupt`).
    exec("")


@contextmanager
def in_one_piece() -> Iterator[None]:
    """What is inside is done whole, such as starting a process and writing down which: signals are heard afterwards."""
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
    """The command takes Ctrl-C for the wish to go on with what it has: the next signal is heard again."""
    _COMMAND.is_ending = False


@contextmanager
def stopping(what: str, command: str | None, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Stop inside what this command has started; signals wait until that is done.

    Where it cannot be stopped, the last line says what may still run and how to end it.

    Args:
        what: that is stopped, such as "run 2026-1-digits".
        command: that would end it; None: it ends with this process, however that ends.
        tell: says what goes on.
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


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _write(text: str) -> None:
    """To standard error, also from within a signal handler."""
    with suppress(OSError):
        os.write(2, text.encode())
