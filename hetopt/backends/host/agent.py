"""The agent of a host in a run: waits for its place, hosts the workers, obeys the lease, and uploads the run's objects.

The agent ends with the lease in the bucket. What it reads there is believed within what the machine was told when it
began: the latest end, and the run that was ordered. It uploads events, the end of logs, the model, a script's outputs.

Of a checkpoint each worker's part is on the disk of its own machine. The first host, which knows when one is complete,
picks one at a time (``ckpt/WANTED``); each machine sends its parts, and once all are there the first host names it in
``ckpt/LATEST``. So what LATEST names can always be resumed from, and checkpoints that are written faster than they
travel cost nothing. LATEST is only written over what was read: a first host that is cut off names nothing any more once
the others have gone on without it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetopt.backends.backend import is_finished
from hetopt.backends.host.protocol import (
    CHECKPOINT_PATTERN,
    LOG_TAIL_BYTES,
    OUTCOME_OBJECT,
    WANTED_OBJECT,
    Latest,
    Lease,
    Objects,
    Outcome,
    Placement,
    State,
    Terms,
    checkpoint_name,
    is_over,
    placement_of,
)
from hetopt.backends.processes import QUIET_TORCH
from hetopt.core.artifact import write_atomically
from hetopt.core.budget_law import HEARTBEAT_S, LEASE_OBJECT, PLACEMENT_OBJECT, READ_EVERY_S
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.listening import SECRET_VARIABLE, collectives_on
from hetopt.core.paths import inside
from hetopt.core.run_folder import (
    CHECKPOINT_FOLDER,
    LATEST_FILE,
    LATEST_OBJECT,
    LOG_FOLDER,
    MANIFEST_FILE,
    MODEL_NAMES,
    OUTPUT_FOLDER,
    STOP_FILE,
    host_log_folder,
    write_present,
    write_spec,
    written_in,
)
from hetopt.core.run_status import failure_reason
from hetopt.core.search_path import INSTALLED_ONLY, code_folder

TURN_S = 1.0
STUCK_S = 1800.0
"""Seconds without a new line after which a run's log shows that the run will not end by itself."""
PLACE_WITHIN_S = 900.0
"""Seconds after which a machine that nobody gives a place ends: nobody follows its run."""
REPLACED_WITHIN_S = 600.0
"""Seconds for which machines that have lost others wait for somebody who replaces them; a notice comes two minutes
early."""
LAST_UPLOADS_S = 60.0
"""Seconds that last uploads may take: a notice comes two minutes early, and training ends in the first of them."""


