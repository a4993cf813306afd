"""Sentences on why a worker cannot go on: its error, what that means, and the line of the user's code."""

from __future__ import annotations

import re
import sys
import traceback
from contextlib import AbstractContextManager, suppress
from itertools import dropwhile
from pathlib import Path
from textwrap import shorten
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, tell_failure
from hetopt.core.plain_text import without_colours
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import DATA_PLACE

_PACKAGES = "site-packages"
_QUOTED = re.compile(r'^ +File "(.+)", line (\d+)', re.MULTILINE)
"""A frame of a traceback in text, as Python prints it and torch's loader passes it on."""
MOST_SAID = 240
"""Most characters of an error's words: three lines of a terminal."""


class Lines:
    """The finder of the user's line that runs now or that raised an error, in a script and the modules beside it.

    Args:
        script: path of the script, as sentences name it; files in its folder count as the user's, too.
    """

    def __init__(self, script: str) -> None:
        self._script = Path(script).resolve()
        self._name = script

    def now(self) -> str | None:
        """Return the user's innermost line being executed, as ``train.py, line 12``; None: no line of the user's is."""
        frames = walk_stack(sys._getframe(1))
        places = (self._place(_module(frame), frame.f_code.co_filename, line) for frame, line in frames)
        return next(filter(None, places), None)

    def of(self, error: BaseException) -> str:
        """Return the user's innermost line that an error went through, as ``train.py, line 12``; else the script alone.

        An error of a reader process quotes its traceback as text; what is quoted lies further in than what caught it.
        """
        frames = ((_module(frame), frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
        quoted = (("", file, int(line)) for file, line in _QUOTED.findall(str(error)))
        places = [place for frame in (*frames, *quoted) if (place := self._place(*frame)) is not None]
        return places[-1] if places else self._name

    def _place(self, module: str, file: str, line: int) -> str | None:
        """Return a line as ``train.py, line 12``.

        None: its file is a package's, generated, or not beside the script.
        """
        has_no_file = file.startswith("<")  # Python's frozen modules, what a dataclass generates
        if has_no_file or module.partition(".")[0] in ("hetopt", "torch") or _PACKAGES in file:
            return None
        path = Path(file).resolve()
        if path == self._script:
            return f"{self._name}, line {line}"
        return f"{path.name}, line {line}" if path.is_relative_to(self._script.parent) else None


def reason_of(error: BaseException) -> str:
    """Return an error's type and message on one line, cut to 240 characters with ``...`` at the end.

    Of an error that quotes the traceback of another process: what that process ended with.
    """
    text = without_colours(str(error))
    quoted = dropwhile(lambda line: line.startswith(" "), text.rpartition('\n  File "')[2].splitlines()[1:])
    message = " ".join(quoted) if _QUOTED.search(text) else f"{type(error).__name__}: {text}" if text else ""
    return shorten(message or type(error).__name__, MOST_SAID, placeholder=" ...")


def _module(frame: FrameType) -> str:
    """Return the full name of a frame's module, also of one started by ``python -m``; a script has none."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__") if spec is None else spec.name)


# What gloo says when the process at the other end is gone. It raises plain RuntimeErrors.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "connectFullMesh failed",
)

# What is refused memory says so in a plain RuntimeError that only its text tells apart: torch's CPU allocator, and the
# libraries that keep a workspace of their own on a GPU.
_MEMORY_REFUSED = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OthersFailed(RunFailed):
    """The error of a worker that ends only because another one has ended, which (or whose host) logs the reason."""


class FailureReport(AbstractContextManager["FailureReport"]):
    """A context around all that a worker does, which logs and suppresses the exception that ends the worker.

    Of the exceptions, KeyboardInterrupt, SystemExit and others that are no `Exception` pass through. The sentence is
    also printed to the standard error, with a traceback unless the error is hetopt's own.

    Every rank may log ``run_failed`` (a short line is appended whole); the first reason of an attempt counts. A worker
    that merely lost a peer logs nothing: the peer, or the host that saw it die, knows why.

    Args:
        run_dir: folder of the run.
        rank: rank of the worker.

    Attributes:
        exit_code: exit code that the process should have; 0: no error ended the worker.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self.exit_code = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Explain an exception on stderr and in the run's log, keep its exit code, and swallow it.

        A lost peer is not logged: whoever is lost says why. KeyboardInterrupt, SystemExit and no error pass through.
        """
        if not isinstance(error, Exception):
            return False  # none, or KeyboardInterrupt, SystemExit: somebody else's decision
        if not isinstance(error, HetoptError):
            traceback.print_exception(kind, error, trace, file=sys.stderr)
        if not is_peer_loss(error):
            lines = None
            with suppress(HetoptError):  # no run is there to say which task or script it is
                spec = read_spec(self._run_dir)
                lines = Lines(spec.script[0] if spec.script else spec.task.partition(":")[0])
            failure = explain(error, f"worker {self._rank}", lines)
            self.exit_code = failure.exit_code
            # Without a folder there is no log to tell; the sentence on stderr is then all there is.
            if self._run_dir.is_dir():
                tell_failure(self._run_dir / EVENTS_FILE, failure.message, hint=failure.hint, rank=self._rank)
            print(f"{type(failure).__name__}: {failure.message}", file=sys.stderr)
        else:
            if isinstance(error, OthersFailed):
                print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
            self.exit_code = RunFailed.exit_code
        return True


def is_peer_loss(error: Exception) -> bool:
    """Return whether an error only means that another worker is gone, so that this one is not the cause."""
    if isinstance(error, (OthersFailed, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _PEER_LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_REFUSED)


def explain(error: Exception, who: str = "", lines: Lines | None = None) -> HetoptError:
    """Return an error as a HetoptError, with worker, user's line and message in a sentence, a hint and an exit code.

    A HetoptError is returned as it is.

    Args:
        error: error of a worker, or of a script that is measured.
        who: name of the worker, as "worker 3"; empty: there is a single one.
        lines: finder of the line in the user's files; None: these are not known.
    """
    if isinstance(error, HetoptError):
        return error
    place = ", ".join(part for part in (who, "" if lines is None else lines.of(error)) if part)
    reason, hint = reason_of(error), "see that it runs by itself with these arguments"
    if is_out_of_memory(error):
        hint = (
            "lower max_local_batch_size of this worker in the plan's run spec, or let the devices of a machine share "
            'the model (`shard="full"`)'
        )
    elif who and isinstance(error, (RuntimeError, ValueError, IndexError)):
        hint += (
            ", and takes sizes from its batches, as by len(images): a worker has a part of each. What is kept from "
            'batch to batch, as hidden states, wants parts of one size: `batch_policy="uniform"`'
        )
    elif isinstance(error, FileNotFoundError):
        hint = (
            "see that the file is on every worker's machine; for it to travel there, launch with `data` naming its "
            f"folder, and {DATA_PLACE} in its place among the script's arguments"
        )
    return RunFailed(f"{place}: {reason}", hint=hint)
