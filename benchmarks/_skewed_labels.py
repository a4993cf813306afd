"""Workers that each have a single label: what conventional training loses by it, and samples handed on regain."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from benchmarks._composed import final
from benchmarks._contenders import DIGITS
from benchmarks._outcome import Results
from benchmarks._rehearsal import Log, Side, equal_shares, rehearse
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.scaled_emulation import EmulatedHost
from hetopt.core.synchronization import Injection, Partition, Synchronization

SKEW_WORKERS, SMOKE_WORKERS, SKEW_STEPS, SMOKE_SKEW_STEPS = 10, 3, 192, 8
CONVENTIONAL = Synchronization(name="local-sgd", every_steps=48)
"""What is conventional where every worker has data of its own: federated averaging, of all, as rarely as the published
FedAvg(1, 0.25) of 2307.07950 (LSSR 0.979: one of 48 steps)."""


def skew(*, smoke: bool) -> dict[str, tuple[float, float]]:
    """One label a worker: the final accuracy, and bytes handed on in a step, of each way of training.

    Raises:
        RunFailed: a run failed.
    """
    one, mixed = Partition(name="labels", labels=1), Injection(workers=0.5, samples=0.5)
    ways: dict[str, tuple[Partition, Injection | None]] = {
        "all labels on each": (Partition(name="shards"), None),
        "one label on each": (one, None),
        "one label, handed on": (one, mixed),
    }
    workers = SMOKE_WORKERS if smoke else SKEW_WORKERS
    shares = equal_shares(workers, 32 * workers)
    sides = [
        Side(
            name=name,
            by="hetopt",
            spec=RunSpec(
                task=DIGITS.job.task,
                workers=tuple(
                    WorkerSpec(host=f"h{place}", type="equal", local_batch_size=share, threads=1)
                    for place, share in enumerate(shares)
                ),
                sync=CONVENTIONAL,
                partition=partition,
                injection=injection,
                batch_policy="static",
                stop=StopRule(max_steps=SMOKE_SKEW_STEPS if smoke else SKEW_STEPS),
                evaluate_every_epochs=1,
                checkpoint_every_s=1e6,
            ),
        )
        for name, (partition, injection) in ways.items()
    ]
    print(f"sync: training {workers} workers with one label each", file=sys.stderr, flush=True)
    equal = [EmulatedHost(name=f"h{place}") for place in range(workers)]
    logs = rehearse(equal, sides, rounds=1)
    return {name: _skewed(logs[name][0]) for name in ways}


def _skewed(log: Log) -> tuple[float, float]:
    accuracies = [(0.0, float(event["metrics"]["accuracy"])) for event in log if event["event"] == "evaluated"]
    steps = [event for event in log if event["event"] == "step"]
    handed = sum(event["injection"]["sent_bytes"] for event in steps if "injection" in event)
    return final(accuracies), handed / sum(event["steps"] for event in steps)


def show_skew(found: Mapping[str, tuple[float, float]], results: Results) -> None:
    """The table, figures and goals of skewed labels."""
    every = CONVENTIONAL.every_steps
    print(f"\nmodels averaged every {every} steps: accuracy, and kB handed on in a step")
    for name, (accuracy, handed_bytes) in found.items():
        print(f"{name:>26}{accuracy:>12.4f}{handed_bytes / 1e3:>12.1f}")
    (even, _), (alone, _), (mixed, handed_bytes) = found.values()
    results.baselines["accuracy_all_labels"] = round(even, 4)
    results.figures["accuracy_one_label"] = round(alone, 4)
    results.figures["accuracy_one_label_handed_on"] = round(mixed, 4)
    results.figures["handed_on_bytes_per_step"] = round(handed_bytes, 1)
    results.goal("points_lost_with_one_label", 100 * (even - alone), at_least=20)
    results.goal("accuracy_regained_of_even", mixed / even, at_least=0.95)
