"""A host's part in a run: waits for its place, hosts the workers, heeds the end, and keeps the run's objects current.

It lives as long as the lease among the objects lets it, and where nobody follows a rented run as long as the budget
pays for that lease (`hetopt.backends.host.renewal`). What is among the objects is believed within what the machine was
told when it began: the latest end, and the run that was ordered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetopt.backends.host.checkpoints import Checkpoints
from hetopt.backends.host.objects import Objects, Progress
from hetopt.backends.host.protocol import (
    OUTCOME_OBJECT,
    Lease,
    Placement,
    State,
    is_over,
    outcome_json,
    placement_of,
)
from hetopt.backends.host.renewal import Allowance, AskPrices
from hetopt.backends.host.uploads import Uploads
from hetopt.backends.processes import QUIET_TORCH
from hetopt.core.budget_law import HEARTBEAT_S, LEASE_OBJECT, PLACEMENT_OBJECT, READ_EVERY_S
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
from hetopt.core.events.records import ProbeEvent, TrainingFinished
from hetopt.core.listening import SECRET_VARIABLE, collectives_on
from hetopt.core.paths import inside
from hetopt.core.run_folder import STOP_FILE, host_log_folder, write_spec
from hetopt.core.run_status import failure_reason
from hetopt.core.search_path import INSTALLED_ONLY, code_folder

TURN_S = 1.0
STUCK_S = 1800.0
"""A run whose log has not grown for so long will not end by itself."""
PLACE_WITHIN_S = 900.0
"""A machine that nobody gives a place for so long has nobody who follows its run, and ends what is paid for it."""
REPLACED_WITHIN_S = 600.0
"""Machines that have lost others wait so long for somebody who replaces them; a notice comes two minutes early."""
LAST_UPLOADS_S = 60.0
"""A notice comes two minutes early, and training ends in the first of them."""


class Terms(Protocol):
    """What a machine is told when it begins; see `NodeConfig` for each."""

    @property
    def spec_sha256(self) -> str: ...

    @property
    def group_secret(self) -> str: ...

    @property
    def end_s(self) -> float: ...

    @property
    def latest_end_s(self) -> float: ...


class Surroundings(Protocol):
    """What a machine knows of itself."""

    def instance_id(self) -> str | None:
        """Which of the run's machines it is; None: none."""

    def is_taken(self) -> bool:
        """Return whether it was announced that the machine is taken away soon."""


class OwnEnd(Protocol):
    """What ends the machine, whatever its agent does."""

    def set(self, end_s: float) -> None:
        """End it at a time, and not when it was said before."""


