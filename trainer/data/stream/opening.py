"""Opens the stream of a worker: its source, the cursor that goes along it, and the data set that gives its samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import MapDataset, fetch
from hetopt.trainer.data.stream.clock import RealClock
from hetopt.trainer.data.stream.cursor import StreamCursor
from hetopt.trainer.data.stream.received import ReceivedSamples
from hetopt.trainer.data.stream.redis_source import RedisSource
from hetopt.trainer.data.stream.replay import Replay, every_nth_of_all
from hetopt.trainer.data.stream.source import Source
from hetopt.trainer.data.stream.wire import header_of


@dataclass(frozen=True, kw_only=True)
class OpenStream:
    """A worker's stream, ready to be read.

    Attributes:
        source: tells about the flow, and has to be begun and closed.
        cursor: goes along it.
        dataset: what the cursor's indices are of.
    """

    source: Source
    cursor: StreamCursor
    dataset: MapDataset


def open_stream(
    context: WorkerContext, dataset: MapDataset, order: Callable[[int], Indices] | None = None
) -> OpenStream:
    """The stream that the run asks for.

    Args:
        context: this worker.
        dataset: the task's training data, which is replayed, or tells what samples are like.
        order: of a replay: this worker's samples in each pass; None: every n-th of all.

    Raises:
        BadInput: the stream cannot be what the run says.
    """
    stream, rank, workers = context.spec.stream, context.rank, context.world_size
    assert stream is not None
    source: Source
    if stream.source == "replay":
        source = Replay(
            stream,
            rank,
            order=order or every_nth_of_all(len(dataset), context.spec.seed, rank, workers),
            clock=RealClock(),
            tell=_teller(context),
        )
    else:
        expected = header_of(fetch(dataset, [0]))
        received = ReceivedSamples(dataset)
        source = RedisSource(stream, rank, workers, samples=received, expected=expected, tell=_teller(context))
        dataset = received
    cursor = StreamCursor(source, dataset_size=len(dataset), rank=rank, workers=workers)
    return OpenStream(source=source, cursor=cursor, dataset=dataset)


def _teller(context: WorkerContext) -> Callable[[str], None]:
    """Tells people that this worker waits: in its log, and in the run's events, into which every worker may write."""

    def tell(what: str) -> None:
        print(f"worker {context.rank} {what}", file=sys.stderr, flush=True)
        log = EventLog(context.run_dir / EVENTS_FILE)
        log.write("stream_waits", rank=context.rank, what=what)
        log.close()

    return tell
