"""A short run that measures something: made in a folder of its own, followed, and ended by whatever interrupts it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hetopt.backends.backend import POLL_S, Launcher, RunHandle
from hetopt.core.errors import RunFailed
from hetopt.core.interruption import Reporter, stopping
from hetopt.core.paths import temporary_folder
from hetopt.core.run_folder import LOG_FOLDER
from hetopt.core.run_spec import RunSpec
from hetopt.core.run_status import RunState


@contextmanager
def measured(
    launcher: Launcher,
    spec: RunSpec,
    environment: Mapping[str, str],
    *,
    what: str,
    told: Reporter,
    look: Callable[[Path], None] = lambda folder: None,
) -> Iterator[Path]:
    """The folder of a measurement that has been made; it goes afterwards, unless the measurement failed.

    Args:
        launcher: where it is made.
        spec: of the run.
        environment: of its processes, on top of this one's.
        what: it is, in a sentence.
        told: of what is stopped.
        look: called with the folder while it is made.

    Raises:
        RunFailed: it ended otherwise.
    """
    folder = temporary_folder("measure")
    handle, keep = RunHandle(run_dir=folder), False
    try:
        folder.mkdir(mode=0o700)
        try:
            launcher.start(spec, folder, environment)
            while True:
                status = launcher.poll(handle)
                look(folder)
                if status.state.is_over:
                    break
                time.sleep(POLL_S)
        except BaseException:
            with stopping(f"the workers of {what}", None, told):
                launcher.stop(handle)
            raise
        if status.state is not RunState.FINISHED:
            keep = True
            raise RunFailed(
                f"{what} failed: {status.reason or 'it was stopped from outside'}",
                hint=status.next_step(f"read what the workers printed in {folder / LOG_FOLDER}"),
            )
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