@dataclass(kw_only=True)
class Agent:
    """The agent of a machine in a run, which waits for its place, hosts workers, uploads, and ends in time.

    Attributes:
        terms: limits that the machine was given when it began.
        id: id of this machine in its run.
        root: folder where the boot script installed everything.
        objects: object store of the run.
        models: object store for what the run leaves: models and outputs.
        is_taken: returns whether it was announced that the machine is taken away soon.
        end_at: has the machine end at a time, in seconds since the epoch, whatever its agent does, in place of the time
            set before.
        clock: returns seconds since the epoch.
        sleep: waits for so many seconds.
        turn_s: seconds between two looks at its workers.
        read_every_s: seconds between looks for news: the lease, and whether the machine is to be taken away.
        heartbeat_s: seconds between reports that it lives, with which goes what the run has written.
        last_uploads_s: seconds, once its workers have ended, for what the last checkpoint lacks.
    """

    terms: Terms
    id: str
    root: Path
    objects: Objects
    models: Objects
    is_taken: Callable[[], bool]
    end_at: Callable[[float], None]
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    turn_s: float = TURN_S
    read_every_s: float = READ_EVERY_S
    heartbeat_s: float = HEARTBEAT_S
    last_uploads_s: float = LAST_UPLOADS_S
    _said: str = ""
    _doomed: bool = False
    _is_spared: bool = False
    _present: Sequence[str] = ()
    _superseded: bool = False
    _stop_training_s: float = math.inf

    def __post_init__(self) -> None:
        """Set when the machine ends before any lease was read."""
        self._end_s = self.terms.end_s

    def live(self) -> int:
        """Take part in the run, generation after generation, until its or the lease's end; return the exit code.

        6: the machine never got a place.

        Raises:
            RunFailed: the run's events or its checkpoint cannot be read.
            BadInput: the data cannot be read, or a file of the run not be written.
        """
        placement, code = None, RunFailed.exit_code
        # Others may be lost: those that are left go on with the next that come.
        while (placement := self._await_place(placement)) is not None:
            code = self._take_part(placement)
        return code

    def _await_place(self, last: Placement | None) -> Placement | None:
        """Wait for the machine's place, or its next one after a loss; return None if nothing is left to do for it."""
        does, within_s = "waiting", PLACE_WITHIN_S
        if last is not None:
            does, within_s = "waiting for machines to be replaced", REPLACED_WITHIN_S
        deadline_s, before = self.clock() + within_s, -1 if last is None else last.placements.generation
        while self.clock() < deadline_s and not self._time_is_up():
            self._read_lease()
            is_lost = last is None or not is_over(self.objects.get(OUTCOME_OBJECT), before)
            if self._doomed or self._must_end() or not is_lost:
                break
            self._say(does)
            placement = self._place()
            if placement is not None and placement.placements.generation > before:
                return placement
            self.sleep(2 * self.turn_s)
        return None

    def _place(self) -> Placement | None:
        return placement_of(self.objects.get(PLACEMENT_OBJECT), self.id, self.terms.spec_sha256)

    def _take_part(self, placement: Placement) -> int:
        """Take part in one generation, from its checkpoint to the last upload; return the host process's exit code.

        6: the data was not fetched before the machine's end, or a signal ended the host process. Errors are those of
        `live`.
        """
        run_dir = self.root / "run"
        uploads = Uploads(
            objects=self.objects,
            models=self.models,
            run_dir=run_dir,
            leads=placement.leads,
            generation=placement.placements.generation,
        )
        uploads.restore_events()
        uploads.restore(placement.placements.resume_from)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        spec = placement.placements.spec
        self._is_spared = spec.is_elastic and not placement.leads
        if spec.data_dir is not None and spec.data_dir.startswith("s3://"):
            if not self._fetch_data(spec.data_dir, uploads, placement.node.host):
                return RunFailed.exit_code
            spec = spec.model_copy(update={"data_dir": str(self.root / "data")})
        folder = None
        if spec.script:
            path = inside(self.root / "code", spec.script[0], what="script", any_text=True)
            spec, folder = spec.model_copy(update={"script": (str(path), *spec.script[1:])}), code_folder(path)
        write_spec(run_dir, spec)
        self._heed(placement, uploads)
        self._say("training")
        host = self._start_host(run_dir, placement, folder)
        try:
            code = self._look_after(host, uploads)
        finally:
            if host.poll() is None:
                host.kill()
                host.wait()
        self._say("uploading")
        for sentence in uploads.outputs():
            with (host_log_folder(run_dir, placement.node.host) / "host.log").open("a", encoding="utf-8") as log:
                log.write(f"hetopt: {sentence}\n")
        self._last_uploads(uploads)
        events = read_log(run_dir / EVENTS_FILE)
        # Whoever hears that the first host has ended must know by then whether anything follows: the run came to an end
        # of its own, or failed by what no other machine can mend.
        if placement.leads and (is_finished(events) or code not in (0, RunFailed.exit_code)):
            outcome = Outcome(generation=placement.placements.generation)
            self.objects.put(OUTCOME_OBJECT, outcome.model_dump_json().encode())
        # The first host's events say why themselves.
        why = failure_reason(events) if code and not placement.leads else None
        self._say(f"ended with {code}", generation=placement.placements.generation, reason=why)
        return code

    def _fetch_data(self, url: str, uploads: Uploads, host: str) -> bool:
        """Fetch the data set, and say in the host's log how far it is; return whether all of it is there.

        False: the machine is to end meanwhile. BadInput: the data cannot be read.
        """
        log, due = host_log_folder(uploads.run_dir, host) / "host.log", dict[str, float]()
        log.parent.mkdir(parents=True, exist_ok=True)

        def goes_on(done: int, total: int) -> bool:
            """Do what is due, say how much of the data is there, and return whether to go on fetching it."""
            if "heartbeat" in self._turn(uploads.run_dir, due, "fetching data") or done == total:
                with log.open("a", encoding="utf-8") as stream:
                    stream.write(f"hetopt: {done / 1e9:.2f} of {total / 1e9:.2f} GB of data are here\n")
                uploads.logs()
            return not (self._doomed or self._must_end() or self._time_is_up())

        return self.objects.download(url, self.root / "data", goes_on)

    def _start_host(self, run_dir: Path, placement: Placement, folder: Path | None) -> subprocess.Popen[bytes]:
        """Start the host process, in the folder of a script, which may name files beside it, and return at once.

        ``folder`` None: there is no script, and it starts in this process's folder. Its output goes into the host's
        log.
        """
        node = placement.node
        log = host_log_folder(run_dir, node.host)
        log.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "hetopt.trainer.host.agent", str(run_dir), str(os.getpid())]
        with (log / "host.log").open("ab") as output:
            return subprocess.Popen(
                [*command, node.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **QUIET_TORCH,
                    **os.environ,
                    **INSTALLED_ONLY,
                    **collectives_on(node.address),
                    SECRET_VARIABLE: self.terms.group_secret,
                },
            )

    def _look_after(self, host: subprocess.Popen[bytes], uploads: Uploads) -> int:
        """Wait until the host process has ended, heed lease and placements, and upload meanwhile; return its exit code.

        The process is killed where its time is up, a later generation began, or the log of the first host stands still.
        Ended by a signal, its code is 6.
        """
        run_dir = uploads.run_dir
        due: dict[str, float] = {}
        grew_s = self.clock()
        while host.poll() is None:
            now_s, news = self.clock(), self._turn(run_dir, due, "training")
            if "lease" in news:
                if self._must_end():
                    (run_dir / STOP_FILE).touch()
                placement = self._place()
                if placement is not None and placement.placements.generation > uploads.generation:
                    # Others were lost, and their silence may last for minutes here: the new ones are waiting.
                    self._superseded = True
                    host.kill()
                elif placement is not None:
                    self._heed(placement, uploads)
            if "heartbeat" in news:
                if uploads.events(ended=False):
                    grew_s = now_s
                uploads.logs()
                uploads.send(ended=False)
            stuck = uploads.leads and now_s - grew_s > STUCK_S
            if self._time_is_up() or stuck:
                host.kill()
            self.sleep(self.turn_s)
        return host.returncode if host.returncode >= 0 else RunFailed.exit_code

    def _heed(self, placement: Placement, uploads: Uploads) -> None:
        """Tell this machine's workers who is there, and whether to save a checkpoint and end, as others join."""
        present = placement.placements.present
        if present != self._present:
            write_present(uploads.run_dir, present)
        if set(self._present) - set(present):
            uploads.give_up()
        self._present = present
        if placement.placements.pauses:
            (uploads.run_dir / STOP_FILE).touch()

    def _turn(self, run_dir: Path, due: dict[str, float], does: str) -> list[str]:
        """Heed a notice, read the lease and say that the machine lives, as they are due.

        Before the machine is taken, all workers save a checkpoint, unless the others go on from memory without it: the
        wish of one is agreed by all.

        Args:
            run_dir: the run's folder.
            due: when each is due next; changed by this method alone.
            does: what the machine does, as the heartbeat says.

        Returns:
            Which were due: ``lease``, ``heartbeat``, both or neither.
        """
        every_s = {"lease": self.read_every_s, "heartbeat": self.heartbeat_s}
        now_s = self.clock()
        news = [what for what in every_s if now_s >= due.get(what, 0.0)]
        due |= {what: now_s + every_s[what] for what in news}
        if "lease" in news and self.is_taken():
            self._say("interruption")
            self._doomed = True
            if not self._is_spared:
                (run_dir / STOP_FILE).touch()
        if "lease" in news:
            self._read_lease()
        if "heartbeat" in news:
            self._said = ""
            self._say(does)
        return news

    def _read_lease(self) -> None:
        """Read the lease, if there is one, and set the machine's timer where its end has moved, within its terms."""
        lease = Lease.of_json(self.objects.get(LEASE_OBJECT))
        if lease is None:
            return
        before_s, self._end_s = self._end_s, min(lease.end_s, self.terms.latest_end_s)
        self._stop_training_s = lease.stop_training_s
        if self._end_s != before_s:
            self.end_at(self._end_s)

    def _must_end(self) -> bool:
        return self.clock() >= self._stop_training_s

    def _time_is_up(self) -> bool:
        return self.clock() >= self._end_s

    def _last_uploads(self, uploads: Uploads) -> None:
        """Send all that was written, within a time: the others' parts of the last checkpoint may take a little.

        The event that ends the training goes last: whoever reads it takes the model and the checkpoint for sent.
        """
        # Where all go on from is said already when a new placement is there.
        deadline_s = self.clock() + (0.0 if self._superseded else self.last_uploads_s)
        self._superseded = False
        while not (uploads.model() and uploads.send(ended=True)) and self.clock() < deadline_s:
            self.sleep(self.turn_s)
        uploads.logs()
        uploads.events(ended=True)

    def _say(self, what: str, **more: Any) -> None:
        """Report what this machine does, when that is news or the last report is old."""
        if what == self._said:
            return
        state = State(time_s=self.clock(), does=what, **more)
        if self.objects.put(f"state/{self.id}.json", state.model_dump_json(exclude_none=True).encode()):
            self._said = what


