"""The process in which a script runs while it is measured.

``python -m hetopt.profiler.script.child FOLDER RANK`` reads the order in the folder. The script sees what it would see
if it were started by itself: its arguments, its folder, its terminal, no other worker.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import init_process_group  # as it is, before scripts are given another
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput, HetoptError, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.paths import inside
from hetopt.core.profile import Job
from hetopt.core.run_spec import RunSpec, StopRule, Sweep, WorkerSpec
from hetopt.core.search_path import run_script
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.exchange_costs import time_collectives, time_compressors
from hetopt.profiler.probe.facts import host_facts, model_kind
from hetopt.profiler.probe.sweep import FEWEST_TIMED, record_facts, taken, yardstick_s
from hetopt.profiler.records import (
    FINISHED,
    HOST_FACTS,
    JOB_FACTS,
    NOISE,
    STARTED,
    MemoryCounted,
    SweepEnded,
    SweepPoint,
    Taken,
)
from hetopt.profiler.script.course import Measured, ScriptCourse
from hetopt.profiler.script.observer import (
    Course,
    Finished,
    Observer,
    StepClock,
    Training,
    be_alone,
    listen,
    normalises,
)
from hetopt.profiler.script.order import FAILED_FILE, MEETING_FILE, ORDER_FILE, Failure, ScriptOrder
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.failure import Lines, is_out_of_memory, reason_of
from hetopt.trainer.task import LEAST_SAMPLES, NO_TARGET

MEETING_TIMEOUT_S = 120.0
MATRIX_SIDE = 256
"""Of the product that copies compute between collectives: some milliseconds, as `time_collectives` wants."""

STREAM_BATCHES = 10_000
"""Batches that stand for an epoch where nothing tells how long one is."""


class ScriptProbe:
    """Runs one script and writes down what was measured."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._order = order = read_record(ScriptOrder, folder / ORDER_FILE, hint="run `hetopt profile` again")
        self._events = EventLog(folder / EVENTS_FILE if rank == 0 else None)
        self._measured = Measured()
        self._lines = Lines(order.script)
        self._observer = Observer(self._course(), self._lines)
        self._clock = StepClock(order)
        self._training: Training = self._clock if order.watch == "steps" else self._observer
        self._begun_s = time.perf_counter()

    def run(self) -> None:
        """Run the script until all is measured.

        Raises:
            HetoptError: it cannot be measured, and why.
            SystemExit: it ended so before anything was trained, and is not watched.
        """
        order = self._order
        torch.set_num_threads(order.threads)
        sys.argv = [order.script, *order.arguments]
        if order.watch != "steps":
            listen(self._observer)
            signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, order.startup_s)
        else:
            register_optimizer_step_post_hook(self._hear)
            if order.as_torchrun:
                be_alone()
        try:
            run_script(order.script)
        except Finished as end:
            if end.error is not None:
                raise end.error from None
        except SystemExit as stop:
            self._ended(f"{self._lines.of(stop)}: the script exits here", stop)
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and self._measured.trying and self._measured.sizes):
                raise self._failed(error) from error
            self._measured.ended = (self._measured.trying, "memory-exhausted")
        except Exception as error:
            raise self._failed(error) from error
        else:
            self._ended(f"{order.script} ended")
        if order.watch == "steps":
            self._take_clock()
        self._conclude()

    def _hear(self, optimizer: Optimizer, *_: object) -> None:
        if not self._clock.optimizers:
            self._events.write(STARTED)
        self._clock.ended_step(optimizer)

    def _failed(self, error: Exception) -> RunFailed:
        return RunFailed(f"{self._lines.of(error)}: {reason_of(error)}")

    def _late(self, number: int, frame: FrameType | None) -> None:
        """No step within the time that starting may take."""
        raise Finished(
            RunFailed(
                f"{self._lines.now() or self._order.script}: here the script still was after "
                f"{self._order.startup_s:g} s, without a step of an optimizer.",
                hint="see that it trains by itself with these arguments, and how long its first steps take",
            )
        )

    def _ended(self, how: str, stop: SystemExit | None = None) -> None:
        """Refuse a script that came to its end before enough of it was measured."""
        if self._order.watch == "steps":
            if stop is not None and not self._clock.optimizers:
                raise stop
            return
        self._observer.end()
        single = self._order.watch == "own-size" or self._observer.loader is None
        if len(self._measured.sizes) >= (1 if single else 2):
            return
        if not self._observer.parameters:
            raise self._observer.no_step()
        steps = sum(len(timed.samples_s) for timed in self._measured.sizes.values())
        raise BadInput(
            f"{how} after {steps} measured steps (the first in {self._observer.step_at}), before enough of it was "
            "measured.",
            hint="give it an argument with which it trains for longer",
        )

    def _take_clock(self) -> None:
        """Take what the ends of steps tell, if there were enough of them."""
        clock = self._clock
        clock.look()
        steps = clock.steps
        if len(steps) < FEWEST_TIMED or not clock.batch_size:
            return
        self._measured.sizes[clock.batch_size] = taken(steps, clock.device, yardstick_s(clock.device))
        self._measured.gradient = clock.gradient()

    def _course(self) -> Course:
        """What is measured, from the moment when the script's first step has ended."""
        observer, order = self._observer, self._order
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if not observer.batch_size:
            raise BadInput(
                f"{observer.step_at}: the optimizer steps, and neither a DataLoader nor what modules are given tells "
                "the batch size.",
                hint="compute by modules of torch.nn, whose first input has a row for each sample",
            )
        self._events.write(STARTED)
        crew = self._crew(1)
        yield from ScriptCourse(order=order, observer=observer, measured=self._measured, crew=crew).run()

    def _crew(self, workers: int) -> ProbeGroup:
        spec = RunSpec(
            task="script",
            workers=(WorkerSpec(host="localhost", type="local", local_batch_size=1),) * workers,
            stop=StopRule(max_steps=1),
        )
        context = WorkerContext(
            spec=spec,
            rank=self._rank if workers > 1 else 0,
            world_size=workers,
            device=self._training.device,
            run_dir=self._folder,
            events=self._events,
            stop_requested=lambda: False,
        )
        return ProbeGroup(context=context, started_s=self._begun_s)

    def _conclude(self) -> None:
        """Meet the copies beside this one, and write what all of them measured."""
        order = self._order
        if not self._measured.sizes and order.watch == "steps":
            return  # too few steps to time, or none in this process
        if dist.is_initialized():
            dist.destroy_process_group()  # the script's own
        if order.workers > 1:
            os.environ.update(collectives_on(LOOPBACK))
            own_gpus = self._training.device.type == "cuda" and torch.cuda.device_count() >= order.workers
            init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpus else "gloo",
                store=FileStore(str(self._folder / MEETING_FILE), order.workers),
                rank=self._rank,
                world_size=order.workers,
                timeout=datetime.timedelta(seconds=MEETING_TIMEOUT_S),
            )
        crew = self._crew(order.workers)
        self._write(crew)

    def _write(self, crew: ProbeGroup) -> None:
        order, measured = self._order, self._measured
        sweep = Sweep(
            concurrent_workers=order.workers,
            threads_per_worker=order.threads,
            local_batch_sizes=tuple(measured.sizes) or (1,),
            time_limit_s=order.sweep_s,
        )
        if crew.context.is_leader:
            crew.note(HOST_FACTS, host_facts(self._training.device))
            crew.note(JOB_FACTS, self._job())
        record_facts(crew, order.sweep, sweep, crew.first(order.workers), True, order.memory_fraction)
        # The sizes that all copies measured: they ask for the same in the same order.
        fewest = int(min(row[0] for row in crew.gather([float(len(measured.sizes))])))
        for size, timed in list(measured.sizes.items())[:fewest]:
            workers = tuple(map(Taken.of, crew.gather(timed.row(order.timed_steps))))
            crew.record(SweepPoint(sweep=order.sweep, local_batch_size=size, workers=workers))
        for memory in measured.memory:
            crew.record(MemoryCounted(sweep=order.sweep, memory=memory))
        if measured.ended is not None:
            size, reason = measured.ended
            crew.record(SweepEnded(sweep=order.sweep, local_batch_size=size, reason=reason))
        for sample in measured.noise:
            crew.note(NOISE, sample)
        for gains in measured.gains:
            crew.record(gains)
        if order.compressors is not None and measured.gradient is not None:
            time_compressors(crew, order.sweep, order.compressors, measured.gradient, None)
        if order.network is not None and order.workers > 1:
            matrix = torch.rand(MATRIX_SIDE, MATRIX_SIDE, device=self._training.device)

            def compute() -> None:
                torch.mm(matrix, matrix)[0, 0].item()  # waits for the device

            time_collectives(
                crew,
                order.network,
                compute=compute,
                gradient_bytes=self._gradient_bytes,
                time_limit_s=order.network_s,
            )
        crew.gather([])
        crew.note(FINISHED)

    @property
    def _gradient_bytes(self) -> int:
        return self._training.kept.gradient_bytes

    def _job(self) -> Job:
        order, training, measured = self._order, self._training, self._measured
        epoch = order.dataset_size or training.dataset_size
        flops = measured.flops / measured.flops_samples if measured.flops and measured.flops_samples else None
        return Job(
            task=Path(order.script).name,
            script=(order.script, *order.arguments),
            parameters=sum(parameter.numel() for parameter in training.parameters),
            gradient_bytes=self._gradient_bytes,
            dataset_size=epoch or STREAM_BATCHES * training.batch_size,
            counts_epochs=epoch is not None,
            batch_size=training.batch_size,
            least_local_batch_size=LEAST_SAMPLES if any(map(normalises, training.modules)) else 1,
            learning_rate_rule="none",
            target_metric=NO_TARGET.metric,
            target_value=NO_TARGET.value,
            target_higher_is_better=NO_TARGET.higher_is_better,
            operators_per_step=max(1, measured.operators),
            flops_per_sample=flops,
            model_kind=model_kind(training.modules),
            reading=training.reading,
        )


def main(arguments: list[str]) -> int:
    """Measure; the exit code is hetopt's."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    try:
        ScriptProbe(folder, rank).run()
    except HetoptError as error:
        failure = Failure(message=error.message, hint=error.hint)
        inside(folder, FAILED_FILE.format(rank=rank)).write_text(failure.model_dump_json(), encoding="utf-8")
        return error.exit_code
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: what a script left running (readers, threads, exit handlers) was to serve a run that is not to go on.
    os._exit(code)
