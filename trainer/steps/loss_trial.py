"""The test of a task's loss with a run's own samples, as many as fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from hetopt.trainer.data.fetch import Batch
from hetopt.trainer.data.micro_batch import MicroBatch
from hetopt.trainer.failure import is_out_of_memory
from hetopt.trainer.loss_test import MOST_SAMPLES, LossTest, probe_loss
from hetopt.trainer.steps.local_batch import SampleFeed
from hetopt.trainer.task import Loss

FEWEST_TRIED = 4
"""Samples, where a worker's share is smaller: two parts that BatchNorm can normalise."""


def try_loss(model: nn.Module, loss: Callable[[nn.Module, Batch], Loss], feed: SampleFeed, samples: int) -> LossTest:
    """What a loss is a mean over, by the first samples of a run.

    Args:
        model: on its device.
        loss: of the task.
        feed: of the training data.
        samples: to try, at most.
    """
    places = list(feed.first_part(min(samples, MOST_SAMPLES)).indices)

    def read(some: Sequence[int]) -> Batch:
        return feed.read(MicroBatch(epoch=0, indices=[places[at] for at in some]))

    tried = len(places)
    while tried > 1:
        try:
            return probe_loss(model, loss, read, tried)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        tried //= 2
    return LossTest(kind="untested")
