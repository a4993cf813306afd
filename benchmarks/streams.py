"""Training on streams: time to a target against batches of 64, buffers, samples a second out of Redis, and kills.

- *scadles*: eight workers of this machine on streams of the published rates, all of them faster by one factor. Batches
  that follow the rates (and a learning rate that follows the batches) against conventional synchronous training, where
  every worker waits for 64 samples. Both to the same accuracy, in turn, on the real clock.
- *buffers*: samples that wait after as many steps as the published training has, with all kept against a batch kept; by
  the same streams on a clock that does not take the time.
- *redis*: one worker that trains on what a broker holds; beside it, a plain loop that reads and trains on the same.
- *kills*: workers and broker are killed at random moments (SIGKILL); the model counts how often it saw each sample.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks._in_process import train_here
from benchmarks._outcome import Results, options, publish, run_benchmark
from benchmarks._redis_server import DURABLE, MISSING, PROGRAM, RedisServer
from benchmarks._stream_crew import RUNS_FILE
from benchmarks._toy import small_digits
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.run_folder import write_spec
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.core.stream import Stream, draw_rates, scaled
from hetopt.trainer.data.stream.broker import connect
from hetopt.trainer.data.stream.clock import VirtualClock
from hetopt.trainer.data.stream.replay import Replay
from hetopt.trainer.data.stream.wire import read_header, unpack
from hetopt.trainer.data.stream.writer import StreamWriter
from hetopt.trainer.task import mean_of

WORKERS = 8
FACTOR = 8.0
"""Samples arrive so many times faster than published: a worker of this machine computes faster than the paper's."""

CONVENTIONAL_BATCH = 64
SEED = 0

PUBLISHED_EPOCHS, PUBLISHED_SAMPLES, PUBLISHED_DEVICES, PUBLISHED_COMPUTE_S = 225, 50_000, 16, 1.0
"""ResNet-152 on CIFAR-10 (arXiv 2301.08897); its devices compute a batch of 64 in about a second."""

