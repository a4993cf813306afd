"""What is said of a script that failed while it was compared is what it failed with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetopt.api.exactness import compare
from hetopt.core.errors import RunFailed

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
        compare(path, path)
