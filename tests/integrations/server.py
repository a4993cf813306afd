"""Runs scripts in forks of a process that has the frameworks: ``python -m tests.integrations.server FOLDER [CASE...]``.

Each runs as the plain framework, in a session of one worker, and on two workers that share every batch 3:1, all four
processes at a time. What each optimizer step finds in ``.grad`` and what a script gives back are written to the folder.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetopt.core.comm import overlap
from hetopt.core.run_folder import SPEC_VARIABLE
from tests.trainer.cases.server import Plain, child, shares, wait_for

from . import scripts


def framework(case: Callable[[scripts.Way], Any], folder: Path, open_: Any) -> Any:
    """What the case gives back; its session finds the shares in the environment, as a launched one does."""
    warnings.simplefilter("ignore")
    if isinstance(open_, partial):
        spec = folder / f"spec-{os.environ['RANK']}.json"
        spec.write_text(shares(2).model_dump_json(), encoding="utf-8")
        os.environ[SPEC_VARIABLE] = str(spec)
    torch.manual_seed(0)
    name = "plain" if open_ is Plain else "two" if isinstance(open_, partial) else "alone"
    return case(scripts.Way(name=name, folder=folder / name))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    overlap.FIRST_BUCKET_BYTES, overlap.BUCKET_BYTES = 0, 4096
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    scripts.import_all()
    for case in scripts.CASES:
        if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
            continue
        place = folder / case.__name__
        place.mkdir()
        living = {}
        for label, rank, workers in (("plain", 0, 1), ("alone", 0, 1), ("two-0", 0, 2), ("two-1", 1, 2)):
            pid = os.fork()
            if pid == 0:
                child(partial(framework, case, place), place / f"{label}.pt", rank, workers, place / "store")
            living[pid] = label
        wait_for(living)


if __name__ == "__main__":
    main()
