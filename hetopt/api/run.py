"""A run from Python: how it is, what it printed, its end, and its report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetopt.api.backends import backend_of, read_launch
from hetopt.backends.backend import POLL_S, Renting, RunHandle
from hetopt.core import formatting
from hetopt.core.artifact import write_atomically
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.events.fold import RunFold, RunHistory
from hetopt.core.events.log import DECISIONS_FILE, EVENTS_FILE, Unread, read_with_decisions
from hetopt.core.events.records import RunStarted
from hetopt.core.interruption import PIECES, Reporter, stopping
from hetopt.core.run_folder import (
    LOG_FOLDER,
    MODEL_FILES,
    OUTPUT_FOLDER,
    Outputs,
    RunFolders,
    read_from,
    read_spec,
    runs_home,
    written_in,
)
from hetopt.core.run_spec import first_rank, host_names
from hetopt.core.run_status import RunState, RunStatus

if TYPE_CHECKING:
    from hetopt.backends.backend import Backend
    from hetopt.backends.ec2.renter.order import Order
    from hetopt.core.events.records import LogEvent
    from hetopt.core.run_spec import Change
    from hetopt.optimizer.launch_record import Launch
    from hetopt.reports.live_run import LiveRun
    from hetopt.reports.report import Report

LOOK_S = 10.0
"""Seconds between two looks of the supervisor in `Run.wait`."""
LONGEST_ENDING_S = 60.0
"""Seconds without new files after which `Run.wait` stops a process that lives on after its run ended: a host that is
silent for 45 s is lost by then (`hetopt.backends.ssh.conductor.SILENT_S`)."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line that a process of a run printed.

    Attributes:
        source: label of the process or log: ``worker 0``, a host's log, ``events``, or ``run`` for events in words.
        text: the line, without its line end.
    """

    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The launch record and the events of a run, as read from its folder.

    Attributes:
        launch: the plan and prediction of the launch; None: no record, so nothing was predicted.
        history: all events, with their times in the run.
        unread: number of lines of the log that are no events, and what is wrong with the first.
    """

    launch: Launch | None
    history: RunHistory
    unread: Unread

    @property
    def progress(self) -> RunFold:
        """Return how far the run has come, folded from its events."""
        return self.history.run


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan, started here or found by its folder.

    Attributes:
        folder: with everything about the run: plan, event log, output, checkpoints, model.
        backend: backend that watches and stops the run.
    """

    folder: Path
    backend: Backend = field(repr=False)

    @classmethod
    def find(cls, name: str | None = None, *, reporter: Reporter | None = None) -> Run:
        """Return the run of this user whose name is or contains ``name``; None: the newest run.

        Args:
            name: name of the run, or an unambiguous part of it.
            reporter: receives the backend's remarks about the cloud; None: nothing is reported.

        Raises:
            BadInput: there is no such run, the name fits several, or this installation lacks the run's backend.
        """
        return cls.in_folder(RunFolders(home=runs_home()).find(name), reporter=reporter)

    @classmethod
    def all(cls) -> list[Run]:
        """Return every run of this user that has a folder on this machine, oldest first; empty: there are none.

        Raises:
            BadInput: the folder of the runs cannot be read, or this installation lacks the backend of a run.
        """
        return [cls.in_folder(folder) for folder in RunFolders(home=runs_home()).all()]

    @classmethod
    def in_folder(cls, folder: Path, *, reporter: Reporter | None = None) -> Run:
        """Return the run of a folder; a damaged launch record counts as none, so that the run can still be stopped.

        Args:
            folder: folder of the run; it is not checked that it exists.
            reporter: receives the backend's remarks about the cloud; None: nothing is reported.

        Raises:
            BadInput: this installation has no backend of the recorded name.
        """
        try:
            launch = read_launch(folder)
        except BadInput:
            launch = None
        return cls(folder=folder, backend=backend_of(launch, folder, reporter))

    @property
    def name(self) -> str:
        """Return the run's name, by which commands know it."""
        return self.folder.name

    @property
    def handle(self) -> RunHandle:
        """Return the run's handle, by which its backend knows it."""
        return RunHandle(run_dir=self.folder)

    @property
    def launch(self) -> Launch | None:
        """Return the launch record with its plan and prediction; None: there is none, as of rented probes.

        Raises:
            BadInput: the record is there, and cannot be read.
        """
        return read_launch(self.folder)

    @property
    def order(self) -> Order | None:
        """Return the order of the machines rented for the run; None: nothing was rented.

        Raises:
            BadInput: the order is there, and cannot be read.
        """
        from hetopt.backends.ec2.renter.order import ORDER_FILE, Order

        return Order.load(self.folder / ORDER_FILE) if (self.folder / ORDER_FILE).exists() else None

    @property
    def model(self) -> Path | None:
        """Return the file of the trained model here, or that of a run stopped before its end; None: there is none yet.

        A rented run's model is here after `fetch_model`.
        ``model.load_state_dict(safetensors.torch.load_file(run.model))`` puts it into a model of the same task.
        """
        return next((path for name in MODEL_FILES if (path := self.folder / name).is_file()), None)

    def status(self) -> RunStatus:
        """Return the status of the run now; its machines need not be alive. On ec2, also manage its machines.

        Raises:
            BadInput: the run's records cannot be read.
        """
        return self.backend.poll(self.handle)

    def unread(self) -> LiveRun:
        """Return a live view of the run from the start of its log, whose ``read`` reads events; none is read yet.

        Raises:
            BadInput: the launch record cannot be read.
        """
        from hetopt.reports.live_run import LiveRun

        return LiveRun.of(self.folder, self.launch)

    def facts(self, *, ask: bool = False) -> dict[str, Any]:
        """Return the facts of the run now, as `hetopt status --json` prints them.

        Args:
            ask: whether to ask AWS about rented machines, which also manages them; else their last known state is told.

        Raises:
            BadInput: the launch record or the log cannot be read.
        """
        live, rental = self.unread(), None
        if live.launch is not None and live.launch.on == "ec2":
            from hetopt.api.account import look

            status, rental = look(self, ask=ask)
        else:
            status = self.status()
        live.read()
        return live.facts(self.folder, status, now_s=time.time(), rental=rental)

    def last_known(self) -> tuple[RunStatus, bool]:
        """Return the run's status as known without asking a cloud, and whether nothing of it is left running.

        A rented run counts as running until all its machines are known to be removed.

        Raises:
            BadInput: the records of a run that is not rented cannot be read.
        """
        from hetopt.backends.ec2.renter.launcher import Ec2Launcher
        from hetopt.backends.ec2.renter.order import judged, last_seen

        if not isinstance(self.backend, Ec2Launcher):
            status = self.status()
            return status, status.state.is_over
        with suppress(BadInput):  # nothing that can be read tells that it is over
            seen = last_seen(self.folder)
            if seen.cleared:
                return judged(self.folder, seen), True
        return RunStatus(state=RunState.RUNNING), False

    def record(self) -> RunRecord:
        """Read the run's launch record and whole event log from its folder.

        Raises:
            BadInput: the launch record or the log cannot be read.
        """
        launch, (events, unread) = self.launch, read_with_decisions(self.folder)
        history = RunHistory.of(events, launch.starts if launch is not None else ())
        return RunRecord(launch=launch, history=history, unread=unread)

    def logs(self, *, worker: int | None = None, events: bool = False, follow: bool = False) -> Iterator[LogLine]:
        """Yield a run's events in words, as ``run``, and its processes' output; with ``events`` raw log lines alone.

        Args:
            worker: rank of the worker whose output alone is yielded, without events; None: all output.
            events: yield the lines of the event log and of the supervisor's log instead, as they are written.
            follow: go on with new lines until the run is over; else end with the lines so far.

        Raises:
            BadInput: the run is over and the worker has no output, or a log cannot be read.
        """
        event_files = {"events": self.folder / EVENTS_FILE, "decisions": self.folder / DECISIONS_FILE}
        offsets: dict[Path, int] = {}
        live = self.unread()
        while True:
            over = self.status().state.is_over
            files = event_files if events else log_files(self.folder, worker)
            if worker is not None and not files and over:
                raise BadInput(
                    f"{self.name} has no output of worker {worker}.", hint="`hetopt status` shows the workers"
                )
            if not events and worker is None:
                sentences = filter(None, map(live.said, live.log.read()))
                yield from (LogLine(source="run", text=line) for line in sentences)
            yield from _printed(files, offsets)
            if over or not follow:
                return
            time.sleep(POLL_S)

    def wait(
        self, *, on_event: Callable[[LogEvent], None] | None = None, reporter: Reporter | None = None
    ) -> RunStatus:
        """Follow the run to its end and return its status; the supervisor may replace its rented machines meanwhile.

        Interrupting this does not end the run; `stop` does. A run that is over is returned at once; a process that
        hangs after its run ended is stopped after 60 s.

        Args:
            on_event: called with each event of the log, from the first on; None: nothing. A run without a launch record
                has none.
            reporter: receives progress, remarks, and what worker 0 of a script prints; None: nothing is reported.

        Raises:
            BadInput: the run's records or log cannot be read.
        """
        launch = self.launch
        if launch is None:
            while not (status := self.status()).state.is_over:
                time.sleep(POLL_S)
            return status
        return _followed(self, launch, reporter or Reporter(), on_event)

    def stop(self, *, reporter: Reporter | None = None) -> RunStatus:
        """End the run, wait for that, and return its status: workers save a checkpoint, and machines are ended.

        A run that is over stays as it is.

        Args:
            reporter: receives a line that the run is being stopped; Ctrl-C then only prints that this is still going
                on. None: neither.

        Raises:
            BadInput: the process that holds the run is of another user or machine.
            CloudRefused: ec2: AWS refuses, so that something of the run may be left.
        """
        with stopping(f"run {self.name}", f"hetopt stop {self.name}", reporter) if reporter else nullcontext():
            self.backend.stop(self.handle)
        return self.status()

    def fetch_model(self) -> tuple[Path, str | None]:
        """Return the run's trained model, else the one saved when it was stopped; download that of rented machines.

        Returns:
            The file here, and the S3 address where a rented run's bucket keeps it; None: the run is not rented.

        Raises:
            BadInput: the run has no model yet, or there is no room for it here.
            CloudRefused: the model cannot be read from the bucket.
        """
        if self.order is not None:
            from hetopt.backends.ec2.renter.backend import fetch_model

            return fetch_model(self.order, self.folder)
        if self.model is None:
            raise BadInput(
                f"{self.name} has no model yet.", hint=f"it is written at the end: `hetopt status {self.name}`"
            )
        return self.model, None

    def fetch_outputs(self) -> Outputs:
        """Return the files that the script wrote into ``HETOPT_OUTPUT``; those of rented machines are downloaded.

        Returns:
            Names and sizes of the files, in the run's folder ``outputs``; none where the script wrote nothing.

        Raises:
            BadInput: there is no room for the files here.
            CloudRefused: a file cannot be read from the bucket.
        """
        if self.order is not None:
            from hetopt.backends.ec2.renter.backend import fetch_outputs

            return fetch_outputs(self.order, self.folder)
        return written_in(self.folder / OUTPUT_FOLDER)

    def change(self, text: str) -> tuple[Change, float | None]:
        """Ask a running rehearsal to change a host, and return the change; do not wait until it is made.

        Args:
            text: moment (none: now), host (``*``: all) and change: ``"h2 speed=0.25,rate=10mbit"``, ``"h3 dies"``,
                ``"30s * rate=50mbit"``. Link rates are those of the cluster.

        Returns:
            The change as asked, and its link rate in the emulation, in bits per second; None: the rate does not change.

        Raises:
            BadInput: the run is no rehearsal or is over, the text is no change of one of its hosts, or the run would
                not survive the change.
        """
        from hetopt.backends.emulation.conductor import ask_for_change
        from hetopt.backends.emulation.plan import parse_change

        miniature = read_spec(self.folder).miniature
        if miniature is None:
            raise BadInput(
                f"{self.name} is no rehearsal, so nothing can be done to its hosts.",
                hint="start one with `hetopt launch PLAN --on rehearsal`",
            )
        asked = here = parse_change(text, [host.name for host in miniature.hosts])
        if asked.rate_bits_per_s is not None:
            here = asked.model_copy(update={"rate_bits_per_s": asked.rate_bits_per_s / miniature.time_factor})
        ask_for_change(self.folder, here)
        return asked, here.rate_bits_per_s

    def to_html(self, path: Path | str) -> None:
        """Write the report as one self-contained HTML page: predicted and measured, and the curves of the run.

        Args:
            path: path of the file, which is replaced if it exists.

        Raises:
            BadInput: the run has no launch record or has done no step, or the file cannot be written.
        """
        write_atomically(Path(path), self.html())

    def html(self) -> str:
        """Return the report as the text of one self-contained HTML page.

        Raises:
            BadInput: the run has no launch record, so that nothing was predicted for it, or has done no step.
        """
        from hetopt.reports import html
        from hetopt.reports.run_document import document

        record = self.record()
        return html.page(document(self._report(record), record.launch))

    def _repr_html_(self) -> str:
        """Return the run's status now as a notebook shows it: state, progress, cost and workers."""
        from hetopt.reports import html, status_document
        from hetopt.reports.document import Document

        blocks = list(status_document.status(self.facts()))
        return html.notebook(Document(kind="hetopt status", title=self.name, blocks=blocks))

    def report(self) -> Report:
        """Return the report of the run so far against its prediction: time, steps, cost, balance, communication.

        Raises:
            BadInput: the run has no launch record, so that nothing was predicted for it, or has done no step.
        """
        return self._report(self.record())

    def _report(self, record: RunRecord) -> Report:
        """Return the report of a run from what was read of it.

        Raises:
            BadInput: there is no launch record, or the run has done no step.
        """
        from hetopt.reports.report import make_report

        if record.launch is None:
            raise BadInput(
                f"{self.name} has no launch record, so nothing was predicted for it.",
                hint="choose a run from `hetopt status --all`",
            )
        return make_report(
            record.launch,
            record.history,
            state=self.status().state.value,
            unread_lines=record.unread.lines,
        )


