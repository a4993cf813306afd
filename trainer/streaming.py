"""What a run on a stream adds to the loop: samples that arrive, batches that follow them, and word of what is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetopt.core.stream import Stream
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import Indices
from hetopt.trainer.data.fetch import MapDataset
from hetopt.trainer.data.stream.opening import open_stream
from hetopt.trainer.data.stream.source import Flow
from hetopt.trainer.policies.stream_rate import stream_learning_rate_scale


class Streaming:
    """One worker's stream in a run.

    Args:
        context: this worker, whose spec asks for a stream.
        dataset: the task's training data.
        order: of a replay: this worker's samples in each pass; None: every n-th of all.
    """

    def __init__(
        self, context: WorkerContext, dataset: MapDataset, order: Callable[[int], Indices] | None = None
    ) -> None:
        spec = context.spec
        assert spec.stream is not None
        self._stream: Stream = spec.stream
        self._planned_batch_size = spec.global_batch_size
        opened = open_stream(context, dataset, order)
        self._source = opened.source
        self.cursor = opened.cursor
        self.dataset = opened.dataset
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
