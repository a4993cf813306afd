"""A host's part in a run: waits for its place, hosts the workers, heeds the end, and keeps the run's objects current.

It lives as long as the lease among the objects lets it, and where nobody follows a rented run as long as the budget
pays for that lease (`hetopt.backends.host.renewal`). What is among the objects is believed within what the machine was
told when it began: the latest end, and the run that was ordered.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.backends.backend import is_finished
from hetopt.backends.host.protocol import (
    OUTCOME_OBJECT,
    Lease,
    Objects,
    Placement,
    State,
    Terms,
    is_over,
    outcome_json,
    placement_of,
)
from hetopt.backends.host.renewal import Allowance, AskPrices
from hetopt.backends.host.uploads import Checkpoints, Uploads
from hetopt.backends.processes import QUIET_TORCH
from hetopt.core.budget_law import HEARTBEAT_S, LEASE_OBJECT, PLACEMENT_OBJECT, READ_EVERY_S
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, read_log
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
DATA_TOLD_EVERY_S = 30.0
LAST_UPLOADS_S = 60.0
"""A notice comes two minutes early, and training ends in the first of them."""


@dataclass(kw_only=True)
class Agent:
    """One machine's part in a run.

    Attributes:
        terms: what it was told when it began.
        id: which of the run's machines it is.
        is_taken: whether it was announced that the machine is taken away soon.
        end_at: has the machine end at a time, in seconds since the epoch, whatever its agent does, and not when it was
            said before.
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

    terms: Terms
    id: str
    root: Path
    objects: Objects
    models: Objects
    is_taken: Callable[[], bool]
    end_at: Callable[[float], None]
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
            end_s=self.terms.end_s, latest_end_s=self.terms.latest_end_s, ask_prices=self.prices
        )

    def live(self) -> int:
        """Take part in the run; the exit code is that of the host process."""
        self._armed_s = self.terms.end_s
        placement, code = None, RunFailed.exit_code
        # Others may be lost: those that are left go on with the next that come.
        while (placement := self._await_place(placement)) is not None:
            code = self._take_part(placement)
        return code

    def _await_place(self, last: Placement | None) -> Placement | None:
        """The machine's place, or its next one after a loss; None where there is nothing left to do for it."""
        does, within_s = "waiting", PLACE_WITHIN_S
        if last is not None:
            does, within_s = "waiting for machines to be replaced", REPLACED_WITHIN_S
        deadline_s, before = self.clock() + within_s, -1 if last is None else last.told.generation
        while self.clock() < deadline_s and not self._time_is_up():
            self._read_lease()
            is_lost = last is None or not is_over(self.objects.get(OUTCOME_OBJECT), before)
            if self._doomed or self._must_end() or not is_lost:
                break
            self._say(does)
            placement = self._place()
            if placement is not None and placement.told.generation > before:
                return placement
            self.sleep(2 * self.turn_s)
        return None

    def _place(self) -> Placement | None:
        found = self.objects.get(PLACEMENT_OBJECT)
        return placement_of(found, self.id, self.terms.spec_sha256) if found is not None else None

    def _is_over(self, placement: Placement) -> bool:
        """Whether the run came to an end of its own: it finished, or failed by what no other machine can mend."""
        events = read_log(self.root / "run" / EVENTS_FILE).events
        return is_finished(events) or self._code not in (0, RunFailed.exit_code)

    def _take_part(self, placement: Placement) -> int:
        run_dir = self.root / "run"
        uploads = Uploads(objects=self.objects, models=self.models, run_dir=run_dir, leads=placement.leads)
        checkpoints = Checkpoints(
            objects=self.objects,
            run_dir=run_dir,
            leads=placement.leads,
            workers=len(placement.told.spec.workers),
            generation=placement.told.generation,
        )
        uploads.restore()
        checkpoints.restore(placement.told.resume_from)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        spec = placement.told.spec
        if spec.data_dir is not None and spec.data_dir.startswith("s3://"):
            if not self._fetch_data(spec.data_dir, uploads, placement.node.host):
                return RunFailed.exit_code
            spec = spec.model_copy(update={"data_dir": str(self.root / "data")})
        folder = None
        if spec.script:
            path = inside(self.root / "code", spec.script[0], what="script", any_text=True)
            spec, folder = spec.model_copy(update={"script": (str(path), *spec.script[1:])}), code_folder(path)
        write_spec(run_dir, spec)
        self._say("training")
        host = self._start_host(run_dir, placement, folder)
        try:
            code = self._look_after(host, placement.told.generation, uploads, checkpoints)
        finally:
            if host.poll() is None:
                host.kill()
                host.wait()
        self._say("uploading")
        for sentence in uploads.outputs():
            with (host_log_folder(run_dir, placement.node.host) / "host.log").open("a", encoding="utf-8") as log:
                log.write(f"hetopt: {sentence}\n")
        self._last_uploads(uploads, checkpoints)
        self._code = code
        # Whoever hears that the first host has ended must know by then whether anything follows.
        if placement.leads and self._is_over(placement):
            self.objects.put(OUTCOME_OBJECT, outcome_json(placement.told.generation))
        # The first host's events say why themselves.
        why = failure_reason(read_log(run_dir / EVENTS_FILE).events) if code and not placement.leads else None
        self._say(f"ended with {code}", generation=placement.told.generation, reason=why)
        return code

    def _fetch_data(self, url: str, uploads: Uploads, host: str) -> bool:
        """Bring the data set here; not where the machine is to end meanwhile. Its host log tells how far it is."""
        log, due = host_log_folder(uploads.run_dir, host) / "host.log", dict[str, float]()
        log.parent.mkdir(parents=True, exist_ok=True)
        told_s = -math.inf

        def goes_on(done: int, total: int) -> bool:
            nonlocal told_s
            if done == total or self.clock() >= told_s + DATA_TOLD_EVERY_S:
                told_s = self.clock()
                with log.open("a", encoding="utf-8") as stream:
                    stream.write(f"hetopt: {done / 1e9:.2f} of {total / 1e9:.2f} GB of data are here\n")
                uploads.logs()
            self._turn(uploads.run_dir, due, "fetching data")
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
                    SECRET_VARIABLE: self.terms.group_secret,
                },
            )

    def _look_after(
        self,
        host: subprocess.Popen[bytes],
        generation: int,
        uploads: Uploads,
        checkpoints: Checkpoints,
    ) -> int:
        """Stay until the host process has ended, or must."""
        run_dir = uploads.run_dir
        due: dict[str, float] = {}
        grew_s = self.clock()
        while host.poll() is None:
            now_s, news = self.clock(), self._turn(run_dir, due, "training")
            if "lease" in news:
                if self._must_end():
                    (run_dir / STOP_FILE).touch()
                placement = self._place()
                if placement is not None and placement.told.generation > generation:
                    # Others were lost, and their silence may last for minutes here: the new ones are waiting.
                    self._superseded = True
                    host.kill()
                elif placement is not None and placement.told.pauses:
                    (run_dir / STOP_FILE).touch()  # others join: all save a checkpoint at the same step
            if "heartbeat" in news:
                if uploads.events():
                    grew_s = now_s
                uploads.logs()
                checkpoints.send(ended=False)
            stuck = uploads.leads and now_s - grew_s > STUCK_S
            if self._time_is_up() or stuck:
                host.kill()
            self.sleep(self.turn_s)
        return host.returncode if host.returncode >= 0 else RunFailed.exit_code

    def _turn(self, run_dir: Path, due: dict[str, float], does: str) -> list[str]:
        """Heed a notice, read the lease and say that the machine lives, each as it is due; which of them were.

        Before the machine is taken, all workers save a checkpoint: the wish of one is agreed by all.

        Args:
            run_dir: the run's folder.
            due: when each is due next, by this method alone.
            does: what the machine does.
        """
        every_s = {"notice": self.notice_every_s, "lease": self.read_every_s, "heartbeat": self.heartbeat_s}
        now_s = self.clock()
        news = [what for what in every_s if now_s >= due.get(what, 0.0)]
        due |= {what: now_s + every_s[what] for what in news}
        if "notice" in news and self.is_taken():
            self._say("interruption")
            self._doomed = True
            (run_dir / STOP_FILE).touch()
        if "lease" in news:
            self._read_lease()
        if "heartbeat" in news:
            self._said = ""
            self._say(does)
        return news

    def _read_lease(self) -> None:
        data = self.objects.get(LEASE_OBJECT)
        lease = Lease.of_json(data) if data is not None else None
        if lease is None:
            return
        self._allowance.hear(lease, self.clock())
        if abs(self._allowance.end_s - self._armed_s) > TURN_S:
            self.end_at(self._allowance.end_s)
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

    def _say(self, what: str, **more: Any) -> None:
        """Write what this machine does, when that is news or the last word is old."""
        if what == self._said:
            return
        state = State(time_s=self.clock(), does=what, **more)
        if self.objects.put(f"state/{self.id}.json", state.model_dump_json(exclude_none=True).encode()):
            self._said = what