def _printed(files: Mapping[str, Path], offsets: dict[Path, int]) -> Iterator[LogLine]:
    """Yield the whole lines that files have gained behind their ``offsets`` in bytes, which move on.

    Raises:
        BadInput: a file cannot be read.
    """
    for source, path in files.items():
        text, offsets[path] = read_from(path, offsets.get(path, 0))
        yield from (LogLine(source=source, text=line) for line in text.splitlines())


def _followed(run: Run, launch: Launch, reporter: Reporter, on_event: Callable[[LogEvent], None] | None) -> RunStatus:
    """Follow the log until the run is over, reporting progress; let the supervisor act; return the last status.

    ``on_event`` None: nobody else receives the events.
    """
    from hetopt.backends.processes import ProcessLauncher, saved_bytes
    from hetopt.backends.supervisor import Supervision
    from hetopt.reports.timeline import figures, pause

    live = run.unread()
    progress, reader, unread = live.progress, live.log, live.log.unread
    renting = run.backend if isinstance(run.backend, Renting) else None
    supervision = Supervision.of(launch, run.folder, progress, renting)
    expected = max(launch.prediction.steps.value, 1.0)
    looked_s = time.monotonic()
    arrived, arrived_s = dict[Path, int](), looked_s
    # What the script printed in an earlier session was told in that one.
    offsets = {path: path.stat().st_size for path in log_files(run.folder, 0).values()}
    while True:
        status = run.status()
        by_leader = log_files(run.folder, 0).items() if launch.spec.script else ()
        for line in _printed({source: path for source, path in by_leader if path.name == "stdout.log"}, offsets):
            reporter.note(line.text)
        for event in reader.read():
            supervision.take(event)
            passed = live.take(event)
            if on_event is not None:
                on_event(event)
            if progress.clock.awaits:
                continue  # of an earlier session, in which it was told
            # The report draws what is routine.
            if passed is not None and not passed.is_routine:
                reporter.note(f"step {formatting.count(progress.step)}: {passed.sentence}")
            if isinstance(event, RunStarted) and progress.logged_steps:
                reporter.note(f"step {formatting.count(progress.step)}: {pause(progress, event.time_s)}")
        if reader.unread.lines != unread.lines:
            unread = reader.unread
            reporter.note(f"{unread.sentence}")
        waits = pause(progress, time.time())
        if waits is not None and not status.state.is_over:
            reporter(waits, min(progress.step / expected, 1.0))
        elif progress.logged_steps and not progress.clock.awaits:
            now = figures(progress, launch, step_time_s=live.recent.step_time_s, now_s=time.time())
            reporter(PIECES.join(now), min(progress.step / expected, 1.0))
        if status.state.is_over:
            return status
        if isinstance(run.backend, ProcessLauncher):
            # One that was stopped waits for hosts, or for whoever is stopping it.
            has_ended = progress.has_ended and progress.finish_reason != "stopped"
            before, arrived = arrived, saved_bytes(run.folder) if has_ended else {}
            if not has_ended or arrived != before:
                arrived_s = time.monotonic()
            elif time.monotonic() - arrived_s > LONGEST_ENDING_S:
                run.backend.stop(run.handle)  # its workers have ended, and its own process does not notice
        if time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            action = supervision.look()
            if action is not None:
                reporter.note(f"step {formatting.count(progress.step)}: {action}")
        time.sleep(POLL_S)


