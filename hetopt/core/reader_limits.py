"""What reader processes of a DataLoader need of a machine: shared memory and open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from hetopt.core.errors import RunFailed
from hetopt.core.formatting import bytes_
from hetopt.core.profile import Reading

FILES_OF_A_READER = 4
"""Pipes and a handle that a process keeps of each of its readers (counted with torch 2.13 on Linux)."""


def shared_bytes_here() -> int | None:
    """Return the size of /dev/shm, in which processes hand each other tensors; None: it is not there."""
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize


def open_files_here() -> int | None:
    """Return how many files a process of this user may have open; None: as many as it wants."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def check_readers(
    where: str, reading: Reading | None, samples: Sequence[int], *, shared_bytes: int | None, open_files: int | None
) -> None:
    """Refuse what a machine's shared memory or limit of open files cannot hold.

    The ``r`` readers of a worker have ``a`` batches each ready, of ``t`` tensors and ``n_i`` samples of ``s`` bytes:

        sum_i n_i s r a          bytes in /dev/shm
        r (a t + 4)              open files of a worker, one for each tensor (torch, "Multiprocessing")

    Args:
        where: the machine, to begin the sentence.
        reading: of the job; None: nobody reads for its workers.
        samples: of a batch of each worker that the machine has.
        shared_bytes: that /dev/shm has in all; None: it is not there.
        open_files: that a process may have; None: as many as it wants.

    Raises:
        RunFailed: they cannot.
    """
    if reading is None:
        return
    ready = reading.processes * reading.batches_ahead
    needed = sum(samples) * reading.sample_bytes * ready
    readers = f"the loader's {reading.processes} readers keep {ready} batches ready for each worker"
    fewer = "a smaller `num_workers` or `prefetch_factor` of the DataLoader"
    if shared_bytes is not None and needed > shared_bytes:
        raise RunFailed(
            f"{where} has {bytes_(shared_bytes)} of shared memory in /dev/shm, and {readers}, {bytes_(needed)} in all.",
            hint=f"make /dev/shm larger (docker calls it shm-size), or take {fewer}",
        )
    files = ready * reading.tensors + reading.processes * FILES_OF_A_READER
    if open_files is not None and files > open_files:
        raise RunFailed(
            f"{where} lets a process open {open_files:,} files, and {readers}, {files:,} files in all.",
            hint=f"raise the limit (`ulimit -n`), or take {fewer}",
        )