_FOLDER = re.compile(rf"({CHECKPOINT_PATTERN})(\.partial)?")
_PARTS = re.compile(r"(state|rank-[0-9]{1,6})\.(safetensors|pt)|manifest\.json")
"""The files of a checkpoint; those of hetopt 0.1 are torch's (`.pt`). While one is written it has another name."""
_NAMED = re.compile(rb'"((?:state|rank-[0-9]{1,6})\.safetensors)"')
"""The same in a manifest."""
_END = b'{"event": "training_finished"'
"""How the line begins that ends a run's training in its log."""


@dataclass(kw_only=True)
class Checkpoints:
    """The checkpoints of a run on one machine, and which of their files are in the bucket already.

    Attributes:
        objects: object store of the run.
        run_dir: the run's folder on this machine.
        leads: whether the worker of rank 0 is here.
        generation: number of the generation of machines that train together.
    """

    objects: Objects
    run_dir: Path
    leads: bool
    generation: int = 0
    _sent: set[str] = field(default_factory=set)
    _pending: str | None = None
    _given_up: str | None = None
    _named: str | None = None

    def send(self, *, ended: bool) -> bool:
        """Upload this machine's parts of the wanted checkpoint; return whether nothing is left to send.

        On the machine that leads, also choose the checkpoint that all send, and name one that is complete.

        Args:
            ended: whether no worker writes any more, so that the newest checkpoint is the last.
        """
        return self._lead(ended=ended) if self.leads else self._follow(ended=ended)

    def restore(self, checkpoint: str | None) -> None:
        """Delete this machine's checkpoints, then download ``checkpoint`` to resume from.

        The checkpoints of this machine may be newer than what the others have.

        Args:
            checkpoint: its name, such as ``step-120``; None: only delete.

        Raises:
            RunFailed: a file of the checkpoint cannot be read, or none is listed.
        """
        folder = self.run_dir / CHECKPOINT_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        if checkpoint is None:
            return
        prefix = f"ckpt/{checkpoint}/"
        for name in self.objects.names(prefix) or ():
            part = name.removeprefix(prefix)
            if not _PARTS.fullmatch(part):
                continue  # nothing that a checkpoint has
            path = inside(folder, f"{checkpoint}/{part}", what="file of a checkpoint")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self.objects.fetch(name, path):
                raise RunFailed(f"the checkpoint {checkpoint} cannot be read.", hint="launch the run again")
        if not folder.is_dir():  # training would begin again
            raise RunFailed(f"nothing of the checkpoint {checkpoint} is there.", hint="launch the run again")
        write_atomically(folder / LATEST_FILE, checkpoint + "\n")
        self._named = checkpoint

    def give_up(self) -> None:
        """Stop waiting for other machines' parts of the checkpoints begun so far: a machine that had some is lost."""
        self._pending, self._given_up = None, self._newest()

    def _newest(self) -> str | None:
        path = self.run_dir / CHECKPOINT_FOLDER / LATEST_FILE
        return checkpoint_name(path.read_text(encoding="utf-8").strip()) if path.exists() else None

    def _lead(self, *, ended: bool) -> bool:
        """Send this host's parts of the newest checkpoint, and name the one before in LATEST once it is complete.

        Args:
            ended: whether training has ended, so that the newest is sent without waiting for the one before.

        Returns:
            Whether the newest checkpoint is named, or given up, or none was saved.
        """
        newest, concluded = self._newest(), (self._named, self._given_up)
        free = self._pending is None or (ended and self._pending != newest)
        if (
            newest is not None
            and newest not in concluded
            and free
            and self._send_parts(newest, (self.run_dir / CHECKPOINT_FOLDER / newest).glob("*"))
            and self.objects.put(WANTED_OBJECT, newest.encode())
        ):
            self._pending = newest
        pending = self._pending
        if pending is not None and self._is_complete(pending) and self._name(pending):
            self._forget_older(pending, self._named)
            self._named, self._pending = pending, None
        return newest in (None, self._named, self._given_up)

    def _name(self, checkpoint: str) -> bool:
        """Name the checkpoint in the bucket, unless a later generation has named one; return whether it is named."""
        latest = Latest(checkpoint=checkpoint, generation=self.generation)
        there = self.objects.versioned(LATEST_OBJECT)
        named = None if there is None else Latest.of_json(there.data)
        if named is not None and (named == latest or named.generation > latest.generation):
            return named == latest  # an answer was lost, or others go on
        return self.objects.put_over(LATEST_OBJECT, latest.model_dump_json().encode(), there.version if there else None)

    def _follow(self, *, ended: bool) -> bool:
        """Send this machine's parts of the wanted checkpoint, delete older ones; return whether none is left to send.

        ``ended``: training has ended, so that the newest checkpoint is the one that will be wanted.
        """
        folders = self._partial_folders()
        if not folders:
            return True
        wanted = checkpoint_name((self.objects.get(WANTED_OBJECT) or b"").decode("ascii", errors="replace"))
        # Stopping ends with a checkpoint, and all workers stop at the same step: the newest is what will be wanted.
        chosen = max(folders, key=_step) if ended else wanted
        if chosen is None or chosen not in folders:
            return not ended
        done = self._send_parts(chosen, folders[chosen].glob("rank-*"))
        for name, folder in folders.items():
            if _step(name) < _step(chosen):
                shutil.rmtree(folder, ignore_errors=True)
        return done

    def _partial_folders(self) -> dict[str, Path]:
        """Return the folders of checkpoints by their names: without rank 0, nobody here makes them final."""
        paths = [path for path in (self.run_dir / CHECKPOINT_FOLDER).glob("*") if path.is_dir()]
        return {match[1]: path for path in paths if (match := _FOLDER.fullmatch(path.name)) is not None}

    def _send_parts(self, checkpoint: str, parts: Iterable[Path]) -> bool:
        """Send the files of one checkpoint; return whether all went well.

        Files that were sent before are not sent again.
        """
        well = True
        for path in sorted(path for path in parts if _PARTS.fullmatch(path.name)):
            name = f"ckpt/{checkpoint}/{path.name}"
            if name in self._sent:
                continue
            try:
                arrived = self.objects.send(name, path)
            except FileNotFoundError:
                return False  # a newer one has taken its place
            if arrived:
                self._sent.add(name)
            well = well and arrived
        return well

    def _is_complete(self, checkpoint: str) -> bool:
        """Return whether the checkpoint's manifest is there, and all files that it names."""
        prefix = f"ckpt/{checkpoint}/"
        manifest = self.objects.get(prefix + MANIFEST_FILE)
        if manifest is None:
            return False
        there = {name.removeprefix(prefix) for name in self.objects.names(prefix) or ()}
        return {name.decode() for name in _NAMED.findall(manifest)} <= there

    def _forget_older(self, named: str, before: str | None) -> None:
        """Delete the bucket's checkpoints older than ``named``, but for ``before``, which somebody may be reading.

        Args:
            named: checkpoint that LATEST names now.
            before: checkpoint that LATEST named until now; None: none.
        """
        for name in self.objects.names("ckpt/step-") or ():
            step = checkpoint_name(name.split("/")[1])
            if step is not None and step not in (named, before) and _step(step) < _step(named):
                self.objects.delete(name)


