"""How far a script's gradients in unequal shares are from those of one machine."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetopt.api.profiling_script import ONLY_WORKER, alone_environment
from hetopt.api.script_text import read_script
from hetopt.core import formatting
from hetopt.core.artifact import Record, write_atomically
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.interruption import Reporter
from hetopt.core.paths import home, inside
from hetopt.core.plain_text import one_line
from hetopt.core.run_folder import SPEC_FILE, SPEC_VARIABLE
from hetopt.core.run_rules import why_shares_differ
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec

EXACT = 1e-5
"""Largest relative difference of two learning rates that count as the same."""

DIFFERS = 1e-4
"""Relative difference of two gradients above which shares differ: rounding stays below it within three steps; also the
tolerance of audits."""

PATIENCE_S = 600.0
"""Seconds that each run of `check_script` may take by default."""
SHARES = (3, 1)
"""Shares of the two workers that divide a batch in a check."""

_RAISED = re.compile(r"^(?:\[rank\d+\]: )?((?!hetopt:)[A-Za-z_][\w.]*: .+)", re.MULTILINE)
"""An exception and what it says, as Python ends a traceback."""
_OURS = re.compile(r"^hetopt[\w.]+: ")


@dataclass(frozen=True, kw_only=True)
class ShareCheck:
    """The relative differences of two workers' gradients from one machine's over a script's first steps.

    As text it is one or two sentences for people.

    Attributes:
        shares: relative difference by step, where the workers share batches 3 to 1; empty: the script draws its batches
            itself, so that shares stay equal.
        equal: relative difference by step in equal shares, as DistributedDataParallel has them; empty: as above.
        rates: the right learning rate (of a DDP script that in equal shares, of a session that on one machine) and
            that in unequal shares, at the first step at which they differ, or at steps 10 or 1,000 of a schedule; None:
            they agree.
        is_ddp: True: the script uses DistributedDataParallel; False: a session.
        normalises: whether the model has BatchNorm in training mode.
    """

    shares: tuple[float, ...]
    equal: tuple[float, ...]
    rates: tuple[float, float] | None = None
    is_ddp: bool = False
    normalises: bool = False

    @property
    def step(self) -> int | None:
        """The first step, from 1, at which shares differ by more than rounding; None: they do not."""
        return next((number for number, apart in enumerate(self.shares, 1) if apart > DIFFERS), None)

    @property
    def cause(self) -> str:
        """The cause of a difference, and what may mend it, in half a sentence; empty: there is no difference."""
        if self.rates is not None:
            right, shared = self.rates
            return f"the learning rate is {shared:g} in shares and {right:g} else: do not compute it from the share"
        if self.step is None:
            return ""
        return why_shares_differ(is_ddp=self.is_ddp, normalises=self.normalises)

    def __str__(self) -> str:
        """Return the differences in shares and in equal shares, at the first step that differs, and the cause.

        Where none differs, the largest are returned; for a script that draws its own batches, a sentence that says so.
        """
        if not self.shares:
            return "The script draws its batches itself: shares stay equal, as under DDP."
        at = -1 if self.step is None else self.step - 1
        shares, equal = (max(by_step) if at < 0 else by_step[at] for by_step in (self.shares, self.equal))
        step = "" if self.step is None else f" at step {self.step}"
        cause = f": {self.cause}" if self.cause else ""
        return (
            f"Shares differ from one machine by {formatting.distance(shares)}{step} "
            f"(equal shares, as DDP: {formatting.distance(equal)}){cause}."
        )


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    before: Path | None = None,
    patience_s: float = PATIENCE_S,
    reporter: Reporter | None = None,
) -> ShareCheck:
    """Run a script for three steps, in unequal shares, equal shares, and alone; return how far the gradients differ.

    The script runs in other processes on this machine, with two workers and then alone; the workers share batches 3 to
    1, then 1 to 3. A DDP script that shares out its batches itself is not run alone, and has no differences.

    Args:
        script: file with DistributedDataParallel or a session.
        arguments: arguments of the script.
        before: the one-process script that ``script`` was converted from, to run alone in its place; None: ``script``
            itself.
        patience_s: seconds that each of the three runs may take.
        reporter: receives which run is going on; None: nothing is reported.

    Raises:
        NeedsEqualShares: the script fails in unequal shares, and runs in equal ones.
        RunFailed: a run fails, takes too long, or does no step with a gradient other than 0.
        BadInput: the script has neither DistributedDataParallel nor a session.
        OSError: a run ended well and left no gradients.
    """
    from hetopt.profiler.script.gradients import STEPS, distances, recorded

    reporter = reporter or Reporter()
    workers = len(SHARES)
    with tempfile.TemporaryDirectory(prefix="hetopt-check-") as name:
        folder = Path(name)
        spec = folder / SPEC_FILE
        spec.write_text(unequal().model_dump_json(), encoding="utf-8")
        reporter("two workers in shares of 3 to 1", 0.0)
        failed: RunFailed | None = None
        try:
            _record(
                folder, "shared", script, arguments, {SPEC_VARIABLE: str(spec)}, workers=workers, patience_s=patience_s
            )
        except RunFailed as error:
            failed = error
        reporter("two workers in equal shares", 1 / 3)
        _record(folder, "equal", script, arguments, {}, workers=workers, patience_s=patience_s)
        equal, equal_facts = recorded(folder, "equal")
        if failed is not None and equal_facts.way == "session":
            _alone(folder, before or script, arguments, worker_batch_size=None, spec=spec, patience_s=patience_s)
            # Its batch is that of one machine: equal shares do not mend a rate that is computed from a worker's part.
            equal = [] if _other_rate(recorded(folder, "alone")[1].rates, equal_facts.rates) else equal
        if failed is not None:
            raise NeedsEqualShares(failed) if equal else failed
        shared, shared_facts = recorded(folder, "shared")
        if not any(gradient.any() for steps in shared for gradient in steps):
            raise RunFailed(_NO_STEP, hint=_NO_STEP_HINT)
        if not shared_facts.way:
            raise BadInput(
                f"{script} uses neither DistributedDataParallel nor a session: its workers would each train for "
                "themselves.",
                hint="`hetopt convert` writes a session into a script for one process",
            )
        if shared_facts.keeps_equal:
            return ShareCheck(shares=(), equal=(), is_ddp=True)
        reporter("one machine", 2 / 3)
        _alone(
            folder,
            before or script,
            arguments,
            worker_batch_size=equal_facts.batch_size if shared_facts.way == "ddp" else None,
            spec=spec,
            patience_s=patience_s,
        )
        alone, alone_facts = recorded(folder, "alone")
        # A DDP script may scale its rate by the number of workers: that of equal shares is right.
        right = equal_facts if shared_facts.way == "ddp" else alone_facts
        other_rate = _other_rate(right.rates, shared_facts.rates) or _other_rate(
            right.schedules, shared_facts.schedules
        )
        # Behind another rate, gradients are of other parameters.
        first = (_other_rate(alone_facts.rates, other.rates) for other in (shared_facts, equal_facts))
        steps = min((difference[0] for difference in first if difference is not None), default=STEPS)
        by_step = [tuple(distances(alone, other)[:steps]) for other in (shared, equal)]
        if not all(by_step):
            raise RunFailed(_NO_STEP, hint=_NO_STEP_HINT)
        return ShareCheck(
            shares=by_step[0],
            equal=by_step[1],
            rates=None if other_rate is None else other_rate[1:],
            is_ddp=shared_facts.way == "ddp",
            normalises=alone_facts.normalises,
        )


def _alone(
    folder: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    worker_batch_size: int | None,
    spec: Path,
    patience_s: float,
) -> None:
    """Run a script on whole batches and record its gradients as ``alone``.

    A session runs as one process; a DDP script as torchrun's only worker, which computes the batches of both. A
    script that insists on its number of workers runs on two, of which the first computes every batch whole.

    Args:
        folder: in which the gradients are written.
        script: file to run.
        arguments: arguments of the script.
        worker_batch_size: samples of each of two DDP workers; None: the script has a session.
        spec: file of the spec of the run with unequal shares.
        patience_s: seconds that each run may take.

    Raises:
        RunFailed: the script fails, or takes too long.
    """
    from hetopt.profiler.script.gradients import AS_ONE_VARIABLE, BATCH_VARIABLE, RANKS_VARIABLE

    if worker_batch_size is None:
        _record(folder, "alone", script, arguments, {}, patience_s=patience_s)
        return
    ranks = {RANKS_VARIABLE: str(len(SHARES)), BATCH_VARIABLE: str(worker_batch_size)}
    try:
        _record(folder, "alone", script, arguments, ranks | ONLY_WORKER, patience_s=patience_s)
    except RunFailed:
        whole = {SPEC_VARIABLE: str(spec), AS_ONE_VARIABLE: "1"}
        _record(folder, "alone", script, arguments, whole, workers=len(SHARES), patience_s=patience_s)


class NeedsEqualShares(RunFailed):
    """The error of a script that runs with equal local batch sizes and fails with others.

    Args:
        error: with which the script failed in unequal shares; its message becomes part of this one.
    """

    def __init__(self, error: RunFailed) -> None:
        super().__init__(
            f"in shares of 3 to 1 that change at each step {error.message.rstrip('.')}; in equal shares it runs",
            hint="its collectives or shapes want the same batch of every worker and step: launch with "
            "--batch-policy uniform",
        )


_NO_STEP = "the script did no step of an optimizer with a gradient that is not zero."
_NO_STEP_HINT = "give it arguments with which it trains"


def _other_rate(right: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[int, float, float] | None:
    """Return the first place, from 1, at which learning rates differ, and both; None: all are the same."""
    different = [
        (step, rate, another)
        for rates, other_rates in zip(right, other, strict=False)
        for step, (rate, another) in enumerate(zip(rates, other_rates, strict=False), 1)
        if abs(rate - another) > EXACT * abs(rate)
    ]
    return min(different, default=None)


FIRST_PATIENCE_S = 120.0
"""Seconds that each run of a check before a launch may take, as a person waits for it."""

_UNKNOWN = "How far shares are from one machine is not known"


class FirstCheck(Record):
    """The result of checking a script before its launch.

    Attributes:
        sentence: how far shares are from one machine, or why that is not known.
        needs_equal_shares: True if the script fails in unequal shares and runs in equal ones.
    """

    sentence: str
    needs_equal_shares: bool = False


def first_check(script: Path, arguments: Sequence[str], *, reporter: Reporter | None = None) -> tuple[FirstCheck, bool]:
    """Return a script's check of unequal local batches, and whether the check ran now rather than was read.

    The result is kept in the user's home folder of hetopt, by a hash of the script, its local modules and its
    arguments. A check that fails gives a sentence that says so.

    Args:
        script: file with DistributedDataParallel or a session.
        arguments: arguments of the script.
        reporter: receives which run is going on; None: nothing is reported.

    Raises:
        BadInput: the script or a module of it cannot be read or is no Python.
    """
    try:
        files = [(file.name, file.text) for file in read_script(script)]
        digest = hashlib.sha256(json.dumps([files, list(arguments)]).encode()).hexdigest()
        path = inside(home() / "checked", f"{digest}.json")
        with suppress(FileNotFoundError, ValueError):  # a record that cannot be read is made again
            return FirstCheck.model_validate_json(path.read_text(encoding="utf-8")), False
        try:
            check = FirstCheck(
                sentence=str(check_script(script, arguments, patience_s=FIRST_PATIENCE_S, reporter=reporter))
            )
        except NeedsEqualShares as error:
            check = FirstCheck(sentence=f"{_UNKNOWN}: {error.message}.", needs_equal_shares=True)
        except HetoptError as error:
            check = FirstCheck(sentence=f"{_UNKNOWN}: {error.message}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, check.model_dump_json() + "\n")
    except OSError as error:
        return FirstCheck(sentence=f"{_UNKNOWN}: {error.filename} {error.strerror}."), True
    return check, True


def unequal() -> RunSpec:
    """Return the spec of a run of two workers whose local batch sizes are 3 to 1."""
    return RunSpec(
        task="script",
        workers=tuple(WorkerSpec(host="localhost", type="local", local_batch_size=share) for share in SHARES),
        batch_policy="static",
        stop=StopRule(max_steps=1),
    )


def _record(
    folder: Path,
    name: str,
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    workers: int = 1,
    patience_s: float,
) -> None:
    """Run a script for three steps in other processes, and write its gradients into the folder under a name.

    Raises:
        RunFailed: the script fails, or takes longer than ``patience_s`` seconds.
    """
    torchrun = ["hetopt.trainer.torchrun", "--nproc-per-node", str(workers), "--module"] if workers > 1 else []
    recorded = ["hetopt.profiler.script.gradients", str(folder), name, str(script), *arguments]
    _run([sys.executable, "-m", *torchrun, *recorded], script, environment, patience_s=patience_s)


def _run(command: Sequence[str], script: Path, more: Mapping[str, str], *, patience_s: float) -> None:
    """Run a command for a script to its end, with one thread and more environment variables; its output is dropped.

    Raises:
        RunFailed: the command fails, with the cause that it printed, or takes longer than ``patience_s``.
    """
    environment = {**alone_environment(), "OMP_NUM_THREADS": "1", **more}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"{script} did not do three steps in {patience_s:.0f} s.", hint="give it arguments with which it is short"
        ) from None
    if done.returncode != 0:
        printed = done.stderr.decode(errors="replace")
        # Torchrun's own last line says nothing; an exception of hetopt's is told by its sentence.
        raised = _RAISED.findall(printed) or [line for line in printed.splitlines() if line.strip()] or [""]
        cause = _OURS.sub("", raised[-1])
        raise RunFailed(
            f"{script} failed{': ' + one_line(cause)[:300].rstrip('.') if cause else ''}.",
            hint=f"see that it runs {'by itself' if 'torchrun' not in command[2] else 'under torchrun on two workers'} "
            "with these arguments",
        )
