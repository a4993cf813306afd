"""The process in which a script runs while it is measured: ``python -m hetopt.profiler.script.child FOLDER RANK``.

The script sees its own arguments, folder and terminal, and no other worker, as if it were started by itself.
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
from torch.optim.optimizer import register_optimizer_step_post_hook

from hetopt.core.artifact import read_record
from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.profile import Job
from hetopt.core.run_spec import NetworkProbe, RunSpec, StopRule, WorkerSpec
from hetopt.core.search_path import run_script
from hetopt.profiler.probe.crew import ProbeGroup
from hetopt.profiler.probe.exchange_costs import time_collectives, time_compressors
from hetopt.profiler.probe.facts import (
    host_facts,
    model_kind,
)
from hetopt.profiler.probe.sweep import record_facts
from hetopt.profiler.records import FINISHED, STARTED, SweepEnded, WorkerSteps
from hetopt.profiler.script.course import USUAL, ScriptCourse
from hetopt.profiler.script.observer import Course, Finished, Observer, be_alone, flat_gradient, listen, normalises
from hetopt.profiler.script.order import MEETING_FILE, ORDER_FILE, ScriptOrder
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.failure import FailureReport, Lines, is_out_of_memory, reason_of
from hetopt.trainer.script.batches import shared_by_script
from hetopt.trainer.task import LEAST_SAMPLES, NO_TARGET

STREAM_BATCHES = 10_000
"""Number of batches that stand for an epoch where nothing tells how long one is."""


class ScriptProbe:
    """Measurement of one training script in this process: runs it, hooks into torch, and writes the event log.

    Args:
        folder: has the order to measure; the log is written there.
        rank: number of this copy of the script, from 0; rank 0 writes the log.

    Raises:
        BadInput: the folder holds no order that can be read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Read the order in the folder and open the log; nothing of the script runs.

        Raises:
            MissingFile: the folder has no order.
            BadInput: the order cannot be read.
        """
        self._folder, self._rank = folder, rank
        self._order = order = read_record(ScriptOrder, folder / ORDER_FILE, hint="run `hetopt profile` again")
        self._events = EventLog(folder / EVENTS_FILE if rank == 0 else None)
        self._lines = Lines(order.script)
        self._course = self._measures()
        self._observer = Observer(self._course, self._lines)
        self._begun_s = time.perf_counter()
        self._measured = ScriptCourse(order=order, observer=self._observer, crew=self._crew(1))

    def run(self) -> None:
        """Run the script in this process until all is measured, then stop it and write what was measured.

        ``sys.argv``, torch's threads and, unless only steps are watched, torch itself are changed for good.

        Raises:
            BadInput: no optimizer of torch steps, the batch size is not known, or the script ended too soon.
            RunFailed: the script raised an error, or took too long to its first step; names the line.
            SystemExit: the script raised it before its first step, and only its steps are watched.
        """
        order = self._order
        torch.set_num_threads(order.threads_per_worker)
        sys.argv = [order.script, *order.arguments]
        if order.watch != "steps":
            listen(self._observer)
            signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, order.startup_s)
        else:
            register_optimizer_step_post_hook(lambda optimizer, *_: self._observer.ended_step(optimizer))
            if order.as_torchrun:
                be_alone()
        try:
            run_script(order.script)
        except Finished as end:
            if end.args:
                raise end.args[0] from None
        except SystemExit as stop:
            self._ended(f"{self._lines.of(stop)}: the script exits here", stop)
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and self._measured.trying and self._measured.points):
                raise self._failed(error) from error
            ended = SweepEnded(sweep=order.sweep, local_batch_size=self._measured.trying)
            self._measured.crew.record(ended)
        except Exception as error:
            raise self._failed(error) from error
        else:
            self._ended(f"{order.script} ended")
        self._conclude()

    def _failed(self, error: Exception) -> RunFailed:
        return RunFailed(f"{self._lines.of(error)}: {reason_of(error)}")

    def _late(self, number: int, frame: FrameType | None) -> None:
        """Raise `Finished` with the error that the script made no step within ``startup_s`` (a signal handler)."""
        raise Finished(
            RunFailed(
                f"{self._lines.now() or self._order.script}: here the script still was after "
                f"{self._order.startup_s:g} s, without a step of an optimizer.",
                hint="see that it trains by itself with these arguments, and how long its first steps take",
            )
        )

    def _ended(self, how: str, stop: SystemExit | None = None) -> None:
        """Raise an error if the script ended before enough of it was measured, unless only steps are watched.

        The course is closed before, which keeps what it measured.

        Args:
            how: how the script ended, for the error.
            stop: the script's SystemExit; None: it returned.

        Raises:
            BadInput: fewer batch sizes were measured than a profile needs, or nothing was trained.
            SystemExit: ``stop``, where only steps are watched and nothing was trained.
        """
        self._course.close()
        if self._order.watch == "steps":
            if stop is not None and not self._observer.optimizers:
                raise stop
            return
        if len(self._measured.points) >= (2 if self._measured.changes_size else 1):
            return
        if not self._observer.parameters:
            at = self._observer.backward_at
            raise BadInput(
                f"{f'{at}: backward is called here' if at else 'No backward is called'}, and no optimizer of torch "
                "steps: nothing is trained that could be measured.",
                hint="give it the arguments with which it trains, after --; parameters that are changed by hand need "
                "an optimizer, such as torch.optim.SGD",
            )
        steps = sum(len(point.workers[0].samples_s) for point in self._measured.points)
        raise BadInput(
            f"{how} after {steps} measured steps (the first in {self._observer.step_at}), before enough of it was "
            "measured.",
            hint="give it an argument with which it trains for longer",
        )

    def _measures(self) -> Course:
        """Yield the wishes of the script's course from the end of its first step on.

        First the alarm for a late start is switched off, and the start is logged. If only steps are watched and the
        batch size is not known, nothing is measured.

        Raises:
            BadInput: more than steps is watched, and the batch size is not known.
            RunFailed: no steps of the script's own batch size come.
        """
        observer, watch = self._observer, self._order.watch
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if watch == "steps":
            observer.find_loader()
        elif not observer.batch_size:
            raise BadInput(
                f"{observer.step_at}: the optimizer steps, and neither a DataLoader nor what modules are given tells "
                "the batch size.",
                hint="compute by modules of torch.nn, whose first input has a row for each sample",
            )
        self._events.write(STARTED)
        if observer.batch_size:
            yield from self._measured.run()

    def _crew(self, workers: int) -> ProbeGroup:
        """Return this copy's view of the group of ``workers`` copies of the script; 1: this copy alone, as rank 0."""
        spec = RunSpec(
            task="script",
            workers=(WorkerSpec(host="localhost", type="local", local_batch_size=1),) * workers,
            stop=StopRule(max_steps=1),
        )
        context = WorkerContext(
            spec=spec,
            rank=self._rank if workers > 1 else 0,
            world_size=workers,
            device=self._observer.device,
            run_dir=self._folder,
            events=self._events,
            stop_requested=lambda: False,
        )
        return ProbeGroup(context=context, started_s=self._begun_s)

    def _conclude(self) -> None:
        """Wait for the copies beside this one; log facts, all step times, and times of compressors and collectives.

        The script's own process group is ended. Collectives need several copies. If only steps are watched
        and there were too few to time, nothing is logged.

        Raises:
            ProbeStopped: any copy was asked to stop.
            RunFailed: this machine has no loopback interface.
        """
        order = self._order
        if order.watch == "steps" and not self._measured.points:
            return  # too few steps to time, or none in this process
        gradient = None if order.compressors is None else flat_gradient(self._observer.parameters, torch.float32)
        if dist.is_initialized():
            dist.destroy_process_group()  # the script's own
        if order.concurrent_workers > 1:
            os.environ.update(collectives_on(LOOPBACK))
            own_gpus = self._observer.device.type == "cuda" and torch.cuda.device_count() >= order.concurrent_workers
            init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpus else "gloo",
                store=FileStore(str(self._folder / MEETING_FILE), order.concurrent_workers),
                rank=self._rank,
                world_size=order.concurrent_workers,
                timeout=datetime.timedelta(minutes=2),
            )
        crew, measured = self._crew(order.concurrent_workers), self._measured
        if crew.context.is_leader:
            crew.record(host_facts(self._observer.device))
            crew.record(self._job())
        record_facts(crew, order.sweep, order, crew.first(order.concurrent_workers), True, USUAL.memory_fraction)
        # The sizes that all copies measured: they ask for the same in the same order.
        fewest = int(min(row[0] for row in crew.gather([float(len(measured.points))])))
        for point in measured.points[:fewest]:
            rows = crew.gather(point.workers[0].row(order.timed_steps))
            crew.record(point.model_copy(update={"workers": tuple(map(WorkerSteps.of, rows))}))
        if order.compressors is not None:
            time_compressors(crew, order.sweep, order.compressors, gradient, None)
        if order.concurrent_workers > 1:
            time_collectives(
                crew,
                NetworkProbe(),
                gradient_bytes=self._observer.gradient_bytes,
                time_limit_s=order.network_s,
            )
        crew.gather([])
        crew.context.events.write(FINISHED)

    def _job(self) -> Job:
        """Return the script's facts: parameters, batch, samples of an epoch, counted work, and sharding.

        If the samples of an epoch are not known, ``counts_epochs`` is False, and `STREAM_BATCHES` batches stand in.
        """
        order, training, measured = self._order, self._observer, self._measured
        epoch = order.dataset_size or training.dataset_size
        return Job(
            task=Path(order.script).name,
            script=(order.script, *order.arguments),
            parameters=sum(parameter.numel() for parameter in training.parameters),
            gradient_bytes=training.gradient_bytes,
            dataset_size=epoch or STREAM_BATCHES * training.batch_size,
            counts_epochs=epoch is not None,
            batch_size=training.batch_size,
            batches_per_step=training.batches,
            least_local_batch_size=LEAST_SAMPLES if any(map(normalises, training.modules)) else 1,
            learning_rate_rule="none",
            target_metric=NO_TARGET.metric,
            target_value=NO_TARGET.value,
            target_higher_is_better=NO_TARGET.higher_is_better,
            operators_per_step=max(1, measured.operators),
            flops_per_sample=measured.flops_per_sample,
            model_kind=model_kind(training.modules),
            **shared_by_script(training.modules),
        )


def main(arguments: list[str]) -> int:
    """Measure a script in this process, with ``arguments`` [FOLDER, RANK], and return hetopt's exit code.

    An error is logged, and not raised; a script's own SystemExit gives its code.
    """
    folder, rank = Path(arguments[0]), int(arguments[1])
    try:
        with FailureReport(folder, rank) as report:
            ScriptProbe(folder, rank).run()
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return report.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: what a script left running (readers, threads, exit handlers) was to serve a run that is not to go on.
    os._exit(code)
