"""The harness: runs hetopt and a baseline in one rehearsed cluster, in turn, and compares them by medians of ratios.

A `Side` is one way of doing the same job. `rehearse` builds the cluster (namespaces, limited links), does every side
once a round, in an order that turns from round to round, and returns what each run logged.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks._collectives import ANSWER_FILE, REQUEST_FILE, Answer, Request
from benchmarks._crew import EXCHANGES, RUNS_FILE
from hetopt.backends.emulation.conductor import RehearsalLauncher
from hetopt.backends.emulation.namespaces import EmulatedNetwork, why_not
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import EmulatedHost, RunSpec, WorkerSpec
from hetopt.core.run_status import RunState

STORE_PORT = 29400

By = Literal["hetopt", "session", "ddp", "ddp-tuned", "ddp-fp16", "ddp-powersgd"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way of doing the job: hetopt's trainer under a spec, a script with a session that is given the spec, or
    DistributedDataParallel, plain or with a hook."""

    name: str
    by: By
    spec: RunSpec


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The quartiles of a ratio over several rounds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} – {self.high:.2f})"


Log = list[Event]


def need_namespaces(*, or_skip: bool = False) -> None:
    """Exit with a sentence where no cluster can be emulated; with code 0 where the benchmark may be skipped."""
    reason = why_not()
    if reason is None:
        return
    sentence = f"this benchmark rehearses clusters, which cannot be done here: {reason}"
    if or_skip:
        print(f"skipped: {sentence}")
        sys.exit(0)
    sys.exit(sentence)


def rehearse(hosts: Sequence[EmulatedHost], sides: Sequence[Side], *, rounds: int) -> dict[str, list[Log]]:
    """Run every side in an emulated cluster, in turn, and return their event logs, one a round.

    Raises:
        RunFailed: a run failed; the sentence is its own.
    """
    names = [(side, f"{round_}-{side.name}") for round_ in range(rounds) for side in _turned(sides, round_)]
    with _folder() as folder:
        for side, name in names:
            (folder / name).mkdir()
            write_spec(folder / name, side.spec)
        _work(folder, hosts, [{"name": name, "side": side.by} for side, name in names])
        logs: dict[str, list[Log]] = {side.name: [] for side in sides}
        for side, name in names:
            logs[side.name].append(read_events(folder / name / EVENTS_FILE))
        return logs


def time_exchanges(hosts: Sequence[EmulatedHost], request: Request) -> Answer:
    """Return the times of gradient exchanges between emulated hosts.

    Raises:
        RunFailed: a worker failed; the sentence is its own.
    """
    with _folder() as folder:
        (folder / EXCHANGES).mkdir()
        (folder / EXCHANGES / REQUEST_FILE).write_text(request.model_dump_json(), encoding="utf-8")
        _work(folder, hosts, [{"name": EXCHANGES, "side": EXCHANGES}])
        return Answer.model_validate_json((folder / EXCHANGES / ANSWER_FILE).read_text(encoding="utf-8"))


def launch(spec: RunSpec) -> Log:
    """Run a spec under the product's own launcher, scheduled changes included, and return its event log.

    Raises:
        RunFailed: it did not finish.
    """
    with _folder() as folder:
        launcher = RehearsalLauncher()
        handle = launcher.start(spec, folder, {})
        try:
            while not (status := launcher.poll(handle)).state.is_over:
                time.sleep(0.2)
        finally:
            launcher.stop(handle)
        if status.state is not RunState.FINISHED:
            raise RunFailed(status.reason or f"the run {status.state.value}")
        return read_events(folder / EVENTS_FILE)


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Return the quartiles of ``over / under``, round by round.

    Of a single round all are its ratio.
    """
    ratios = [numerator / denominator for numerator, denominator in zip(over, under, strict=True)]
    if len(ratios) == 1:
        return Ratio(low=ratios[0], median=ratios[0], high=ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(low=low, median=median, high=high)


def step_time_s(log: Log, *, from_step: int) -> float:
    """Return the median over control periods of the mean step time in seconds, after ``from_step``."""
    periods = [float(event["step_time_s"]) for event in log if event["event"] == "step" and event["step"] > from_step]
    return statistics.median(periods)


def equal_shares(workers: int, total: int) -> tuple[int, ...]:
    """Return local batch sizes of ``total`` samples that ignore the workers' speeds."""
    return tuple(total // workers + (rank < total % workers) for rank in range(workers))


def best_compute_s(workers: Sequence[WorkerSpec], total: int) -> float:
    """Return the least seconds of a step's computation: the slowest worker's under optimal local batch sizes."""
    return solve_shares(declared_times(workers), total).compute_s


def compute_s(workers: Sequence[WorkerSpec], shares: Sequence[int]) -> float:
    """Return the seconds of the slowest worker's computation under these local batch sizes, as declared."""
    return max(time.time_s(share) for time, share in zip(declared_times(workers), shares, strict=True))


def share_changes(log: Log) -> list[Event]:
    """Return the events that changed local batch sizes."""
    return [event for event in log if event["event"] == "shares_changed"]


def declared_times(workers: Sequence[WorkerSpec]) -> list[WorkerTime]:
    """Return the time of a step's computation by samples that each worker declares."""
    declared = [worker.declared for worker in workers if worker.declared is not None]
    assert len(declared) == len(workers)
    return [
        WorkerTime(fixed_s=duration.fixed_s, per_sample_s=duration.per_sample_s, min_samples=1) for duration in declared
    ]


def _turned(sides: Sequence[Side], round_: int) -> list[Side]:
    first = round_ % len(sides)
    return [*sides[first:], *sides[:first]]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hetopt-benchmark-") as name:
        yield Path(name)


def _work(folder: Path, hosts: Sequence[EmulatedHost], runs: Sequence[Mapping[str, str]]) -> None:
    """Start the workers on their emulated hosts, and wait until all runs are done.

    Raises:
        RunFailed: a run failed; the sentence is its own.
    """
    with EmulatedNetwork.create(hosts) as network:
        namespaces = [network.namespace(place) for place, host in enumerate(hosts) for _ in range(host.workers)]
        (folder / RUNS_FILE).write_text(json.dumps({"namespaces": namespaces, "runs": list(runs)}), encoding="utf-8")
        environment = {
            **os.environ,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(STORE_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        crew = subprocess.Popen([sys.executable, "-m", "benchmarks._crew", str(folder)], env=environment)
        try:
            code = crew.wait()
        finally:
            crew.kill()
            crew.wait()
        if code:
            events = [event for run in runs for event in read_events(folder / run["name"] / EVENTS_FILE)]
            reasons = [event["reason"] for event in events if event["event"] == "run_failed"]
            raise RunFailed(reasons[0] if reasons else f"a worker of the benchmark ended with exit code {code}")
