"""Training on recorded spot clusters, rehearsed: what is trained for what is paid, beside one who knows the recording.

The part of each recording in which most nodes come and go is replayed in namespaces, as fast as `COMPRESSION` says:
hosts are killed, and those that return start from nothing. **hetopt** trains under its own launcher, with notice before
a host dies and without; the peer is torchrun's elastic agent with a script that saves snapshots at a fixed interval, of
several the one with which it trained most, and that waits for the dead as long as hetopt does.

Goodput is samples that are in the model at the end for each second of a host that was paid. The **oracle** knows the
recording: it trains on every host that has started, at the pace of the quicker side in calm times, and pays for no
change, no lost step and no checkpoint. A host has started when torch could be imported on it, by a process that does
nothing else, in calm times: nobody trains before. Those seconds are not compressed, and weigh as the minutes in which a
machine boots. Beside that stands the share of what hosts without any start would train.

One replay is one draw of which hosts go, on a machine whose speed changes: hetopt's sides are replayed `ROUNDS` times,
with other draws, and figures are medians with the least beside them. What is missing to the oracle is told in two
factors: ``attended``, what those hosts that did train would have trained at the calm pace, over the oracle (below 1:
hosts joined later than they had started), and ``at_pace``, what was trained, over that (below 1: steps were slower than
in calm times, were redone, or stood still while workers changed).
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks._outcome import DATA, Outcome, parser, publish, run_benchmark
from benchmarks._rehearsal import need_namespaces
from benchmarks._spot_nodes import Move, NodeTrace, best_samples, moves_of, read_node_traces
from benchmarks._spot_torchrun import run_under_torchrun
from hetopt.backends.emulation.conductor import RehearsalLauncher
from hetopt.core.errors import RunFailed
from hetopt.core.events.log import EVENTS_FILE, Event, read_events
from hetopt.core.run_spec import RunSpec

COMPRESSION = 30.0
SMOKE_COMPRESSION, SMOKE_HOSTS = 150.0, 2
HOSTS = 4
"""Real workers at most: a larger cluster is rehearsed in groups of nodes."""
CHECKPOINT_EVERY_S = 60.0
"""Of the recording's time: the trainer's own interval. Without their first host all go on from a checkpoint."""
SNAPSHOTS_EVERY_S = (600.0, CHECKPOINT_EVERY_S)
"""The same of the peer, whose every change undoes what came since the last: all are tried."""
BATCH, FIXED_S, PER_SAMPLE_S = 96, 0.02, 0.002
OF_ORACLE = 0.9
ROUNDS = 3
TASK = f"{Path(__file__).with_name('_toy.py')}:noise"
_START_S = 120.0


def spec(hosts: int, moves: Iterable[Move], checkpoint_every_s: float) -> RunSpec:
    """Return the spec of the small job of all sides, with the computation of each host declared."""
    names = [f"h{place}" for place in range(hosts)]
    declared = {"fixed_s": FIXED_S, "per_sample_s": PER_SAMPLE_S}
    workers = [
        {"host": name, "type": "spot", "local_batch_size": BATCH // hosts, "declared": declared} for name in names
    ]
    changes = [{"host": names[move.host], "at_s": move.at_s, move.fate: True} for move in moves]
    return RunSpec.model_validate_json(
        json.dumps(
            {
                "task": TASK,
                "workers": workers,
                "batch_policy": "static",
                "stop": {"max_steps": 10**6},
                "evaluate_every_epochs": 1e5,
                "max_restarts": 1000,
                "checkpoint_every_s": checkpoint_every_s,
                "control_period_steps": 5,
                "exchange_timeout_s": 10.0,
                "miniature": {"hosts": [{"name": name} for name in names], "changes": changes},
            }
        )
    )


def run_hetopt(folder: Path, wish: RunSpec, *, lasts_s: float) -> list[Event]:
    """Run a spec under the product's own launcher for ``lasts_s`` seconds of training, and return its event log.

    It may end earlier only once its last host is gone for good.

    Raises:
        RunFailed: it ended earlier, or did not begin.
    """
    gone_s = gone_for_good_s(wish)
    launcher = RehearsalLauncher(grace_s=1.0)
    handle = launcher.start(wish, folder, {})
    try:
        deadline_s = time.monotonic() + _START_S
        until_s = None
        while until_s is None or time.time() < until_s:
            status = launcher.poll(handle)
            if status.state.is_over and until_s is not None and time.time() > until_s - lasts_s + gone_s:
                break
            if status.state.is_over or time.monotonic() > deadline_s:
                raise RunFailed(status.reason or f"the run is {status.state.value}, and does not begin")
            if until_s is None:
                began = [
                    event["time_s"]
                    for event in read_events(folder / EVENTS_FILE)
                    if event["event"] == "training_started"
                ]
                until_s = began[0] + lasts_s if began else None
                deadline_s += lasts_s
            time.sleep(0.1)
    finally:
        launcher.stop(handle)
    return read_events(folder / EVENTS_FILE)


def best_under_torchrun(
    folder: Path, wish: RunSpec, moves: Sequence[Move], *, lasts_s: float, compression: float
) -> list[Event]:
    """Return the event log of torchrun with the interval between snapshots at which it trained most.

    Raises:
        RuntimeError: as of `run_under_torchrun`.
    """
    logs = []
    for every_s in SNAPSHOTS_EVERY_S:
        run_dir = folder / f"{every_s:g}"
        run_dir.mkdir()
        events = run_under_torchrun(run_dir, wish, moves, lasts_s=lasts_s, snapshot_every_s=every_s / compression)
        print(f"    snapshots every {every_s:g} s: {samples_in(events, lasts_s):,.0f} samples", file=sys.stderr)
        logs.append(events)
    return max(logs, key=lambda events: samples_in(events, lasts_s))


def gone_for_good_s(wish: RunSpec) -> float:
    """Return the second when the last host dies without returning; infinite where any stays."""
    assert wish.miniature is not None
    there, gone_s = {host.name for host in wish.miniature.hosts}, math.inf
    for change in wish.miniature.changes:
        if change.returns:
            there.add(change.host)
            gone_s = math.inf
        elif change.dies:
            there.discard(change.host)
            gone_s = gone_s if there or change.at_s is None else change.at_s
    return gone_s


def samples_in(events: Sequence[Event], lasts_s: float) -> float:
    """Return the samples in the model ``lasts_s`` after training began; what was lost and done again counts once."""
    until_s = next(event["time_s"] for event in events if event["event"] == "training_started") + lasts_s
    steps = [event for event in events if event["event"] == "step" and event["time_s"] <= until_s]
    return float(steps[-1]["step"] * BATCH) if steps else 0.0


def attended_samples(events: Sequence[Event], lasts_s: float, rates: Mapping[int, float]) -> float:
    """Return the samples that the workers of each step would have trained in its time, at their calm rate."""
    began_s = next(event["time_s"] for event in events if event["event"] == "training_started")
    before_s, samples = began_s, 0.0
    for event in events:
        if event["event"] == "step" and event["time_s"] <= began_s + lasts_s:
            samples += (event["time_s"] - before_s) * rates[len(event["local_batch_sizes"])]
            before_s = event["time_s"]
    return samples


def time_of_import(rounds: int = 3) -> float:
    """Return the median seconds in which a process that does nothing else imports torch."""
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def calm_rates(sides: Iterable[Sequence[Event]], hosts: int) -> dict[int, float]:
    """Return samples a second by number of hosts, on the quicker side; as declared where no side trained so."""
    rates = {}
    for count in range(1, hosts + 1):
        medians = []
        for events in sides:
            times = [
                event["step_time_s"]
                for before, event in pairwise([event for event in events if event["event"] == "step"])
                if len(before["local_batch_sizes"]) == len(event["local_batch_sizes"]) == count
            ]
            medians += [statistics.median(times)] if len(times) >= 5 else []
        rates[count] = BATCH / min(medians, default=FIXED_S + PER_SAMPLE_S * BATCH / count)
    return rates


def rehearse(
    results: Outcome,
    folder: Path,
    trace: NodeTrace,
    *,
    compression: float,
    start_s: float,
    number: int,
    sides: Sequence[str],
    rounds: int,
) -> None:
    """Replay a recording on every side: hetopt's in every round, the peer's in the first.

    Each side's figures are medians over the rounds; those of the peer are baselines.

    Args:
        results: outcome to which the figures are added.
        folder: folder in which each run gets a new one.
        trace: recording.
        compression: seconds of the recording in one of the rehearsal.
        start_s: seconds from the return of a host to its work, for the oracle.
        number: number of the recording, in the names of figures.
        sides: those of ``sudden``, ``notice`` and ``torchrun`` that take part.
        rounds: number of draws of which hosts go and come.
    """
    lasts_s = len(trace.running) * trace.gap_s / compression
    every_s = CHECKPOINT_EVERY_S / compression
    paid_s = trace.paid_node_s() / compression
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for round_ in range(rounds):
        seed = number + len(sides) * round_
        logs: dict[str, list[Event]] = {}
        for side in sides:
            if side == "torchrun" and round_ > 0:
                continue
            moves = moves_of(trace, compression=compression, seed=seed, notice=side == "notice")
            run_dir = folder / f"{number}-{round_}-{side}"
            run_dir.mkdir()
            print(f"  {trace.name}: {side}, {len(moves)} changes in {lasts_s:.0f} s", file=sys.stderr)
            wish = spec(trace.nodes, () if side == "torchrun" else moves, every_s)
            if side == "torchrun":
                logs[side] = best_under_torchrun(run_dir, wish, moves, lasts_s=lasts_s, compression=compression)
            else:
                logs[side] = run_hetopt(run_dir, wish, lasts_s=lasts_s)
        moves = moves_of(trace, compression=compression, seed=seed, notice=False)
        rates = calm_rates(logs.values(), trace.nodes)
        best = best_samples(moves, trace.nodes, lasts_s, rates, start_s=start_s)
        without_start = best_samples(moves, trace.nodes, lasts_s, rates)
        for side, events in logs.items():
            trained, attended = samples_in(events, lasts_s), attended_samples(events, lasts_s, rates)
            measured[side].append(
                {
                    "of_oracle": trained / best,
                    "of_oracle_without_starts": trained / without_start,
                    "samples_a_paid_second": trained / paid_s,
                    "attended": attended / best,
                    "at_pace": trained / attended,
                }
            )
            changed = [event for event in events if event["event"] == "workers_changed" and "recovery_s" in event]
            took = f"{statistics.median(event['recovery_s'] for event in changed):.2f} s each" if changed else ""
            newest = measured[side][-1]
            print(
                f"{trace.name:<28}{side:<10}{newest['samples_a_paid_second']:>8.1f} samples a paid second"
                f"{newest['of_oracle']:>8.1%} of the oracle (attended {newest['attended']:.1%}, at pace "
                f"{newest['at_pace']:.1%}), {newest['of_oracle_without_starts']:.1%} of one without starts   "
                f"{len(changed):>3} changes of workers {took}"
            )
    for side, rows in measured.items():
        figures = {f"{side}_{key}_{number}": statistics.median(row[key] for row in rows) for key in rows[0]}
        figures[f"{side}_of_oracle_least_{number}"] = min(row["of_oracle"] for row in rows)
        rounded = {name: round(value, 4) for name, value in figures.items()}
        if side == "torchrun":
            results.baselines.update(rounded)
        else:
            results.figures.update(rounded)
            results.goal(f"{side}_of_oracle_{number}", figures[f"{side}_of_oracle_{number}"], at_least=OF_ORACLE)


def main() -> None:
    """Replay every recording, or one, and publish; without any on this machine it publishes nothing measured."""
    arguments = parser(__doc__)
    arguments.add_argument("--recording", type=int, metavar="N", help="only this one, beginning with 0")
    read = arguments.parse_args()
    need_namespaces(or_skip=read.smoke)
    traces = list(enumerate(read_node_traces(DATA / "spot-traces")))
    quick = read.quick or read.smoke
    results = Outcome(
        benchmark="spot_rehearsal",
        quick=quick,
        asked="" if read.recording is None else f"--recording {read.recording}",
        seeds=f"by recording, {ROUNDS} draws each",
    )
    if not traces:
        print(f"no spot traces under {DATA}; set HETOPT_SHARED_DATA to the folder that holds them", file=sys.stderr)
        publish(results, read.json)
        return
    if read.recording is not None:
        traces = [numbered for numbered in traces if numbered[0] == read.recording]
    compression = SMOKE_COMPRESSION if read.smoke else COMPRESSION
    samples = 3 if read.smoke else 12 if quick else 24
    sides = ["sudden"] if read.smoke else ["sudden", "notice", "torchrun"]
    start_s = 0.0 if read.smoke else time_of_import()
    results.figures["start_s"] = round(start_s, 2)
    results.figures["compression"] = compression
    with tempfile.TemporaryDirectory(prefix="hetopt-spot-") as temporary:
        for number, trace in traces[:1] if quick else traces:
            part = trace.grouped(SMOKE_HOSTS if read.smoke else HOSTS).busiest(samples)
            results.figures[f"nodes_{number}"] = trace.nodes
            rehearse(
                results,
                Path(temporary),
                part,
                compression=compression,
                start_s=start_s,
                number=number,
                sides=sides,
                rounds=1 if read.smoke else ROUNDS,
            )
    publish(results, read.json)


if __name__ == "__main__":
    run_benchmark(main)
