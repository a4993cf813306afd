"""What a machine copies into the bucket while it trains: events, the end of its logs, the model, a script's outputs.

Of a checkpoint each worker's part is on the disk of its own machine. The first host, which knows when one is complete,
picks one at a time (``ckpt/WANTED``); each machine sends its parts of that one, and only when all are there does the
first host name it in ``ckpt/LATEST``. So what LATEST names can always be resumed from, and checkpoints that are written
faster than they travel cost nothing.

LATEST is only written over what was read: a first host that is cut off, and does not know that others go on without it,
names nothing any more once these have.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hetopt.backends.host.protocol import CHECKPOINT_PATTERN, WANTED_OBJECT, Latest, Objects, checkpoint_name
from hetopt.core.artifact import write_atomically
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.paths import inside
from hetopt.core.run_folder import (
    CHECKPOINT_FOLDER,
    LATEST_FILE,
    LATEST_OBJECT,
    LOG_FOLDER,
    MODEL_NAMES,
    OUTPUT_FOLDER,
    written_in,
)

LOG_TAIL_BYTES = 256 * 1024


@dataclass(kw_only=True)
class Uploads:
    """Remembers what is in the bucket already.

    Attributes:
        run_dir: the run's folder on this machine.
        leads: whether the worker of rank 0 is here.
        models: where what was trained goes.
    """

    objects: Objects
    models: Objects
    run_dir: Path
    leads: bool
    _events_sent: int = 0
    _logs_sent: dict[str, tuple[float, int]] = field(default_factory=dict)

    def restore(self) -> None:
        """Bring back the events that earlier machines wrote, where they are to be continued."""
        if self.leads:
            text = b"".join(self.objects.get(name) or b"" for name in self.objects.names("events/"))
            (self.run_dir / EVENTS_FILE).write_bytes(text)
            self._events_sent = len(text)

    def events(self) -> bool:
        """Send what the event log has gained, as an object that is named by where it begins; says whether it grew."""
        path = self.run_dir / EVENTS_FILE
        if not self.leads or not path.exists():
            return False
        with path.open("rb") as stream:
            stream.seek(self._events_sent)
            data = stream.read()
        data = data[: data.rfind(b"\n") + 1]
        if not data or not self.objects.put(f"events/{self._events_sent:015d}.jsonl", data):
            return False
        self._events_sent += len(data)
        return True

    def logs(self) -> None:
        """Send the end of every log that has changed."""
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
        """Send what the script wrote into its folder for that, where worker 0 is; sentences on what is left out."""
        if not self.leads:
            return []
        folder = self.run_dir / OUTPUT_FOLDER
        found = written_in(folder)
        lost = [
            name
            for name in found.sizes
            if not self.models.send(f"{OUTPUT_FOLDER}/{name}", inside(folder, name, what="output", any_text=True))
        ]
        return [*found.left_out, *([f"{len(lost)} outputs could not be sent, {lost[0]!r} first."] if lost else [])]

    def model(self) -> None:
        """Send the model, whether trained to the end or not, where it is; of a script all that its sessions left."""
        for path in sorted(self.run_dir.glob(MODEL_NAMES)):
            self.models.send(path.name, path)


_FOLDER = re.compile(rf"({CHECKPOINT_PATTERN})(\.partial)?")
_PARTS = re.compile(r"(state|rank-[0-9]{1,6})\.(safetensors|pt)|manifest\.json")
"""The files of a checkpoint; those of hetopt 0.1 are torch's (`.pt`). While one is written it has another name."""


@dataclass(kw_only=True)
class Checkpoints:
    """One machine's side of it.

    Attributes:
        run_dir: the run's folder on this machine.
        leads: whether the worker of rank 0 is here.
        workers: of the whole run.
        generation: of the machines that train together.
    """

    objects: Objects
    run_dir: Path
    leads: bool
    workers: int
    generation: int = 0
    _sent: set[str] = field(default_factory=set)
    _pending: str | None = None
    _named: str | None = None

    def send(self, *, ended: bool) -> bool:
        """Do what is to be done for the next checkpoint; says whether nothing is left to do.

        Args:
            ended: no worker writes any more, so that the newest one is the last.
        """
        return self._lead(ended=ended) if self.leads else self._follow(ended=ended)

    def restore(self, checkpoint: str | None) -> None:
        """Bring back the checkpoint that all machines go on from.

        What this machine has of its own is forgotten: it may be newer than what the others have.

        Raises:
            RunFailed: it cannot be read.
        """
        folder = self.run_dir / CHECKPOINT_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        if checkpoint is None:
            return
        prefix = f"ckpt/{checkpoint}/"
        for name in self.objects.names(prefix):
            part = name.removeprefix(prefix)
            if not _PARTS.fullmatch(part):
                continue  # nothing that a checkpoint has
            path = inside(folder, f"{checkpoint}/{part}", what="file of a checkpoint")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self.objects.fetch(name, path):
                raise RunFailed(f"the checkpoint {checkpoint} cannot be read.", hint="launch the run again")
        if folder.is_dir():
            write_atomically(folder / LATEST_FILE, checkpoint + "\n")
            self._named = checkpoint

    def _lead(self, *, ended: bool) -> bool:
        """Pick the newest checkpoint, once the one before is complete; name it when it is."""
        path = self.run_dir / CHECKPOINT_FOLDER / LATEST_FILE
        newest = checkpoint_name(path.read_text(encoding="utf-8").strip()) if path.exists() else None
        free = self._pending is None or (ended and self._pending != newest)
        if (
            newest is not None
            and newest != self._named
            and free
            and self._send_parts(newest, (path.parent / newest).glob("*"))
            and self.objects.put(WANTED_OBJECT, newest.encode())
        ):
            self._pending = newest
        if self._pending is not None and self._is_complete(self._pending):
            before, self._named, self._pending = self._named, self._pending, None
            if self._name(Latest(checkpoint=self._named, generation=self.generation)):
                self._forget_older(self._named, before)
            else:
                self._named, self._pending = before, self._named
        return newest is None or newest == self._named

    def _name(self, latest: Latest) -> bool:
        """Name it in the bucket, unless a later generation has named one; says whether it is named."""
        there = self.objects.versioned(LATEST_OBJECT)
        if there is not None:
            if there.data == latest.data:
                return True  # an answer was lost
            named = Latest.of(there.data)
            if named is not None and named.generation > latest.generation:
                return False
        return self.objects.put_over(LATEST_OBJECT, latest.data, None if there is None else there.version)

    def _follow(self, *, ended: bool) -> bool:
        """Send this machine's parts of what is wanted, and of the last; keep no older ones on its disk."""
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
        """Folders of checkpoints by their names: without rank 0, nobody here makes them final."""
        found: dict[str, Path] = {}
        folder = self.run_dir / CHECKPOINT_FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _FOLDER.fullmatch(path.name)
            if match is not None and path.is_dir():
                found[match[1]] = path
        return found

    def _send_parts(self, checkpoint: str, parts: Iterable[Path]) -> bool:
        """Send the files of one checkpoint; says whether all went well."""
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
        parts = {PurePosixPath(name).stem for name in self.objects.names(f"ckpt/{checkpoint}/")}
        return {"state", "manifest", *(f"rank-{rank}" for rank in range(self.workers))} <= parts

    def _forget_older(self, named: str, before: str | None) -> None:
        """Keep two in the bucket: whoever is just reading the one before must still find it."""
        for name in self.objects.names("ckpt/step-"):
            step = checkpoint_name(name.split("/")[1])
            if step is not None and step not in (named, before) and _step(step) < _step(named):
                self.objects.delete(name)


def _step(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step-"))
