"""What is said of a script that failed is what it failed with, and the line of it."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hetopt.api.exactness import compare
from hetopt.core.errors import RunFailed
from hetopt.trainer import failure
from hetopt.trainer.failure import explain
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
    assert [Lines("train.py").of(error) for error in found] == ["train.py, line 4"] * 2


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


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a full disk of 16 kB, in the place of shared memory."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may make a small disk")
    monkeypatch.setattr(failure, "SHARED_MEMORY", tmp_path)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_where_a_library_finds_no_room_the_library_and_the_full_mount_are_named(small_disk: Path) -> None:
    (small_disk / "fills").write_bytes(bytes(16384))
    with (small_disk / "more").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space") as caught:
        shutil.copyfileobj(io.BytesIO(bytes(8)), stream)
    told = explain(caught.value, "worker 0")
    assert told.message == "worker 0: OSError: [Errno 28] No space left on device (in shutil)"
    assert str(told.hint).partition(", ")[2].startswith(f"then launch again; free are 0 B of 16.4 kB in {small_disk}, ")
