"""How a worker that cannot go on tells the run why, in one sentence, before it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, tell_failure
from hetopt.core.formatting import bytes_
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import DATA_PLACE
from hetopt.trainer.script_lines import Lines, reason_of

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

SHARED_MEMORY = Path("/dev/shm")
"""Where processes of one machine hand each other tensors and locks (Linux, shm_overview)."""


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
            failure = explain(error, f"worker {self._rank}", self._lines())
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

    def _lines(self) -> Lines | None:
        """Return the finder of lines in the run's task or script; None: no run is there to say which."""
        try:
            spec = read_spec(self._run_dir)
        except HetoptError:
            return None
        return Lines(spec.script[0] if spec.script else spec.task.partition(":")[0])


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


def explain(error: Exception, who: str = "", lines: Lines | None = None) -> HetoptError:
    """Return any error as one sentence with an exit code: where the user's code was, and what was said there.

    Args:
        error: of a worker, or of a script that is measured.
        who: the worker; empty: there is one.
        lines: of the user's files; None: they are not known.
    """
    if isinstance(error, HetoptError):
        return error
    place = ", ".join(part for part in (who, "" if lines is None else lines.of(error)) if part)
    if isinstance(error, KeyError) and error.args and error.args[0] in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        return BadInput(
            f"{place}: the script is written for torchrun, and reads {error.args[0]}.",
            hint="`hetopt convert` takes that out",
        )
    said, hint = reason_of(error), "see that it runs by itself with these arguments"
    if is_out_of_memory(error):
        hint = "lower max_local_batch_size of this worker in the plan's run spec"
    elif any(os.strerror(code) in said for code in (errno.ENOSPC, errno.EDQUOT)):
        hint = f"make room where it writes, then launch again; free are {_room(error)}"
    elif isinstance(error, FileNotFoundError):
        hint = (
            "see that the file is on every worker's machine; for it to travel there, launch with `data` naming its "
            f"folder, and {DATA_PLACE} in its place among the script's arguments"
        )
    return RunFailed(f"{place}: {said}", hint=hint)


def _room(error: Exception) -> str:
    """Return the free bytes of each mount that a process usually writes to, the fullest first."""
    named = [Path(error.filename).parent] if isinstance(error, OSError) and isinstance(error.filename, str) else []
    mounts: dict[int, tuple[int, str]] = {}
    for path in (*named, Path.cwd(), Path(tempfile.gettempdir()), SHARED_MEMORY):
        with contextlib.suppress(OSError):
            disk = os.statvfs(path)
            free = disk.f_bavail * disk.f_frsize
            said = f"{bytes_(free)} of {bytes_(disk.f_blocks * disk.f_frsize)} in {path}"
            mounts.setdefault(path.stat().st_dev, (free, said))
    return ", ".join(said for _, said in sorted(mounts.values()))