@dataclass(kw_only=True)
class Uploads(Checkpoints):
    """The uploads of one machine (checkpoints, events, logs, outputs, model), and what is in the bucket already.

    What did not arrive is sent again at the next call, if there is one.

    Attributes:
        models: object store for what was trained.
    """

    models: Objects
    _events_sent: int = 0
    _logs_sent: dict[str, tuple[float, int]] = field(default_factory=dict)

    def restore_events(self) -> None:
        """Replace this machine's event log by the bucket's, to continue it; do nothing but on the first host.

        Raises:
            RunFailed: the bucket's parts of the log cannot be listed or read. To write on would overwrite them.
        """
        if self.leads:
            names = self.objects.names("events/")
            parts = [self.objects.get(name) for name in names or ()]
            if names is None or None in parts:
                raise RunFailed("the run's events cannot be read.", hint="launch the run again")
            text = b"".join(part or b"" for part in parts)
            (self.run_dir / EVENTS_FILE).write_bytes(text)
            self._events_sent = len(text)

    def events(self, *, ended: bool) -> bool:
        """Upload new whole lines of the event log, on the first host only; return whether any arrived.

        An object is named by the byte at which its lines begin.

        Args:
            ended: whether all else was sent. Before, the event that ends the training is held back: a run whose first
                host were lost then would count as finished, without its model.
        """
        path = self.run_dir / EVENTS_FILE
        if not self.leads or not path.exists():
            return False
        with path.open("rb") as stream:
            stream.seek(self._events_sent)
            data = stream.read()
        data = data[: data.rfind(b"\n") + 1]
        data = data if ended else data.partition(_END)[0]
        if not data or not self.objects.put(f"events/{self._events_sent:015d}.jsonl", data):
            return False
        self._events_sent += len(data)
        return True

    def logs(self) -> None:
        """Upload the end (256 KiB) of each log of this machine that has changed since its last upload."""
        folder = self.run_dir / LOG_FOLDER
        for path in sorted(folder.rglob("*.log")) if folder.is_dir() else ():
            status = path.stat()
            name, state = path.relative_to(folder).as_posix(), (status.st_mtime, status.st_size)
            if self._logs_sent.get(name) == state:
                continue
            with path.open("rb") as stream:
                stream.seek(max(0, status.st_size - LOG_TAIL_BYTES))
                if self.objects.put(f"{LOG_FOLDER}/{name}", stream.read()):
                    self._logs_sent[name] = state

    def outputs(self) -> list[str]:
        """Upload the script's output folder, on the first host only; return sentences on what is left out or failed.

        Empty: all arrived, or this is another host.
        """
        if not self.leads:
            return []
        folder = self.run_dir / OUTPUT_FOLDER
        written = written_in(folder)
        lost = [
            name
            for name in written.sizes
            if not self.models.send(f"{OUTPUT_FOLDER}/{name}", inside(folder, name, what="output", any_text=True))
        ]
        return [*written.left_out, *([f"{len(lost)} outputs could not be sent, {lost[0]!r} first."] if lost else [])]

    def model(self) -> bool:
        """Upload each model file in the run's folder, trained to the end or not; return whether all have arrived.

        What has arrived is not sent again.
        """
        left = [path for path in sorted(self.run_dir.glob(MODEL_NAMES)) if path.name not in self._sent]
        self._sent |= {path.name for path in left if self.models.send(path.name, path)}
        return self._sent.issuperset(path.name for path in left)


def _step(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step-"))
