"""Training that is disturbed: schedules of faults in virtual time and on real runs, and how soon a run is back.

- **simulated**: the control code over a store and collectives in memory, with a virtual clock (`_simulated_run`).
- **real**: small runs of 2 to 4 worker processes with seeded faults (kill -9 of a worker, of all, a worker that leaves
  and comes back, one that freezes or becomes ten times slower, notice, a checkpoint torn at a random byte, a disk that
  has no room for one). Dense exchange: where the shares stay, the final weights must be those of the undisturbed run,
  bit for bit; where they do not, the final accuracy must be within the spread of seeds.
- **recovery**: of 4 workers under `hetopt launch`'s host, a worker is killed; time to the next completed step, beside
  that of torchrun restarting the same script from its newest checkpoint, in the same run and in turns.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks._faulty_runs import OUTCOME_FILE, RUNS_FILE
from benchmarks._outcome import Outcome, options, publish, quartiles, run_benchmark
from benchmarks._simulated_run import check
from hetopt.backends.backend import RunHandle
from hetopt.backends.processes import LocalLauncher
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.run_spec import RunSpec

TASK = f"{Path(__file__).with_name('_toy.py')}:task"
STEP_S = 0.02
STEPS = 60
KINDS = ("kill", "kill", "kill-all", "leave", "freeze", "slow", "notice", "tear")
ROOTS_KINDS = (*KINDS, "full")
"""Only root may mount a small disk."""
_REPOSITORY = Path(__file__).resolve().parents[1]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_SPREAD = 0.04
"""Of the final accuracy over seeds of this job after so few steps: twice its standard deviation."""


def spec(workers: int, steps: int, **changes: object) -> dict[str, Any]:
    """Return the JSON spec of a run whose steps take their declared time, whatever else this machine does."""
    return {
        "task": TASK,
        "workers": [
            {
                "host": "here",
                "type": "local",
                "local_batch_size": 96 // workers,
                "declared": {"fixed_s": STEP_S, "per_sample_s": 1e-6},
            }
        ]
        * workers,
        "batch_policy": "static",
        "stop": {"max_steps": steps},
        "max_restarts": 20,
        "checkpoint_every_s": 0.5,
        "control_period_steps": 5,
        "exchange_timeout_s": 30.0,
        **changes,
    }


def schedule(seed: int, most_workers: int = 4) -> tuple[int, list[dict[str, object]]]:
    """Return the number of workers and the faults of a seed.

    A host that leaves returns ten steps later; kinds that need root come only with it.
    """
    draw = random.Random(seed)
    workers, faults = draw.randint(2, most_workers), []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(ROOTS_KINDS if os.geteuid() == 0 else KINDS)
        at = draw.randint(5, STEPS - 15)
        faults.append({"at_step": at, "kind": kind, "place": draw.randrange(workers), "byte": draw.random()})
        if kind == "leave":
            faults.append({"at_step": at + 10, "kind": "return"})
    return workers, sorted(faults, key=lambda fault: int(str(fault["at_step"])))


def simulated(results: Outcome, runs: int) -> None:
    """Simulate schedules of faults in virtual time, and record the figures.

    Schedules that fail are printed to stderr.
    """
    began_s, failed, worst = time.perf_counter(), 0, 0
    for seed in range(runs):
        try:
            worst = max(worst, *check(seed).redone)
        except AssertionError as error:
            failed += 1
            print(f"  simulated schedule {seed}: {error}", file=sys.stderr)
    print(
        f"simulated  {runs} schedules in {time.perf_counter() - began_s:.0f} s: {failed} failed; at most {worst} steps "
        "done again (checkpoints every 10)"
    )
    results.figures["simulated_schedules"] = runs
    results.figures["simulated_steps_redone_at_most"] = worst
    results.goal("simulated_failed", failed, at_most=0)


def run_faulty(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Do real runs with faults in processes of one program, in a new folder; return when all are over.

    Raises:
        subprocess.CalledProcessError: the program failed.
        FileExistsError: the folder exists.
    """
    folder.mkdir(parents=True)
    entries = [{"environment": _ENVIRONMENT, "within_s": 90.0, **run} for run in runs]
    (folder / RUNS_FILE).write_text(json.dumps(entries))
    subprocess.run([sys.executable, "-m", "benchmarks._faulty_runs", str(folder)], cwd=_REPOSITORY, check=True)


def real(results: Outcome, folder: Path, runs: int, most_workers: int = 4) -> None:
    """Do real runs with seeded faults beside calm ones, and record how many end differently; these go to stderr."""
    schedules = [schedule(seed, most_workers) for seed in range(runs)]
    sizes = sorted({workers for workers, _ in schedules})
    calm = [{"name": f"calm-{workers}", "spec": spec(workers, STEPS), "faults": []} for workers in sizes]
    disturbed = [
        {"name": f"seed-{seed}", "spec": spec(workers, STEPS), "faults": faults}
        for seed, (workers, faults) in enumerate(schedules)
    ]
    run_faulty(folder, [*calm, *disturbed])
    failed = 0
    for seed, (workers, faults) in enumerate(schedules):
        run_dir = folder / f"seed-{seed}"
        problem = wrong(run_dir, folder / f"calm-{workers}", exact=all(fault["kind"] != "leave" for fault in faults))
        if problem is not None:
            failed += 1
            print(f"  schedule {seed} {faults}: {problem}", file=sys.stderr)
    print(f"real       {runs} schedules: {failed} failed")
    results.figures["real_schedules"] = runs
    results.goal("real_failed", failed, at_most=0)


