"""Logs of runs that were never: one as foretold, one that was disturbed, one that sent less; and their reports."""

from __future__ import annotations

from hetopt.core.events.log import Event
from hetopt.optimizer.launch_record import Launch
from hetopt.reports.report import Report, make_report
from tests.logs import history_of


def plain_log(launch: Launch, *, slowdown: float = 1.0, resumed_step: int = 0, reason: str = "epochs") -> list[Event]:
    """The log of a run that took ``slowdown`` times as long as predicted."""
    said, spec = launch.prediction, launch.spec
    shares = [worker.local_batch_size for worker in spec.workers]
    begun_s = launch.started_s + said.startup_s
    steps = round(said.steps.value)
    step_time_s, training_s = slowdown * said.step_time_s.value, slowdown * said.training_s.value
    workers = [
        {"host": w.host, "type": w.type, "slowdown": w.slowdown, "local_batch_size": w.local_batch_size}
        for w in spec.workers
    ]
    return [
        {
            "event": "run_started",
            "time_s": begun_s,
            "task": spec.task,
            "workers": workers,
            "global_batch_size": spec.global_batch_size,
            "resumed_step": resumed_step,
        },
        {"event": "training_started", "time_s": begun_s, "step": resumed_step},
        {
            "event": "step",
            "time_s": begun_s + training_s,
            "step": steps,
            "epoch": 100.0,
            "samples_seen": steps * spec.global_batch_size,
            "local_batch_sizes": shares,
            "step_time_s": step_time_s,
            "compute_s": [0.9 * step_time_s] * len(shares),
            "sync_s": [0.08 * step_time_s] * len(shares),
            "wait_s": [0.02 * step_time_s, 0.0],
            "loss": 0.05,
            "steps": steps - resumed_step,
        },
        {"event": "an event of a later version", "time_s": begun_s + training_s},
        {
            "event": "training_finished",
            "time_s": begun_s + training_s,
            "step": steps,
            "epoch": 100.0,
            "reason": reason,
            "training_s": training_s,
            "metrics": {"accuracy": 0.99},
        },
    ]


def disturbed_log(launch: Launch) -> list[Event]:
    """The log of a rehearsal in which a host slows down to a third, and the shares follow."""
    begun_s, now_s, step = 1012.0, 1012.0, 0
    spec = launch.spec
    shares = [worker.local_batch_size for worker in spec.workers]
    speeds = {"h0": 1.0, "h1": 1.0, "h2": 0.25}
    events = plain_log(launch)[:2]
    events[0]["workers"] = [
        {"host": w.host, "type": w.type, "slowdown": w.slowdown, "local_batch_size": w.local_batch_size}
        for w in spec.workers
    ]
    events[1]["time_s"] = begun_s

    def condition(host: str, **changed: object) -> None:
        whole = {"speed": speeds[host], "rate_bits_per_s": None, "dies": False, **changed}
        events.append({"event": "condition_changed", "time_s": now_s, "host": host, "step": step, **whole})

    for number in range(20):
        if number == 8:
            speeds["h1"] = 0.3333
            condition("h1", speed=0.3333, rate_bits_per_s=2.5e7)
        if number == 11:
            before, shares = shares, [shares[0] + shares[1] - shares[1] // 3, shares[1] // 3, *shares[2:]]
            events.append(
                {
                    "event": "shares_changed",
                    "time_s": now_s,
                    "step": step,
                    "before": before,
                    "after": shares,
                    "reason": "worker 1 became 3.0 times slower",
                }
            )
        if number == 15:
            reason = "the computation of worker 3 on h2 does not fit into its declared time"
            events.append({"event": "miniature_slowed", "time_s": now_s, "step": step, "factor": 1.3, "reason": reason})
        compute_s = [0.0004 * samples / speeds[w.host] for samples, w in zip(shares, spec.workers, strict=True)]
        step_time_s = max(compute_s) + 0.1
        step, now_s = step + 10, now_s + 10 * step_time_s
        events.append(
            {
                "event": "step",
                "time_s": now_s,
                "step": step,
                "epoch": step * spec.global_batch_size / 1438,
                "samples_seen": step * spec.global_batch_size,
                "local_batch_sizes": shares,
                "step_time_s": step_time_s,
                "compute_s": compute_s,
                "sync_s": [0.1] * len(shares),
                "wait_s": [max(compute_s) - one for one in compute_s],
                "loss": 0.05,
                "steps": 10,
            }
        )
        if number % 7 == 6:
            now_s += 1.5
            evaluated = {"metrics": {"accuracy": 0.9}, "epoch": 1.0, "step": step, "evaluation_s": 1.5}
            events.append({"event": "evaluated", "time_s": now_s, **evaluated})
    finish = {"step": step, "epoch": 35.6, "reason": "epochs", "training_s": now_s - begun_s, "metrics": {}}
    return [*events, {"event": "training_finished", "time_s": now_s, **finish}]


def compressed_log(launch: Launch) -> list[Event]:
    """The log of `disturbed_log` where less was sent from the sixth period on."""
    events, number = [], 0
    thin, dense = "topk 0.01 by all_gather", "identity by all_reduce"
    for event in disturbed_log(launch):
        if event["event"] == "step":
            number += 1
            way, ratio, gain, sent, sync_s = (
                (thin, 0.01, 0.31, 7860, 0.008) if number > 5 else (dense, 1.0, 1.0, 393_000, 0.11)
            )
            exchange = {"way": way, "compressor": way.split()[0], "ratio": ratio, "collective": way.split()[-1]}
            exchange |= {"gain": gain, "sent_bytes": sent, "dense_bytes": 393_000, "exchanges": 10}
            event = {**event, "exchange": {**exchange, "compress_s": 0.001 * (number > 5), "sync_s": sync_s}}
        events.append(event)
        if event["event"] == "step" and number == 5:
            reason = (
                f"{thin} instead of {dense}: 1 % (100x) sent, about 31% of the energy kept: 24% less time to the target"
            )
            told = {"before": dense, "after": thin, "reason": reason, "step": event["step"], "time_s": event["time_s"]}
            events.append({"event": "exchange_changed", **told})
    return events


def report_of(launch: Launch, events: list[Event]) -> Report:
    history = history_of(events, launch.starts)
    return make_report(launch, history, state="finished")
