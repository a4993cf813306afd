"""Saves checkpoints while training goes on: a copy is taken between two steps, and a thread writes it.

Training pauses for the copy alone. Each worker tells in its control row how far its part is; once every row says that
it is on disk, the workers tell each other its hash and the leader makes it the newest checkpoint. A disk that refuses
is told as an event, and the next checkpoint is tried when it is due. Where it is full, an older checkpoint gives way to
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EventLog
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.checkpoints.folder import (
    STATE_FILE,
    CheckpointFolder,
    FileRecord,
    Manifest,
    RankState,
    SharedState,
    has_no_room,
    rank_file,
)

WRITTEN, REFUSED, NO_ROOM = 1.0, -1.0, -2.0
"""What a control row says of the checkpoint under way; 0: nothing is, or its part is still being written."""


def is_due(since_s: float, *, period_s: float, every_s: float) -> bool:
    """Whether a checkpoint is to begin now, so that a loss undoes at most ``max(every_s, 2 period_s)`` of training.

    What workers tell of a period is up to a period old, and a checkpoint that begins at the end of the next would count
    at the end of the one after: ``since_s + 3 period_s`` could be lost by then (more, where writing takes longer than a
    period).

    Args:
        since_s: the last one began, as the workers told.
        period_s: length of a control period.
        every_s: the interval that is wished for.
    """
    return since_s + 3 * period_s >= every_s


def unsaved(problem: str) -> RunFailed:
    """Return the failure of a stopped run whose last checkpoint could not be written."""
    return RunFailed(
        f"the last checkpoint cannot be written: {problem}.",
        hint="make room on the disk, then launch the run again: it resumes from the checkpoint before",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """A checkpoint that is being written.

    Attributes:
        digest: of the run.
        parts: this worker's files, by name.
        pause_s: how long training waited for the copy.
        begun_s: when.
    """

    step: int
    digest: str
    parts: Future[dict[str, FileRecord]]
    pause_s: float
    begun_s: float


class CheckpointSaver:
    """One worker's side of saving checkpoints; every method but `progress` is called by all ranks alike.

    Args:
        run_dir: of the run.
        rank: of this worker.
        world_size: workers of the run.
        events: where the leader tells.
        clock: seconds.
        host: where this worker is, for people.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, world_size: int, events: EventLog, clock: Callable[[], float], host: str
    ) -> None:
        self._run_dir = run_dir
        self._folder = CheckpointFolder(run_dir)
        self._rank = rank
        self._world_size = world_size
        self._events = events
        self._clock = clock
        self._who = f"worker {rank} on {host}"
        self._thread = ThreadPoolExecutor(1, "writes-checkpoints")
        self._under_way: _UnderWay | None = None
        self.saved_step: int | None = None
        self.made_room = False
        """Whether an older checkpoint has given way since the last one was refused."""

    @property
    def begun_step(self) -> int | None:
        """Step of the newest checkpoint, saved or under way."""
        return self.saved_step if self._under_way is None else self._under_way.step

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._under_way is not None

    @property
    def progress(self) -> float:
        """Of this worker's part of the checkpoint under way: `WRITTEN`, `REFUSED`, `NO_ROOM` or 0."""
        if self._under_way is None or not self._under_way.parts.done():
            return 0.0
        error = self._under_way.parts.exception()
        return WRITTEN if error is None else NO_ROOM if has_no_room(error) else REFUSED

    def begin(self, shared: SharedState, own: RankState, *, digest: str, begun_s: float) -> None:
        """Copy the state and begin to write it; nothing may be under way."""
        assert self._under_way is None
        step, of_all, of_mine = shared.step, shared.snapshot() if self._rank == 0 else None, own.snapshot()

        def write() -> dict[str, FileRecord]:
            parts = {rank_file(self._rank): self._folder.write_own(step, self._rank, of_mine)}
            return parts if of_all is None else {**parts, STATE_FILE: self._folder.write_shared(of_all)}

        parts = self._thread.submit(write)
        now_s = self._clock()
        self._under_way = _UnderWay(step=step, digest=digest, parts=parts, pause_s=now_s - begun_s, begun_s=begun_s)

    def conclude(self, told: Sequence[float], *, keeps: int = 1) -> str | None:
        """Publish the checkpoint under way if every worker's part is on disk, or give it up if one was refused.

        Args:
            told: `progress` of every worker, in rank order, as the last control rows had it.
            keeps: this many checkpoints stay where the leader's disk is full.

        Returns:
            Why it was given up; None: it was not.
        """
        if self._under_way is None or 0.0 in told:
            return None
        problem = self._settle(self._under_way, told, keeps)
        if problem is not None:
            self._events.write("checkpoint_failed", step=self._under_way.step, reason=problem)
        self._under_way = None
        return problem

    def finish(self, *, keeps: int = 1) -> str | None:
        """Wait for the checkpoint under way, and conclude it."""
        if self._under_way is None:
            return None
        wait([self._under_way.parts])
        return self.conclude([row[0] for row in gather_numbers([self.progress], self._world_size)], keeps=keeps)

    def close(self) -> None:
        """Let go of the thread, once it has written what it was at."""
        self._thread.shutdown()

    def _settle(self, under_way: _UnderWay, told: Sequence[float], keeps: int) -> str | None:
        """Publish or give up, all workers alike; what the matter was, if there was any."""
        texts = gather_texts(self._account(under_way), self._world_size)
        problem = "; ".join(text for text, progress in zip(texts, told, strict=True) if progress < 0)
        made_room = False
        if self._rank == 0:
            problem = problem or self._publish(under_way, texts) or ""
            if problem:
                self._folder.abandon(under_way.step)
                made_room = NO_ROOM in told and self._folder.give_way(keeps=keeps if told[0] == NO_ROOM else 1)
        problem = gather_texts(problem, self._world_size)[0]
        self.made_room = bool(gather_numbers([made_room], self._world_size)[0][0])
        if not problem:
            self.saved_step = under_way.step
        return problem or None

    def _account(self, under_way: _UnderWay) -> str:
        """This worker's file, or why there is none."""
        error = under_way.parts.exception()
        if error is None:
            return under_way.parts.result()[rank_file(self._rank)].model_dump_json()
        said = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        return f"{self._who}: {said}"

    def _publish(self, under_way: _UnderWay, texts: Sequence[str]) -> str | None:
        files = {rank_file(rank): FileRecord.model_validate_json(text) for rank, text in enumerate(texts)}
        files[STATE_FILE] = under_way.parts.result()[STATE_FILE]
        manifest = Manifest(step=under_way.step, digest=under_way.digest, workers=self._world_size, files=files)
        try:
            self._folder.publish(manifest)
        except OSError as error:
            return f"{self._who}: {error.strerror}"
        except BadInput as error:
            return f"{self._who}: {error.message.removesuffix('.')}"
        self._events.write(
            "checkpoint_saved",
            step=under_way.step,
            path=str(self._folder.path(under_way.step).relative_to(self._run_dir)),
            save_s=round(under_way.pause_s, 6),
            written_s=round(self._clock() - under_way.begun_s, 6),
            size_bytes=sum(record.size_bytes for record in files.values()),
        )
        return None
