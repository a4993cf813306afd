"""All runs of a folder as the dashboard sees them: what is over is read once, what goes on is read on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hetopt.api.run import Run
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE
from hetopt.core.run_folder import STOP_FILE, RunFolders
from hetopt.optimizer.launch_record import LAUNCH_FILE
from hetopt.reports.dashboard import NOT_READ
from hetopt.reports.live_run import LiveRun, RunSummary
from hetopt.reports.scalars import Exposed, exposition

WITHIN_S = 0.5
"""For which a look waits for logs that were not read before; the rest is read meanwhile."""

UNREADABLE = "unreadable"

Mark = tuple[tuple[int, int], ...]
"""Size and time of change of each file that a summary rests on."""


@dataclass(kw_only=True)
class KnownRuns:
    """The runs under a home, as far as they were read. Several threads may ask at once.

    Attributes:
        home: the folder of their folders.
        only: the one run that is shown; absent: all are.
        clock: seconds since the epoch.
    """

    home: Path
    only: str | None = None
    clock: Callable[[], float] = time.time
    _over: dict[str, tuple[Mark, RunSummary]] = field(default_factory=dict)
    _live: dict[str, LiveRun] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _reading: threading.Thread | None = None
    _is_closed: bool = False

    def summaries(self, *, within_s: float = WITHIN_S) -> list[RunSummary]:
        """Every run, newest first; those whose logs could not be read in time say so, and are read meanwhile.

        Raises:
            BadInput: the runs cannot be listed.
        """
        with self._lock:
            until_s = time.monotonic() + within_s
            told = [self._summary(folder, until_s) for folder in reversed(self._folders())]
            if any(one.state == NOT_READ for one in told) and self._reading is None:
                self._reading = threading.Thread(target=self._read_on, daemon=True)
                self._reading.start()
            return told

    def find(self, name: str) -> Run | None:
        """The run of exactly this name; None: there is none. The name never becomes a path: it is looked up."""
        with self._lock:
            for folder in self._folders():
                if folder.name == name:
                    return Run.in_folder(folder)
        return None

    def close(self) -> None:
        """Nothing is read from here on: a thread that is reading when the process ends would abort it."""
        self._is_closed = True
        self._lock.acquire()

    def metrics(self) -> str:
        """Prometheus' text of the runs that go on, or of the only one, or else of the newest.

        Raises:
            BadInput: a log cannot be read.
        """
        with self._lock:
            told = self.summaries()
            going = [one.run for one in told if not one.is_over and one.state not in (NOT_READ, UNREADABLE)]
            names = going if going and self.only is None else [one.run for one in told[:1]]
            folders = {folder.name: folder for folder in self._folders()}
            return exposition([self._exposed(folders[name]) for name in reversed(names)])

    def _folders(self) -> list[Path]:
        return [folder for folder in RunFolders(home=self.home).all() if self.only is None or folder.name == self.only]

    def _exposed(self, folder: Path) -> Exposed:
        live = self._followed(folder)
        live.read()
        return Exposed(name=folder.name, run=live.progress, unread=live.unread.lines)

    def _followed(self, folder: Path) -> LiveRun:
        if folder.name not in self._live:
            self._live[folder.name] = LiveRun.of(folder, Run.in_folder(folder).launch)
        return self._live[folder.name]

    def _summary(self, folder: Path, until_s: float) -> RunSummary:
        name = folder.name
        mark = _mark(folder)
        known, summary = self._over.get(name, (None, None))
        if summary is not None and known == mark:
            return summary
        try:
            summary = self._read(folder, until_s)
        except HetoptError as error:
            return RunSummary(run=name, state=UNREADABLE, reason=error.message)
        except OSError as error:
            return RunSummary(run=name, state=UNREADABLE, reason=f"it cannot be read: {error.strerror}")
        if summary.is_over:
            self._over[name] = (mark, summary)
            if self.only is None:
                self._live.pop(name, None)
        return summary

    def _read(self, folder: Path, until_s: float) -> RunSummary:
        name = folder.name
        if time.monotonic() > until_s and name not in self._live:
            return RunSummary(run=name, state=NOT_READ)
        run, live = Run.in_folder(folder), self._followed(folder)
        while live.read_some():
            if time.monotonic() > until_s:
                return RunSummary(run=name, state=NOT_READ)
        rented_usd, is_estimate = None, False
        if live.launch is not None and live.launch.on == "ec2":
            from hetopt.api.rental import look

            status, rental = look(run, ask=False)
            rented_usd, is_estimate = float(rental["spent_usd"]), bool(rental["spent_is_estimate"])
        else:
            status = run.status()
        told = live.summary(name, status.state.value, now_s=self.clock(), reason=status.reason, rented_usd=rented_usd)
        return told.model_copy(update={"usd_is_estimate": is_estimate}) if is_estimate else told

    def _read_on(self) -> None:
        """Until every log was read once."""
        unread = True
        while unread and not self._is_closed:
            try:
                with self._lock:
                    unread = any(one.state == NOT_READ for one in self.summaries(within_s=WITHIN_S / 2))
            except BadInput:  # whoever looks next is told
                break
            time.sleep(0.01)  # others may ask in between
        self._reading = None


def _mark(folder: Path) -> Mark:
    from hetopt.backends.ec2.renter.cluster_state import SEEN_FILE

    found = []
    for name in (EVENTS_FILE, DECISIONS_FILE, LAUNCH_FILE, STOP_FILE, SEEN_FILE):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append((-1, 0))
        else:
            found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)
