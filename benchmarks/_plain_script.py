"""A script as people write them, with a session in it, on the job of a task: what `hetopt convert` makes of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from hetopt.core.run_spec import RunSpec
from hetopt.trainer.data.fetch import Batch, MapDataset, fetch
from hetopt.trainer.session import session
from hetopt.trainer.task import mean_of
from hetopt.trainer.tasks.load import load_task


class Gathered(Dataset[Batch]):
    """A task's samples, read by the batch as the task's own trainer and the baseline read them."""

    def __init__(self, data: MapDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples of a whole batch at once, as DataLoader asks where this method exists."""
        return fetch(self._data, indices)


def train_in_session(spec: RunSpec, folder: Path) -> None:
    """Train to the stop rule in a session, which writes the events.

    Args:
        spec: of the run.
        folder: of the run.
    """
    torch.manual_seed(spec.seed)
    task = load_task(spec.task)
    data = task.data(Path(spec.data_dir) if spec.data_dir is not None else None)
    model = task.model()
    optimizer = task.optimizer(model)
    loader = DataLoader(
        Gathered(data.train),
        batch_size=spec.global_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda batch: batch,
    )
    steps = 0
    with session(model, optimizer, spec=spec, folder=folder) as run:
        loader = run.loader(loader)
        while steps < (spec.stop.max_steps or 0):
            for batch in loader:
                optimizer.zero_grad()
                run.backward(mean_of(task.loss(model, batch)))
                optimizer.step()
                steps += 1
                if steps == spec.stop.max_steps:
                    break
