"""Output to a terminal, a file or a pipe: no control characters, the stream's encoding, and errors in a sentence.

Text of plans, profiles, logs and clouds is written by others. Every character that would do something instead of being
shown is spelled as JSON spells it, which is right in JSON and readable anywhere else.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.plain_text import escaped, is_plain, spelled

BROKEN_PIPE = 141
"""Exit code by which a shell knows a program that wrote to a pipe whose reader has gone: 128 + SIGPIPE."""

MOST_MESSAGE_CHARACTERS = 2_000
"""Most characters of a message that is shown whole; an error may quote what it complains about."""


class OutputLost(HetoptError):
    """The error of output that cannot be written: its reader has gone, or the disk is full."""

    exit_code = BadInput.exit_code


class ReaderGone(OutputLost):
    """The error of output whose reader has closed the pipe: nothing is wrong, and nothing is said."""

    exit_code = BROKEN_PIPE


def prepare() -> None:
    """Make stdout and stderr replace characters that their encoding lacks, and discard output where one is closed."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as this process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # likewise
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def check_arguments(arguments: Sequence[str]) -> None:
    """Check command-line arguments for control characters: names go from there into plans, files and scripts.

    Raises:
        BadInput: an argument holds a control character, or a byte that is no text.
    """
    for number, argument in enumerate(arguments, start=1):
        for character in argument:
            if not is_plain(character):
                raise BadInput(
                    f"argument {number} must be one line of printable characters, without U+{ord(character):04X}.",
                    hint="rename the file, or type the argument again",
                )


def write(text: str) -> None:
    """Write text or JSON to standard output, with control characters escaped.

    Raises:
        OutputLost: it cannot be written.
        ReaderGone: the reader has closed the pipe (an OutputLost).
    """
    with output_errors():
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(escaped(text, keep="\n").encode(encoding, _AS_JSON).decode(encoding))


def flush() -> None:
    """Flush standard output.

    Raises:
        OutputLost: it cannot be written.
        ReaderGone: the reader has closed the pipe (an OutputLost).
    """
    with output_errors():
        sys.stdout.flush()


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Turn an operating-system error of an output stream inside into hetopt's own.

    Raises:
        ReaderGone: the reader has closed the pipe.
        OutputLost: it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        kind = ReaderGone if error.errno == errno.EPIPE else OutputLost
        raise kind(f"the output cannot be written: {error.strerror}.", hint="make room, or write elsewhere") from None


def finish(code: int) -> int:
    """Flush the standard streams; return the exit code, or that of lost output where the command succeeded.

    Args:
        code: exit code that the command ends with.
    """
    lost = None
    for stream in (sys.stdout, sys.stderr):
        try:
            with output_errors():
                stream.flush()
        except OutputLost as error:
            _give_up(stream)
            lost = lost or error
    if lost is None:
        return code
    if code == 0 and not isinstance(lost, ReaderGone):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {lost.message}\n")
            sys.stderr.flush()
    return code or lost.exit_code


def _give_up(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device, as Python would flush it once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return the JSON escapes of characters that the encoding lacks, as a codec error handler does."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(spelled, error.object[error.start : error.end])), error.end


_AS_JSON = "hetopt-json"
codecs.register_error(_AS_JSON, _spelled)
