"""What is said of a script that failed is what it failed with, and the line of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hetopt.api.exactness import check_script
from hetopt.core.errors import RunFailed
from hetopt.trainer.failure import Lines, explain

SCRIPT = """
import os
import torch
from torch import nn
from hetopt import session

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), 8)
with session(model, opt) as run:
    for x in run.loader(loader):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LookupError("only where there are two")
        run.backward(model(x).sum(1).mean())
        opt.step()
        opt.zero_grad()
"""


def test_a_failure_on_two_workers_is_told_by_what_was_raised(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    with pytest.raises(RunFailed, match=r"train\.py failed: LookupError: only where there are two:"):
        check_script(path)


class Pictures(Dataset[torch.Tensor]):
    """Has none that can be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise LookupError(f"picture {index} is\ntorn: {'x' * 500} {'y' * 9}")

    def __len__(self) -> int:
        return 4


def test_an_error_of_a_reader_process_is_told_by_its_own_line_and_words() -> None:
    """Torch's loader passes it on as text, which begins with its own words and ends with those of the error."""
    with pytest.raises(LookupError) as caught:
        next(iter(DataLoader(Pictures(), num_workers=1, multiprocessing_context="spawn")))
    assert str(caught.value).startswith("Caught LookupError in DataLoader worker process")
    code = Pictures.__getitem__.__code__
    told = explain(caught.value, "worker 1", Lines(__file__))
    assert told.message == f"worker 1, {__file__}, line {code.co_firstlineno + 1}: LookupError: picture 0 is torn: ..."
