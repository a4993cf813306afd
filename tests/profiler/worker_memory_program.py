"""Two workers train jobs one after another under the count of their tensors: ``worker_memory_program.py RANK FOLDER``.

Rank 0 writes, for every job, compression and local batch size, the peak that its profile's law predicts, from counts at
other sizes, and the peak that the worker came to between its first update and its last. What is done once, before and
after, is tried with what memory there is, or is the host's; so are buffers of messages, which are gloo's, and hold a
gradient of 64 KiB or less once for every worker. A job is a task; or a script, which is profiled as it is
and then trained as `hetopt convert` makes it, with a session.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetopt.core.events.log import EVENTS_FILE, EventLog, read_events
from hetopt.core.memory import ALONE, Blocks, TrainingMemory
from hetopt.core.run_folder import SPEC_VARIABLE
from hetopt.core.run_spec import Compression, RunSpec, StopRule, Synchronization, WorkerSpec
from hetopt.optimizer.step_time.device_memory import exchange_memory
from hetopt.profiler.collect import joined
from hetopt.profiler.probe.facts import TensorBytes
from hetopt.profiler.probe.sweep import Replica
from hetopt.trainer import loop, training
from hetopt.trainer.comm.channel import Channel
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import MicroBatch
from hetopt.trainer.loop import Material, train
from hetopt.trainer.session.run import Session
from hetopt.trainer.session.turns import StepMessages
from hetopt.trainer.sharding import block_facts, gathered
from hetopt.trainer.steps.local_batch import BatchReader
from tests.trainer.joining import join, leave

CPU = torch.device("cpu")
WORLD_SIZE = 2
STEPS = 3


def spec_of(task: str, samples: int, compression: Compression, **more: object) -> RunSpec:
    hosts = "aa" if more.get("shard") else "ab"
    workers = tuple(WorkerSpec(host=host, type="local", local_batch_size=samples) for host in hosts)
    return RunSpec(
        task=task,
        workers=workers,
        stop=StopRule(max_steps=STEPS),
        compression=compression,
        batch_policy="static",
        prefetch="off",
        **more,
    )


def counted(material: Material, spec: RunSpec, sizes: list[int]) -> TrainingMemory:
    """As a profile has it."""
    replica = Replica.build(material.task, spec, CPU)
    reader = BatchReader(dataset=material.data.train, device=CPU, seed=0)
    counts = []
    for size in sizes:
        for _ in range(2):  # the optimizer makes its state in the first step
            one = replica.count(reader.read(MicroBatch(epoch=0, indices=range(size))), size)
        counts.append(one)
    return joined(counts)


class Bytes(TensorBytes):
    """Counts what a device holds of sharded tensors, and storages that FSDP empties and fills again, too."""

    def _storages(self, values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
        return super()._storages(getattr(value, "_local_tensor", value) for value in values)

    def follow(self, resize: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def done(tensor: torch.Tensor) -> None:
            resize(tensor)
            key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
            if key in self._known:
                self.live_bytes += size - self._known[key][1]
                self._known[key] = self._known[key][0], size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        return done


class Enough(BaseException):
    """A script has trained for long enough."""


@contextmanager
def counting() -> Iterator[tuple[TensorBytes, list[int]]]:
    """A count, and the peaks of this worker's tensors before each of its updates but the first, whose is 0."""
    count, peaks = Bytes(CPU), [0]

    def update(*optimizer: object) -> None:
        peaks.append(count.peak_bytes)
        if len(peaks) == 2:
            count.begin_phase()

    def by_the_host(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any, **options: Any) -> Any:
            count.is_paused = True
            made = do(*arguments, **options)
            count.is_paused = False
            return made

        return done

    hook = register_optimizer_step_pre_hook(update)
    messages = patch.object(Channel, "all_reduce", by_the_host(Channel.all_reduce))
    with (
        messages,
        patch.object(StepMessages, "__init__", by_the_host(StepMessages.__init__)),
        patch.object(loop, "gathered", by_the_host(gathered)),
        patch.object(training, "gathered", by_the_host(gathered)),
        patch.object(_fsdp_param, "alloc_storage", count.follow(_fsdp_param.alloc_storage)),
        patch.object(_fsdp_param, "free_storage", count.follow(_fsdp_param.free_storage)),
    ):
        yield count, peaks
    hook.remove()
    gc.collect()


