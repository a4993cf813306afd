"""What a run on a stream adds to the loop: samples that arrive, batches that follow them, and word of what is saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_spec import Stream
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import MapDataset, fetch
from hetopt.trainer.data.stream.redis_source import ReceivedSamples, RedisSource
from hetopt.trainer.data.stream.replay import Replay, every_nth_of_all
from hetopt.trainer.data.stream.source import Flow, Source, StreamCursor
from hetopt.trainer.data.stream.wire import header_of
from hetopt.trainer.policies.stream_rate import stream_learning_rate_scale


class Streaming:
    """One worker's stream in a run.

    Args:
        context: this worker, whose spec asks for a stream.
        dataset: the task's training data.
        order: of a replay: this worker's samples in each pass; None: every n-th of all.

    Attributes:
        cursor: goes along the stream.
        dataset: what the cursor's indices are of.

    Raises:
        BadInput: the stream cannot be what the run says.
    """

    dataset: MapDataset

    def __init__(
        self, context: WorkerContext, dataset: MapDataset, order: Callable[[int], Indices] | None = None
    ) -> None:
        spec = context.spec
        assert spec.stream is not None
        self._stream: Stream = spec.stream
        self._planned_batch_size = spec.global_batch_size
        rank, workers = context.rank, context.world_size
        self._source: Source
        if spec.stream.source == "replay":
            self.dataset = dataset
            order = order or every_nth_of_all(len(dataset), spec.seed, rank, workers)
            self._source = Replay(spec.stream, rank, order=order, tell=_teller(context))
        else:
            self.dataset = received = ReceivedSamples(dataset)
            self._source = RedisSource(
                spec.stream,
                rank,
                workers,
                samples=received,
                expected=header_of(fetch(dataset, [0])),
                tell=_teller(context),
            )
        self.cursor = StreamCursor(self._source, dataset_size=len(dataset), rank=rank, workers=workers)
        self._begun: tuple[int, Mapping[str, int]] | None = None
        self._committed_step: int | None = None

    def begin(self) -> None:
        """Samples arrive from now on."""
        self._source.begin()

    def flow(self) -> Flow:
        """What the stream was like since this was last asked for."""
        return self._source.flow()

    def learning_rate_scale(self, shares: Sequence[int]) -> float:
        """The factor on the run's learning rate for steps of these shares."""
        return stream_learning_rate_scale(self._stream, sum(shares), self._planned_batch_size)

    def saves(self, step: int) -> None:
        """The cursor's last state goes into the checkpoint of this step, which is not yet complete."""
        self._begun = (step, self.cursor.told)

    def saved(self, step: int | None, *, is_last: bool = False) -> None:
        """The newest complete checkpoint is of this step; the last one is never gone back behind."""
        if self._begun is None or self._begun[0] != step:
            return
        if is_last or self._committed_step != step:
            self._source.committed(self._begun[1], is_last=is_last)
            self._committed_step = step

    def close(self) -> None:
        """Let go of the source."""
        self._source.close()


def _teller(context: WorkerContext) -> Callable[[str], None]:
    """Tells people that this worker waits: in its log, and in the run's events, into which every worker may write."""

    def tell(what: str) -> None:
        print(f"worker {context.rank} {what}", file=sys.stderr, flush=True)
        log = EventLog(context.run_dir / EVENTS_FILE)
        log.write("stream_waits", rank=context.rank, what=what)
        log.close()

    return tell