TASK = f"{Path(__file__).with_name('_toy.py')}:small_digits"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A published distribution of rates, samples/s; ``speedup`` is what was published for ResNet-152."""

    name: str
    distribution: Literal["uniform", "normal"]
    mean: float
    deviation: float
    speedup: float

    def draw(self, workers: int) -> tuple[float, ...]:
        """Of so many streams."""
        return draw_rates(self.distribution, self.mean, self.deviation, workers=workers, seed=SEED)


RATES = (
    Rates(name="uniform_38_24", distribution="uniform", mean=38, deviation=24, speedup=1.89),
    Rates(name="uniform_300_112", distribution="uniform", mean=300, deviation=112, speedup=1.15),
    Rates(name="normal_64_24", distribution="normal", mean=64, deviation=24, speedup=3.29),
    Rates(name="normal_256_28", distribution="normal", mean=256, deviation=28, speedup=1.42),
)
SIDES = ("conventional", "scadles")
PARTS = ("scadles", "buffers", "redis", "kills")


def main() -> None:
    asked = options(__doc__, parts=PARTS)
    quick, smoke = asked.quick, asked.smoke
    # Training to a target and kills take a minute at least: their shortest forms are asked for by name.
    parts = {asked.part} if asked.part else {"buffers", "redis"} if smoke else set(PARTS)
    results = Results()
    folder = Path(tempfile.mkdtemp(prefix="hetopt-streams-"))
    try:
        if "scadles" in parts:
            # The last have the fewest seconds between two batches.
            compare(folder / "scadles", RATES[-1:] if smoke else RATES, 1 if quick else 3, results)
        if "buffers" in parts:
            buffers(RATES[:1] if smoke else RATES, results)
        if parts & {"redis", "kills"} and PROGRAM is None:
            print(f"without Redis: {MISSING}", file=sys.stderr)
        else:
            if "redis" in parts:
                throughput(folder / "redis", 8_192 if smoke else 100_000, 1 if quick else 3, results)
            if "kills" in parts:
                kills(folder / "kills", 1 if smoke else 5 if quick else 50, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(results.outcome("streams", quick=quick), asked.json_file, part=asked.part)


def compare(folder: Path, distributions: tuple[Rates, ...], rounds: int, results: Results) -> None:
    """Time to the target accuracy, both ways in turn."""
    folder.mkdir()
    runs = [(rates, side, turn) for turn in range(rounds) for rates in distributions for side in SIDES[:: (-1) ** turn]]
    for rates, side, turn in runs:
        run_dir = folder / f"{rates.name}-{side}-{turn}"
        run_dir.mkdir()
        write_spec(run_dir, _spec(rates, side, turn))
    (folder / RUNS_FILE).write_text(json.dumps([f"{rates.name}-{side}-{turn}" for rates, side, turn in runs]))
    subprocess.run([sys.executable, "-m", "benchmarks._stream_crew", str(folder), str(WORKERS)], check=True)
    print(f"\n{WORKERS} workers, rates times {FACTOR:g}; seconds to {small_digits().target.value:.0%} accuracy, median")
    print(
        f"  {'rates':<16} {'slowest':>8} {'fastest':>8} {'conventional':>13} {'hetopt':>8} {'faster':>7} {'paper':>6}"
    )
    unequal: list[tuple[float, float]] = []
    for rates in distributions:
        drawn = scaled(rates.draw(WORKERS), FACTOR)
        found = {side: [_outcome(folder / f"{rates.name}-{side}-{turn}") for turn in range(rounds)] for side in SIDES}
        time_s = {side: statistics.median(each["time_s"] for each in found[side]) for side in SIDES}
        ratios = [
            slow["time_s"] / fast["time_s"] for slow, fast in zip(found["conventional"], found["scadles"], strict=True)
        ]
        speedup = statistics.median(ratios)
        print(
            f"  {rates.name:<16} {min(drawn):8.0f} {max(drawn):8.0f} {time_s['conventional']:13.2f} "
            f"{time_s['scadles']:8.2f} {speedup:6.2f}x {rates.speedup:5.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})"
        )
        results.figures[f"{rates.name}_speedup"] = round(speedup, 3)
        results.figures[f"{rates.name}_time_s"] = round(time_s["scadles"], 3)
        results.baselines[f"{rates.name}_conventional_time_s"] = round(time_s["conventional"], 3)
        results.figures[f"{rates.name}_most_buffered"] = max(each["buffered"] for each in found["scadles"])
        results.baselines[f"{rates.name}_conventional_most_buffered"] = max(
            each["buffered"] for each in found["conventional"]
        )
        unequal.append((max(drawn) / min(drawn), speedup))
    results.goal("speedup_on_the_most_unequal_rates", max(unequal)[1], at_least=3.29)


def _spec(rates: Rates, side: str, turn: int) -> RunSpec:
    drawn = scaled(rates.draw(WORKERS), FACTOR)
    follows = side == "scadles"
    task = small_digits()
    return RunSpec(
        task=TASK,
        seed=turn,
        workers=tuple(
            WorkerSpec(host=f"h{rank}", type="local", local_batch_size=CONVENTIONAL_BATCH, device="cpu")
            for rank in range(WORKERS)
        ),
        learning_rate_scale=task.learning_rate_scale(WORKERS * CONVENTIONAL_BATCH),
        stop=StopRule(target=True, max_epochs=100),
        evaluate_every_epochs=0.25,
        batch_policy="rate" if follows else "uniform",
        stream=Stream(
            rates=drawn,
            buffer="truncation" if follows else "persistence",
            batch_interval_s=1 / FACTOR,
            learning_rate="linear",
        ),
        checkpoint_every_s=1e6,
    )


def _outcome(run_dir: Path) -> dict[str, float]:
    events = read_events(run_dir / EVENTS_FILE)
    last = events[-1]
    if last["event"] != "training_finished" or last["reason"] != "target":
        raise RuntimeError(f"{run_dir.name} did not reach its target: {last}")
    steps = [event for event in events if event["event"] == "step"]
    return {"time_s": last["training_s"], "buffered": max(sum(event["stream"]["buffered"]) for event in steps)}


def buffers(distributions: tuple[Rates, ...], results: Results) -> None:
    """Samples that wait at the end of the published training, over all devices."""
    steps = PUBLISHED_EPOCHS * PUBLISHED_SAMPLES // (PUBLISHED_DEVICES * CONVENTIONAL_BATCH)
    print(f"\n{PUBLISHED_DEVICES} devices, {steps:,} steps: samples that wait, over all devices")
    print(f"  {'rates':<16} {'persistence':>12} {'truncation':>11} {'smaller':>9}")
    least = float("inf")
    for rates in distributions:
        drawn = rates.draw(PUBLISHED_DEVICES)
        kept = _held(drawn, "persistence", steps)
        newest = _held(drawn, "truncation", steps)
        least = min(least, kept / newest)
        print(f"  {rates.name:<16} {kept:12,} {newest:11,} {kept / newest:8,.0f}x")
        results.figures[f"{rates.name}_truncated_samples"] = newest
        results.baselines[f"{rates.name}_persistent_samples"] = kept
        results.figures[f"{rates.name}_sum_of_rates_per_s"] = round(sum(drawn), 1)
    results.goal("truncation_smaller_by_at_least", least, at_least=800)


def _held(drawn: tuple[float, ...], policy: Literal["persistence", "truncation"], steps: int) -> int:
    """Most samples that ever waited: all devices compute together, once the last of them has its batch."""
    clocks = [VirtualClock() for _ in drawn]
    stream = Stream(rates=drawn, buffer=policy, patience_s=1e9)
    everything = np.arange(PUBLISHED_SAMPLES)
    replays = [
        Replay(
            stream,
            rank,
            order=lambda _: everything,  # which samples they are does not matter here
            clock=clocks[rank],
            tell=lambda _: None,
        )
        for rank in range(len(drawn))
    ]
    batches = [stream.batch(rate) if policy == "truncation" else CONVENTIONAL_BATCH for rate in drawn]
    for replay in replays:
        replay.begin()
    most = 0
    for step in range(steps):
        for replay, batch in zip(replays, batches, strict=True):
            replay.take(batch)
        now_s = max(clock.now_s() for clock in clocks) + PUBLISHED_COMPUTE_S
        for clock in clocks:
            clock.sleep_s(now_s - clock.now_s())
        if step % 100 == 99 or step == steps - 1:
            most = max(most, sum(replay.flow().buffered for replay in replays))
    return most


def throughput(folder: Path, count: int, rounds: int, results: Results) -> None:
    """Samples a second that reach a training step, and that a plain loop gets to one."""
    server = RedisServer(folder / "server", *DURABLE)
    try:
        data = small_digits().data(None).train
        with_us: list[float] = []
        plainly: list[float] = []
        written: list[float] = []
        for turn in range(rounds):
            for side in SIDES[:: (-1) ** turn]:
                key = f"{side}-{turn}"
                writer = StreamWriter(server.url, f"{key}:0")
                begun_s = time.perf_counter()
                for first in range(0, count + 4096, 512):
                    writer.write(data.gather(np.arange(first, first + 512) % len(data)))  # type: ignore[attr-defined]
                written.append(count / (time.perf_counter() - begun_s))
                writer.close()
                print(f"  redis {key}", file=sys.stderr, flush=True)
                if side == "scadles":
                    with_us.append(_trained_per_s(folder / f"run-{turn}", server.url, key, count))
                else:
                    plainly.append(_plainly_per_s(server.url, key, count))
                connection = connect(server.url)
                connection.delete(f"{key}:0")
                connection.close()
    finally:
        server.close()
    print("\nsamples/s of 264 bytes out of Redis (appendfsync always) into training steps of 512, median")
    print(
        f"  hetopt                   {statistics.median(with_us):10,.0f}  ({min(with_us):,.0f} to {max(with_us):,.0f})"
    )
    print(
        f"  one sample after another {statistics.median(plainly):10,.0f}  ({min(plainly):,.0f} to {max(plainly):,.0f})"
    )
    results.goal("redis_samples_per_s", statistics.median(with_us), at_least=10_000)
    results.baselines["plain_redis_samples_per_s"] = round(statistics.median(plainly), 1)
    results.figures["redis_written_per_s"] = round(statistics.median(written), 1)


def _trained_per_s(run_dir: Path, url: str, key: str, count: int) -> float:
    run_dir.mkdir()
    spec = RunSpec(
        task=TASK,
        workers=(WorkerSpec(host="h0", type="local", local_batch_size=512, device="cpu"),),
        stop=StopRule(max_steps=count // 512),
        evaluate_every_epochs=1e6,
        batch_policy="static",
        stream=Stream(source="redis", url=url, key=key, learning_rate="fixed"),
        checkpoint_every_s=1.0,
    )
    torch.set_num_threads(1)
    events = train_here(spec, run_dir)
    (begun,) = (event for event in events if event["event"] == "training_started")
    last = [event for event in events if event["event"] == "step"][-1]
    return float(last["samples_seen"] / (last["time_s"] - begun["time_s"]))


def _plainly_per_s(url: str, key: str, count: int) -> float:
    """As one would first write it: read a batch, decode sample by sample, train, acknowledge."""
    task = small_digits()
    model = task.model()
    optimizer = task.optimizer(model)
    connection: Any = connect(url)
    connection.xgroup_create(f"{key}:0", "plain", id="0")
    begun_s = time.perf_counter()
    for _ in range(count // 512):
        answer = connection.xreadgroup("plain", "one", {f"{key}:0": ">"}, count=512)
        entries = (answer if isinstance(answer, list) else list(answer.items()))[0][1]
        samples = [unpack(read_header(fields[b"header"]), [fields[b"data"]]) for _, fields in entries]
        batch = tuple(torch.cat(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        torch.autograd.backward(mean_of(task.loss(model, batch)))
        optimizer.step()
        connection.xack(f"{key}:0", "plain", *[name for name, _ in entries])
    time_s = time.perf_counter() - begun_s
    connection.close()
    return count / time_s


def kills(folder: Path, count: int, results: Results) -> None:
    """How often samples were trained on, after so many kills."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._stream_chaos", str(folder), str(count)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"\n{found['worker_kills']} kills of a worker, {found['broker_kills']} of Redis, in {found['duration_s']:g} s: "
        f"{found['trained']:,} samples trained on, {found['lost']} lost, {found['trained_twice']} twice; "
        f"{found['redelivered']:,} were delivered again"
    )
    results.goal("samples_lost", found["lost"], at_most=0)
    results.goal("samples_trained_twice", found["trained_twice"] + found["not_whole"], at_most=0)
    for name in ("worker_kills", "broker_kills", "trained", "redelivered"):
        results.figures[f"chaos_{name}"] = found[name]


if __name__ == "__main__":
    run_benchmark(main)
