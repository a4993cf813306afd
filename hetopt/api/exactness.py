"""Whether a converted script computes what the script before it did: gradient by gradient, also on unequal workers."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hetopt.api.profiling_script import alone_environment
from hetopt.core.errors import RunFailed
from hetopt.core.plain_text import one_line
from hetopt.core.reporter import Reporter
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec

EXACT = 1e-5
"""Largest relative difference of a gradient that rounding in float32 leaves."""

Precision: TypeAlias = Literal["float32", "float64"]

PATIENCE_S = 600.0
SHARES = (3, 1)
"""Of the two workers that share a batch."""

_SPEC_FILE = "spec.json"

_RAISED = re.compile(r"^(?:\[rank\d+\]: )?((?!hetopt:)[A-Za-z_][\w.]*: .+)", re.MULTILINE)
"""An exception and what it says, as Python ends a traceback."""
_OURS = re.compile(r"^hetopt[\w.]+: ")


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What the comparison found.

    Attributes:
        alone: largest relative difference of a gradient, of the converted script alone.
        shared: the same, of two workers that share every batch 3 to 1.
        steps: that were compared.
        normalises: whether the model has BatchNorm in training mode, by which a worker's samples depend on each other.
        precision: that both were computed in.
        options: what optimizers are told otherwise than in the script before, in words; empty: nothing.
    """

    alone: float
    shared: float
    steps: int
    normalises: bool = False
    precision: Precision = "float32"
    options: str = ""

    @property
    def is_of_batch_norm(self) -> bool:
        """Whether the workers differ as BatchNorm lets them, which normalises the samples of each by themselves."""
        return self.normalises and self.alone <= EXACT < self.shared

    @property
    def is_exact(self) -> bool:
        """Whether no difference is more than rounding."""
        return max(self.alone, self.shared) <= EXACT and not self.options


def compare(
    before: Path,
    after: Path,
    arguments: Sequence[str] = (),
    *,
    precision: Precision = "float32",
    reporter: Reporter | None = None,
) -> Exactness:
    """Run both for three steps and compare what their optimizers found in ``.grad``.

    Args:
        before: the script as it was.
        after: with a session.
        arguments: of both.
        precision: ``float64`` computes in it what a script computes in float32, as deep networks amplify its rounding
            within three steps; ``float32`` leaves the script as it is.
        reporter: told what runs.

    Raises:
        RunFailed: one of them fails, or the two do not train the same parameters.
    """
    told = reporter or Reporter()
    with tempfile.TemporaryDirectory(prefix="hetopt-convert-") as name:
        folder = Path(name)
        spec = folder / _SPEC_FILE
        spec.write_text(unequal().model_dump_json(), encoding="utf-8")
        python = [sys.executable, "-m"]
        recorded = ["hetopt.profiler.script.gradients", str(folder)]
        torchrun = ["hetopt.trainer.torchrun", "--nproc-per-node", str(len(SHARES)), "--module"]
        told("the script as it was", 0.0)
        _run([*python, *recorded, "before", precision, str(before), *arguments], before)
        told("the new script alone", 1 / 3)
        _run([*python, *recorded, "alone", precision, str(after), *arguments], after)
        told("the new script on two workers", 2 / 3)
        _run([*python, *torchrun, *recorded, "shared", precision, str(after), *arguments], after, HETOPT_SPEC=str(spec))
        from hetopt.profiler.script.gradients import differences

        found = differences(folder, "before", ("alone", "shared"))
        if found.steps == 0:
            raise RunFailed("the script did no step of an optimizer.", hint="give it arguments with which it trains")
        if found.zero:
            raise RunFailed(
                f"{found.zero} of the gradients of the first {found.steps} steps are all zeros: nothing is compared.",
                hint="give it arguments (warm-up, initial weights, data) with which it learns from the first step on",
            )
        alone, shared = found.largest
        return Exactness(
            alone=alone,
            shared=shared,
            steps=found.steps,
            normalises=found.normalises,
            precision=precision,
            options=found.options,
        )


def unequal() -> RunSpec:
    """A run of two workers that share every batch 3 to 1."""
    return RunSpec(
        task="script",
        workers=tuple(WorkerSpec(host="localhost", type="local", local_batch_size=share) for share in SHARES),
        batch_policy="static",
        stop=StopRule(max_steps=1),
    )


def _run(command: Sequence[str], script: Path, **more: str) -> None:
    environment = {**alone_environment(script), "OMP_NUM_THREADS": "1", **more}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"{script} did not do three steps in {PATIENCE_S:.0f} s.", hint="give it arguments with which it is short"
        ) from None
    if done.returncode != 0:
        cause = _cause(done.stderr.decode(errors="replace"))
        raise RunFailed(
            f"{script} failed{': ' + one_line(cause)[:300].rstrip('.') if cause else ''}.",
            hint="see that it runs by itself with these arguments",
        )


def _cause(printed: str) -> str:
    """The last exception that was printed, of ours its sentence; torchrun's own says nothing. Else the last line."""
    raised = _RAISED.findall(printed) or [line for line in printed.splitlines() if line.strip()] or [""]
    return _OURS.sub("", raised[-1])
