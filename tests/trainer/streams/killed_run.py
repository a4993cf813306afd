"""A training run on Redis Streams that is killed, and its broker too: ``python -m MODULE FOLDER N``.

One process imports torch, and forks a writer and the workers, again and again: what is killed with SIGKILL is
started again, as a launcher would. At the end the model tells how often each sample was trained on. The result is a
JSON object on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore

from benchmarks._in_process import train_here
from hetopt.core.events.log import EVENTS_FILE, read_events
from hetopt.core.run_folder import STOP_FILE, UNFINISHED_MODEL_FILE
from hetopt.core.run_spec import RunSpec, StopRule, Stream, WorkerSpec
from hetopt.trainer.data.stream.writer import StreamWriter
from hetopt.trainer.failure import FailureReport
from tests.trainer.streams.counting_task import EXTRA, SAMPLES, samples
from tests.trainer.streams.redis_server import DURABLE, RedisServer

WORKERS = 2
BATCH = 16
WRITTEN_PER_S = 600


def main(folder: Path, kills: int) -> dict[str, float]:
    """Train, and be killed so often; how often samples were trained on."""
    chance = random.Random(0)
    torch.set_num_threads(1)
    server, run_dir = RedisServer(folder / "redis", *DURABLE), folder / "run"
    run_dir.mkdir()
    writer, workers = _fork(partial(_write, server.url)), list[int]()
    try:
        for attempt in range(kills + 1):
            workers = [_fork(partial(_work, _spec(server.url), run_dir, rank, attempt)) for rank in range(WORKERS)]
            # Now and then while they join and resume; mostly while they train, save and acknowledge.
            if chance.random() < 0.85 or attempt == kills:
                _wait_for_steps(workers, run_dir, attempt)
            _watch(workers, chance.uniform(0, 0.6))
            if attempt == kills:
                (run_dir / STOP_FILE).touch()
                if not _watch(workers, 120):
                    raise RuntimeError("the run does not end")
            elif chance.random() < 0.5:
                server.kill()
                _watch(workers, chance.uniform(0, 0.4))
                server.start()
                _watch(workers, chance.uniform(0, 0.6))
            _kill(workers)
    finally:
        _kill([writer, *workers])
        server.close()
    return _counted(run_dir)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    pids.clear()


def _spec(url: str) -> RunSpec:
    task = f"{Path(__file__).with_name('counting_task.py')}:counting"
    stream = Stream(
        source="redis",
        url=url,
        batch_interval_s=0.05,
        learning_rate="linear",
        max_learning_rate_scale=1e6,
        max_batch=256,
    )
    return RunSpec(
        task=task,
        workers=tuple(
            WorkerSpec(host=f"h{rank}", type="local", local_batch_size=BATCH, device="cpu") for rank in range(WORKERS)
        ),
        stop=StopRule(max_epochs=1),
        evaluate_every_epochs=1e3,
        batch_policy="rate",
        stream=stream,
        checkpoint_every_s=0.1,
        control_period_steps=4,
    )


def _write(url: str) -> None:
    """Samples 0, 2, 4, ... into one stream and 1, 3, 5, ... into the other."""
    writers = [StreamWriter(url, f"hetopt:{number}") for number in range(WORKERS)]
    step = 20
    for at in range(0, SAMPLES + EXTRA, step):
        for number, writer in enumerate(writers):
            writer.write(samples(at + number, at + step, WORKERS))
        time.sleep(step / WRITTEN_PER_S)
    while True:
        time.sleep(60)


def _work(spec: RunSpec, run_dir: Path, rank: int, attempt: int) -> None:
    store = FileStore(str(run_dir / f"store-{attempt}"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    with FailureReport(run_dir, rank) as report:
        train_here(spec, run_dir, rank=rank, world_size=WORKERS, stop_requested=(run_dir / STOP_FILE).exists)
    os._exit(report.exit_code)


def _counted(run_dir: Path) -> dict[str, float]:
    """How often samples are in the model of the run, which was stopped before its end."""
    weight = load_file(run_dir / UNFINISHED_MODEL_FILE)["weight"]
    weight = weight.double() * BATCH * WORKERS
    times = weight.round()
    trained = int((times > 0).sum())
    # A stream is trained on in its order: a sample that is left out has trained ones behind it.
    lost = 0
    for number in range(WORKERS):
        own = times[number::WORKERS] > 0
        end = int(own.nonzero().max()) + 1 if bool(own.any()) else 0
        lost += end - int(own[:end].sum())
    steps = [event for event in read_events(run_dir / EVENTS_FILE) if event["event"] == "step"]
    return {
        "trained": trained,
        "lost": lost,
        "trained_twice": int((times > 1).sum()),
        "not_whole": int(((weight - times).abs() > 1e-3).sum()),
        "redelivered": sum(sum(event["stream"]["repeated"]) for event in steps),
    }


_forked_s = [0.0]


def _fork(work: Callable[[], None]) -> int:
    _forked_s[0] = time.time()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def _watch(pids: list[int], wait_s: float) -> bool:
    """Wait; whether all of them have come to a good end meanwhile.

    Raises:
        RuntimeError: one has come to a bad one.
    """
    until_s = time.monotonic() + wait_s
    living = list(pids)
    while living and time.monotonic() < until_s:
        for pid in list(living):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                living.remove(pid)
                pids.remove(pid)
                if status:
                    raise RuntimeError(f"a worker failed: {os.waitstatus_to_exitcode(status)}")
        time.sleep(0.005)
    return not living


def _wait_for_steps(workers: list[int], run_dir: Path, attempt: int) -> None:
    """Until this attempt trains."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        begun = 0
        for event in read_events(run_dir / EVENTS_FILE):
            begun += event["event"] == "training_started"
            if event["event"] == "step" and event["time_s"] > _forked_s[0] and begun:
                return
        _watch(workers, 0.02)
    raise RuntimeError(f"attempt {attempt} does not train")


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(result), flush=True)
    os._exit(0)