def trained(material: Material, spec: RunSpec, rank: int, folder: Path) -> int:
    """Peak of a task's worker from its first update to its last."""
    context = WorkerContext(
        spec=spec,
        rank=rank,
        world_size=WORLD_SIZE,
        device=CPU,
        run_dir=folder,
        events=EventLog(None),
        stop_requested=lambda: False,
    )
    with counting() as (count, peaks), count:
        train(context, None, material)
    return max(peaks[2:])


def trained_script(session: str, spec: RunSpec, folder: Path) -> int:
    """The same of a session's worker. Counted from where the session begins: what a script reads is the host's."""
    (folder / "spec.json").write_text(spec.model_dump_json())
    os.environ[SPEC_VARIABLE] = str(folder / "spec.json")
    sys.argv = [session, "--batch-size", str(spec.global_batch_size)]
    begin = Session.__init__

    def enough(*optimizer: object) -> None:
        if len(peaks) > STEPS:
            raise Enough

    with counting() as (count, peaks), ExitStack() as until_the_end:

        def begun(one: Session, model: nn.Module, *arguments: Any, **options: Any) -> None:
            count.hold([*model.parameters(), *model.buffers()])
            until_the_end.enter_context(count)
            begin(one, model, *arguments, **options)

        until_the_end.callback(register_optimizer_step_post_hook(enough).remove)
        with patch.object(Session, "__init__", begun), suppress(Enough):
            runpy.run_path(session, run_name="__main__")
    return max(peaks[2:])


def shared(material: Material, memory: TrainingMemory, case: dict[str, Any]) -> TrainingMemory:
    """What a device has of a replica that both share."""
    facts = block_facts(material.task.model())
    blocks = Blocks(int(facts["blocks"]), facts["block_share"], memory.parameter_bytes)
    return memory.shared(blocks, WORLD_SIZE, regathers=case["shard"] == "full", recomputes="recomputed" in case)


def profiled(folder: Path) -> TrainingMemory:
    """Of a script as it is, as `hetopt profile` has it."""
    events = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "memory_counted"]
    return joined([TrainingMemory.model_validate(event["memory"]) for event in events])


def main(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0"}
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    join(rank, WORLD_SIZE, folder)
    told, counts = [], dict[str, TrainingMemory]()
    for number, case in enumerate(cases):
        compression, sync = Compression(**case["compression"]), Synchronization(**case["sync"])
        material = None
        if "task" in case:
            spec = spec_of(case["task"], case["counted"][0], compression, shard=case.get("shard"))
            material = Material.load(spec)
            if case["task"] not in counts:
                counts[case["task"]] = counted(material, spec, case["counted"])  # by both: models are built together
            memory = counts[case["task"]]
        else:
            memory = profiled(Path(case["profile"]))
        gradient = memory.gradient_bytes
        exchange = exchange_memory(compression, gradient_bytes=gradient, workers=WORLD_SIZE, sync=sync)
        if material is not None and "shard" in case:
            memory, exchange = shared(material, memory, case), ALONE
            material = Material.load(spec_of(case.get("recomputed", case["task"]), 1, compression))
        for samples in case["trained"]:
            place = folder / f"{number}-{samples}-{rank}"
            place.mkdir(exist_ok=True)
            spec = spec_of(case.get("task", "session"), samples, compression, sync=sync, shard=case.get("shard"))
            if "task" not in case:  # a script's own DataLoader reads
                spec = spec.model_copy(update={"prefetch": RunSpec.model_fields["prefetch"].default})
            if material is None:
                peak = trained_script(case["session"], spec, place)
            else:
                peak = trained(material, spec, rank, place)
            if rank == 0:
                predicted = memory.peak_bytes(samples, exchange)
                told.append({**case, "samples": samples, "predicted": predicted, "measured": peak})
    if rank == 0:
        (folder / "told.json").write_text(json.dumps(told))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