def facts_or_why(run: Run) -> dict[str, Any]:
    """Return the facts of a run without asking a cloud; of one that cannot be read, name, folder and the reason.

    Nothing is raised, so that one damaged run does not hide others.
    """
    from hetopt.reports.live_run import UNREADABLE

    try:
        return run.facts()
    except HetoptError as error:
        reason = error.message
    except OSError as error:
        reason = f"{error.filename or run.folder} cannot be read: {error.strerror}"
    return {"run": run.name, "folder": str(run.folder), "state": UNREADABLE, "reason": reason}


def report(run: Run | str | None = None) -> Report:
    """Return a run's report against its prediction: time, steps, cost, balance of the workers, and communication.

    Args:
        run: the run, its name, or an unambiguous part of its name; None: the newest run.

    Raises:
        BadInput: there is no such run or the name fits several, or the run has no launch record or has done no step.
    """
    return (run if isinstance(run, Run) else Run.find(run)).report()


def log_files(run_dir: Path, worker: int | None = None) -> dict[str, Path]:
    """Return a run's output files by label ('worker 0', or the file's own name); empty: nothing was printed yet.

    Workers are called by their rank in the run, on whichever of its hosts they are; later starts and streams of a
    worker have labels of their own, such as 'worker 0 restart 1'.

    Args:
        run_dir: the run's folder.
        worker: rank of the only worker wanted; None: all files.
    """
    files: dict[str, Path] = {}
    folder = run_dir / LOG_FOLDER
    first_ranks: dict[str, int] = {}
    with suppress(BadInput):  # a folder that no spec explains: its own numbers are all there is
        spec = read_spec(run_dir)
        first_ranks = {host: first_rank(spec, host) for host in host_names(spec)}
    for path in sorted(folder.rglob("*.log")) if folder.is_dir() else ():
        relative = path.relative_to(folder).as_posix()
        # torchrun files output under [<host>/]<id>/attempt_<restart>/<local rank>/<stream>.log
        match = re.search(r"^(?:([^/]+)/)?[^/]+/attempt_(\d+)/(\d+)/(stdout|stderr)\.log$", relative)
        rank: int | None = None
        if match:
            host, restart, local_rank, stream = match.groups()
            rank = int(local_rank) + first_ranks.get(host or "", 0)
        if worker is not None and rank != worker:
            continue
        if match:
            label = f"worker {rank}" + (f" restart {restart}" if restart != "0" else "")
            if label in files:
                label = f"{label} {stream}"
            # Workers of a script may have been started again several times, each time with others.
            numbered = (f"{label} {number}" for number in count(2))
            label = next(name for name in chain([label], numbered) if name not in files)
        else:
            label = path.stem if "/" not in relative else f"{path.stem} {path.parent.name}"
        files[label] = path
    return files