def wrong(run_dir: Path, calm_dir: Path, *, exact: bool) -> str | None:
    """Return how a faulty run differs from the calm one in what is promised; None if it kept all."""
    ended = json.loads((run_dir / OUTCOME_FILE).read_text())["ended"]
    if ended != "training_finished":
        return f"ended by {ended or 'nothing'}"
    last, calm = ([e for e in read_events(d / EVENTS_FILE) if e["event"] == ended][-1] for d in (run_dir, calm_dir))
    if last["step"] != STEPS:
        return f"ended at step {last['step']}"
    if exact and last["parameters_sha256"] != calm["parameters_sha256"]:
        return "ended with other weights"
    difference = abs(last["metrics"]["accuracy"] - calm["metrics"]["accuracy"])
    return f"ended with an accuracy that differs by {difference:.3f}" if difference > _SPREAD else None


def recovery(results: Outcome, folder: Path, kills: int) -> None:
    """Measure the time to the next step after a worker dies: alone, or with its supervisor (torchrun restarts all).

    Raises:
        RuntimeError: the run does not go on between two kills, or a worker is not there.
    """
    folder.mkdir()
    launcher = LocalLauncher(grace_s=5.0)
    handle = launcher.start(
        RunSpec.model_validate(spec(4, 10**6, max_restarts=1000, checkpoint_every_s=2.0)), folder, _ENVIRONMENT
    )
    times: dict[str, list[float]] = {"memory": [], "torchrun": []}
    try:
        for number in range(kills):
            for side, taken in times.items():
                if not _steps_after(folder, time.time() + 3.0, within_s=120.0):
                    raise RuntimeError(f"the run does not go on: {launcher.poll(handle)}")
                warden, worker = _warden_and_worker(folder, number % 4)
                killed_s = time.time()
                os.kill(worker if side == "memory" else warden, signal.SIGKILL)
                step_s = _steps_after(folder, killed_s + 0.1, within_s=120.0)
                if step_s is not None:
                    taken.append(step_s - killed_s)
                    print(f"  {side}: {taken[-1]:.2f} s", file=sys.stderr)
    finally:
        launcher.stop(RunHandle(run_dir=folder))
    for side, taken in times.items():
        low, middle, high = quartiles(taken)
        print(
            f"recovery   {side:<9} median {middle:.2f} s [{low:.2f}, {high:.2f}] over {len(taken)} kills of 4 workers"
        )
    results.goal("recovery_s", statistics.median(times["memory"]), at_most=10.0)
    results.baselines["torchrun_restart_s"] = round(statistics.median(times["torchrun"]), 3)


def _steps_after(folder: Path, moment_s: float, *, within_s: float) -> float | None:
    """Wait for the first control period that began after a moment; return the time of its first step's end.

    None: there is none after ``within_s`` seconds.
    """
    deadline = time.time() + within_s
    while time.time() < deadline:
        for event in reversed(read_events(folder / EVENTS_FILE)):
            if event["event"] != "step":
                continue
            began_s = event["time_s"] - event["steps"] * event["step_time_s"]
            if began_s < moment_s:
                break
            first = [
                each["time_s"] - (each["steps"] - 1) * each["step_time_s"]
                for each in read_events(folder / EVENTS_FILE)
                if each["event"] == "step" and each["time_s"] - each["steps"] * each["step_time_s"] >= moment_s
            ]
            return float(first[0])
        time.sleep(0.05)
    return None


def _warden_and_worker(folder: Path, place: int) -> tuple[int, int]:
    """Return the process numbers of a worker's supervisor and of the worker.

    Raises:
        RuntimeError: there is no such worker.
    """
    processes = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or [])]
    numbers = {each.pid for each in processes}
    for each in processes:
        children = [child.pid for child in each.children()]
        if "hetopt.trainer.worker" in each.info["cmdline"] and each.environ().get("RANK") == str(place) and children:
            return each.pid, next(child for child in children if child in numbers)
    raise RuntimeError(f"worker {place} is not there")


def main() -> None:
    """Simulate and run schedules of faults, measure recovery, and publish; a smoke run leaves recovery out.

    Raises:
        RuntimeError: as of `recovery`.
    """
    asked = options(__doc__)
    schedules, real_runs, kills = (40, 1, 0) if asked.smoke else (300, 12, 3) if asked.quick else (10_000, 200, 15)
    results = Outcome(benchmark="chaos", quick=asked.quick, seeds=f"0 to {schedules - 1}")
    simulated(results, schedules)
    with tempfile.TemporaryDirectory(prefix="hetopt-chaos-") as temporary:
        folder = Path(temporary)
        real(results, folder / "real", real_runs, most_workers=2 if asked.smoke else 4)
        if not asked.smoke:
            recovery(results, folder / "recovery", kills)
    publish(results, asked.json_file)


if __name__ == "__main__":
    run_benchmark(main)
