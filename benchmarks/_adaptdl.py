"""AdaptDL's own goodput model, by its authors' code, in whatever interpreter has it.

A script of its own: the package (adaptdl 0.2.11, with autograd) is no dependency of hetopt and need not share its
environment. Reads one JSON object of columns on standard input, writes predictions on standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHON = "HETOPT_ADAPTDL_PYTHON"
"""Names an interpreter with adaptdl and autograd; absent: this one."""


def predict(jobs: Sequence[dict[str, dict[str, list[float]]]]) -> list[list[float]] | None:
    """Return predicted seconds of each job's ``asked`` steps, fitted to its ``shown`` ones; None without adaptdl."""
    python = os.environ.get(PYTHON, sys.executable)
    done = subprocess.run(
        [python, str(Path(__file__).resolve())],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode != 0:
        return None
    predicted: list[list[float]] = json.loads(done.stdout)
    return predicted


def _main() -> None:
    from importlib import import_module

    import numpy as np

    goodput = import_module("adaptdl.goodput")

    answers = []
    for job in json.load(sys.stdin):
        shown, asked = ({name: np.array(values) for name, values in job[part].items()} for part in ("shown", "asked"))
        step, alone = shown["step_time_s"], shown["step_time_s"] - shown["sync_time_s"]
        fitted = goodput.fit_perf_params(shown["nodes"], shown["workers"], shown["batch"], alone, step)
        computing = goodput._predict_accum_time(fitted, asked["batch"])
        waiting = goodput._predict_network_time(fitted, asked["nodes"], asked["workers"])
        answers.append(np.exp(goodput._predict_log_optim_time(fitted, computing, waiting)).tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main()
