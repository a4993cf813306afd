"""What is said of a script that failed is what it failed with, and the line of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetopt.api.exactness import compare
from hetopt.core.errors import RunFailed
from hetopt.trainer.script_lines import Lines

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


def test_a_line_of_code_without_a_file_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script runs in its own folder, beside which such names would be."""
    monkeypatch.chdir(tmp_path)
    text = "import os\n\n\nfor act in (lambda: os.environ['IT'], lambda: exec('1 / 0')):\n"
    script = compile(
        text + "    try:\n        act()\n    except Exception as error:\n        found.append(error)\n",
        "train.py",
        "exec",
    )
    found: list[Exception] = []
    exec(script, {"__name__": "__main__", "found": found})
    assert [Lines("train.py").of(error.__traceback__) for error in found] == ["train.py, line 4"] * 2
