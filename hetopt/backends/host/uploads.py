"""What a machine copies into the bucket while it trains: events, the end of its logs, the model, a script's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hetopt.backends.host.objects import Objects
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.paths import inside
from hetopt.core.run_folder import LOG_FOLDER, MODEL_NAMES, OUTPUT_FOLDER, written_in

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
