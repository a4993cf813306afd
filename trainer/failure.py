"""How a worker that cannot go on tells the run why, in one sentence, before it ends."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from hetopt.core.errors import HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, tell_failure

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


_FULL = (errno.ENOSPC, errno.EDQUOT)


class OthersFailed(RunFailed):
    """This worker goes no further because another one ended, who or whose host says why."""


class FailureReport:
    """Around a worker's whole life: appends ``run_failed`` to the event log when it ends with an error.

    Every rank may write (one short line is appended whole); the first reason of an attempt is the one that counts. A
    worker that merely lost a peer says nothing: the peer, or the host that saw it die, knows why.
    ``exit_code`` is what the process should exit with.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self.exit_code = 0

    def __enter__(self) -> FailureReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception):
            return False  # KeyboardInterrupt, SystemExit: somebody else's decision
        if not isinstance(error, HetoptError):
            traceback.print_exception(kind, error, trace, file=sys.stderr)
        if not is_peer_loss(error):
            failure = explain(error, self._rank)
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
    """Whether the error only says that another worker is gone."""
    if isinstance(error, HetoptError):
        return isinstance(error, OthersFailed)
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _PEER_LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that there was not enough memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_REFUSED)


def has_own_sentence(error: Exception) -> bool:
    """Whether `explain` knows more of an error than its words: memory or disk ran out."""
    return is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in _FULL)


def explain(error: Exception, rank: int) -> HetoptError:
    """Any error of worker ``rank`` as one sentence with an exit code."""
    if isinstance(error, HetoptError):
        return error
    if is_out_of_memory(error):
        return RunFailed(
            f"worker {rank} ran out of memory.", hint="lower max_local_batch_size of this worker in the plan's run spec"
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return RunFailed(
            f"worker {rank}: the disk is full, so {error.filename or 'the event log of the run'} cannot be written.",
            hint="make room on the disk, then go on from the last checkpoint with `hetopt launch --resume`",
        )
    said = next(iter(str(error).splitlines()), "(no message)")
    return RunFailed(f"worker {rank}: {type(error).__name__}: {said}", hint="see the worker's log for where")