@dataclass(kw_only=True)
class Agent:
    """One machine's part in a run.

    Attributes:
        config: what it was told.
        imds: what it knows of itself.
        timer: what ends it.
        prices: what spot pools have cost; by it the lease is extended where nobody follows the run.
        notice_every_s: between looks whether the machine is to be taken away.
        read_every_s: between looks for news.
        heartbeat_s: between words that it lives, with which goes what the run has written.
        last_uploads_s: once its workers have ended, for what the last checkpoint lacks.
        root: where the boot script installed everything.
        objects: of the run.
        models: where what it trained goes.
        clock: seconds since the epoch.
    """

    config: Terms
    root: Path
    objects: Objects
    models: Objects
    imds: Surroundings
    timer: OwnEnd
    prices: AskPrices = lambda types, from_s: None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    turn_s: float = TURN_S
    notice_every_s: float = READ_EVERY_S
    read_every_s: float = READ_EVERY_S
    heartbeat_s: float = HEARTBEAT_S
    last_uploads_s: float = LAST_UPLOADS_S
    _armed_s: float = 0.0
    _said: str = ""
    _doomed: bool = False
    _superseded: bool = False
    _code: int = 0

    def __post_init__(self) -> None:
        """Before it has heard of any lease."""
        self._allowance = Allowance(
            end_s=self.config.end_s, latest_end_s=self.config.latest_end_s, ask_prices=self.prices
        )

    def live(self) -> int:
        """Take part in the run; the exit code is that of the host process.

        Raises:
            BadInput: this is no machine of the run.
        """
        self._armed_s = self.config.end_s
        instance_id = self.imds.instance_id()
        if instance_id is None:
            raise BadInput("there is no metadata service here.", hint="the agent runs on rented machines only")
        placement, code = self._wait_for_place(instance_id), RunFailed.exit_code
        while placement is not None:
            code = self._take_part(instance_id, placement)
            # Others may have been lost: those that are left go on with the next that come.
            placement = self._next_place(instance_id, placement)
        return code

    def _wait_for_place(self, instance_id: str) -> Placement | None:
        """The machine's place, or None when its time was up before it had one."""
        deadline_s = self.clock() + PLACE_WITHIN_S
        while self.clock() < deadline_s and not self._time_is_up() and not self._must_end():
            self._say(instance_id, "waiting")
            placement = self._place(instance_id)
            if placement is not None:
                return placement
            self.sleep(2 * self.turn_s)
            self._read_lease()
        return None

    def _next_place(self, instance_id: str, last: Placement) -> Placement | None:
        """The machine's place after a loss; None where there is nothing left to do for it."""
        deadline_s = self.clock() + REPLACED_WITHIN_S
        while self.clock() < deadline_s and not self._time_is_up():
            self._read_lease()
            if self._doomed or self._must_end() or is_over(self.objects.get(OUTCOME_OBJECT), last.generation):
                return None
            self._say(instance_id, "waiting for machines to be replaced")
            placement = self._place(instance_id)
            if placement is not None and placement.generation > last.generation:
                return placement
            self.sleep(2 * self.turn_s)
        return None

    def _place(self, instance_id: str) -> Placement | None:
        found = self.objects.get(PLACEMENT_OBJECT)
        return placement_of(found, instance_id, self.config.spec_sha256) if found is not None else None

    def _is_over(self, placement: Placement) -> bool:
        """Whether the run came to an end of its own: it finished, or failed by what no other machine can mend."""
        events = read_log(self.root / "run" / EVENTS_FILE).events
        match events[-1] if events else None:
            case TrainingFinished(reason=reason):
                return reason != "stopped"
            case ProbeEvent(event="probe_finished"):
                return True
        return self._code not in (0, RunFailed.exit_code)

    def _take_part(self, instance_id: str, placement: Placement) -> int:
        run_dir = self.root / "run"
        uploads = Uploads(objects=self.objects, models=self.models, run_dir=run_dir, leads=placement.leads)
        checkpoints = Checkpoints(
            objects=self.objects,
            run_dir=run_dir,
            leads=placement.leads,
            workers=len(placement.spec.workers),
            generation=placement.generation,
        )
        uploads.restore()
        checkpoints.restore(placement.resume_from)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        spec = placement.spec
        if spec.data_dir is not None and spec.data_dir.startswith("s3://"):
            if not self._fetch_data(spec.data_dir, uploads, instance_id, placement.node.host):
                return RunFailed.exit_code
            spec = spec.model_copy(update={"data_dir": str(self.root / "data")})
        folder = None
        if spec.script:
            path = inside(self.root / "code", spec.script[0], what="script", any_text=True)
            spec, folder = spec.model_copy(update={"script": (str(path), *spec.script[1:])}), code_folder(path)
        write_spec(run_dir, spec)
        self._say(instance_id, "training")
        host = self._start_host(run_dir, placement, folder)
        try:
            code = self._look_after(host, placement.generation, uploads, checkpoints, instance_id)
        finally:
            if host.poll() is None:
                host.kill()
                host.wait()
        self._say(instance_id, "uploading")
        for sentence in uploads.outputs():
            with (host_log_folder(run_dir, placement.node.host) / "host.log").open("a", encoding="utf-8") as log:
                log.write(f"hetopt: {sentence}\n")
        self._last_uploads(uploads, checkpoints)
        self._code = code
        # Whoever hears that the first host has ended must know by then whether anything follows.
        if placement.leads and self._is_over(placement):
            self.objects.put(OUTCOME_OBJECT, outcome_json(placement.generation))
        # The first host's events say why themselves.
        why = failure_reason(read_log(run_dir / EVENTS_FILE).events) if code and not placement.leads else None
        self._say(instance_id, f"ended with {code}", generation=placement.generation, reason=why)
        return code

    def _fetch_data(self, url: str, uploads: Uploads, instance_id: str, host: str) -> bool:
        """Bring the data set here; not where the machine is to end meanwhile. Its host log tells how far it is."""
        log, due = host_log_folder(uploads.run_dir, host) / "host.log", dict[str, float]()
        log.parent.mkdir(parents=True, exist_ok=True)

        def say(text: str) -> None:
            with log.open("a", encoding="utf-8") as stream:
                stream.write(f"hetopt: {text}\n")
            uploads.logs()

        progress = Progress(say=say, clock=self.clock)

        def goes_on(done: int, total: int) -> bool:
            progress.told(done, total)
            now_s = self.clock()
            if _is_due(due, "notice", now_s, self.notice_every_s):
                self._heed_notice(uploads.run_dir, instance_id)
            if _is_due(due, "lease", now_s, self.read_every_s):
                self._read_lease()
            if _is_due(due, "heartbeat", now_s, self.heartbeat_s):
                self._said = ""
                self._say(instance_id, "fetching data")
            return not (self._doomed or self._must_end() or self._time_is_up())

        return self.objects.download(url, self.root / "data", goes_on)

    def _start_host(self, run_dir: Path, placement: Placement, folder: Path | None) -> subprocess.Popen[bytes]:
        """Start it, in the folder of a script, which may name files beside it."""
        node = placement.node
        log = host_log_folder(run_dir, node.host)
        log.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "hetopt.trainer.host.agent", str(run_dir), str(os.getpid())]
        with (log / "host.log").open("ab") as output:
            return subprocess.Popen(
                [*command, *node.to_arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **QUIET_TORCH,
                    **os.environ,
                    **INSTALLED_ONLY,
                    **collectives_on(node.address),
                    SECRET_VARIABLE: self.config.group_secret,
                },
            )

    def _look_after(
        self,
        host: subprocess.Popen[bytes],
        generation: int,
        uploads: Uploads,
        checkpoints: Checkpoints,
        instance_id: str,
    ) -> int:
        """Stay until the host process has ended, or must."""
        run_dir = uploads.run_dir
        due: dict[str, float] = {}
        grew_s = self.clock()
        while host.poll() is None:
            now_s = self.clock()
            if _is_due(due, "notice", now_s, self.notice_every_s):
                self._heed_notice(run_dir, instance_id)
            if _is_due(due, "lease", now_s, self.read_every_s):
                self._read_lease()
                if self._must_end():
                    (run_dir / STOP_FILE).touch()
                placement = self._place(instance_id)
                if placement is not None and placement.generation > generation:
                    # Others were lost, and their silence may last for minutes here: the new ones are waiting.
                    self._superseded = True
                    host.kill()
                elif placement is not None and placement.pauses:
                    (run_dir / STOP_FILE).touch()  # others join: all save a checkpoint at the same step
            if _is_due(due, "heartbeat", now_s, self.heartbeat_s):
                self._said = ""
                self._say(instance_id, "training")
                if uploads.events():
                    grew_s = now_s
                uploads.logs()
                checkpoints.send(ended=False)
            stuck = uploads.leads and now_s - grew_s > STUCK_S
            if self._time_is_up() or stuck:
                host.kill()
            self.sleep(self.turn_s)
        return host.returncode if host.returncode >= 0 else RunFailed.exit_code

    def _heed_notice(self, run_dir: Path, instance_id: str) -> None:
        """Before the machine is taken, all workers save a checkpoint: the wish of one is agreed by all."""
        if self.imds.is_taken():
            self._say(instance_id, "interruption")
            self._doomed = True
            (run_dir / STOP_FILE).touch()

    def _read_lease(self) -> None:
        data = self.objects.get(LEASE_OBJECT)
        lease = Lease.of_json(data) if data is not None else None
        if lease is None:
            return
        self._allowance.hear(lease, self.clock())
        if abs(self._allowance.end_s - self._armed_s) > TURN_S:
            self.timer.set(self._allowance.end_s)
            self._armed_s = self._allowance.end_s

    def _must_end(self) -> bool:
        return self.clock() >= self._allowance.stop_training_s

    def _time_is_up(self) -> bool:
        return self.clock() >= self._armed_s

    def _last_uploads(self, uploads: Uploads, checkpoints: Checkpoints) -> None:
        """All that was written, within a time: the others' parts of the last checkpoint may take a little."""
        # Where all go on from is said already when a new placement is there.
        deadline_s = self.clock() + (0.0 if self._superseded else self.last_uploads_s)
        self._superseded = False
        uploads.model()
        while not checkpoints.send(ended=True) and self.clock() < deadline_s:
            self.sleep(self.turn_s)
        uploads.logs()
        uploads.events()

    def _say(self, instance_id: str, what: str, **more: Any) -> None:
        """Write what this machine does, when that is news or the last word is old."""
        if what == self._said:
            return
        state = State(time_s=self.clock(), does=what, **more)
        if self.objects.put(f"state/{instance_id}.json", state.model_dump_json(exclude_none=True).encode()):
            self._said = what


def _is_due(due: dict[str, float], what: str, now_s: float, every_s: float) -> bool:
    if now_s < due.get(what, 0.0):
        return False
    due[what] = now_s + every_s
    return True
