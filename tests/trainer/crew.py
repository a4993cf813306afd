"""One process of a crew that trains several scenarios one after another: ``crew.py RANK WORLD_SIZE SCENARIOS``.

Starting processes costs seconds, a scenario of the toy task a fraction of one; so many laws share one start.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import toy_task  # beside this program
from torch import nn

from hetopt.core.comm.options import ROUNDED, Candidates
from hetopt.core.events.log import EVENTS_FILE, EventLog
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Gathering
from hetopt.trainer.comm import network
from hetopt.trainer.comm.exchange import BucketExchange, DenseBuckets, Exchange
from hetopt.trainer.comm.peers import Guard
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.data.cursor import MicroBatch, SampleCursor
from hetopt.trainer.failure import FailureReport
from hetopt.trainer.loop import train
from hetopt.trainer.policies.ratio.auto import AutoRatio
from hetopt.trainer.policies.ratio.policy import RatioDecision, RatioObservation
from hetopt.trainer.steps.local_batch import BatchReader
from hetopt.trainer.steps.step import FusedStep, LossModule, parts_of, switch_between, trainable_parameters
from hetopt.trainer.steps.stopwatch import Slowdown, Stopwatch
from hetopt.trainer.tasks.load import load_task
from hetopt.trainer.training import build_model


def run_scenario(run_dir: Path, rank: int, world_size: int) -> None:
    """Train what ``run_dir/spec.json`` says, as the worker process does, and record what this rank read."""
    attempt = len(list((run_dir / "records").glob(f"{rank}-*")))
    os.environ["TOY_RECORD"] = str(run_dir / "records" / f"{rank}-{attempt}")
    os.environ["TOY_FINGERPRINTS"] = str(run_dir / f"fingerprints-{rank}")
    memory = json.loads((run_dir / "memory").read_text()) if (run_dir / "memory").exists() else {"rank": -1}
    for variable in ("samples", "after"):
        os.environ[f"TOY_MEMORY_{variable.upper()}"] = str(memory.get(variable, 0)) if memory["rank"] == rank else ""
    scripted = patch.multiple(AutoRatio, first=lambda policy, network: DENSE_FIRST, decide=in_turns)
    with FailureReport(run_dir, rank), scripted if (run_dir / "turns").exists() else nullcontext():
        events = EventLog(run_dir / EVENTS_FILE if rank == 0 else None)
        train(
            WorkerContext(
                spec=read_spec(run_dir),
                rank=rank,
                world_size=world_size,
                device=torch.device("cpu"),
                run_dir=run_dir,
                events=events,
                stop_requested=lambda: False,
            )
        )
        events.close()


DENSE_FIRST = RatioDecision(ratio=1.0, option="identity by all_reduce")


def in_turns(policy: AutoRatio, state: Any, observation: RatioObservation) -> tuple[Any, RatioDecision]:
    """Averages and thin exchanges in turns of 14 and 6 steps, whatever was measured."""
    averages, thin = (next(filter(wanted, policy.options)) for wanted in (lambda o: o.averages, lambda o: o.ratio < 1))
    chosen = averages if observation.step % 20 < 14 else thin
    return state, RatioDecision(ratio=chosen.ratio, option=chosen.key)


def save_gradients(folder: Path, task_reference: str, splits: list[list[int]], rank: int) -> None:
    """The gradient of the first global batch under each split, by both forms of step, as seen by this rank."""
    task = load_task(task_reference)
    os.environ.pop("TOY_RECORD", None)
    device = torch.device("cpu")
    reader = BatchReader(dataset=task.data(None).train, device=device, seed=0, max_samples=20)
    gradients: dict[str, torch.Tensor] = {}
    norms: dict[str, Any] = {}

    losses = {"counted": toy_task.sum_of_chosen}

    def form(kind: str, model: nn.Module) -> FusedStep:
        module = LossModule(model, losses.get(kind, task.loss), "fp32")
        module.is_counted, module.targets_per_sample = kind in losses, 0.0
        if kind == "bucketed":
            return FusedStep(
                module=module,
                reader=reader,
                in_buckets=DenseBuckets(Guard("dense")),
                stopwatch=Stopwatch(),
                pace=Slowdown(),
            )
        return FusedStep(
            module=module,
            reader=reader,
            exchange=Exchange(Compression(), sum(p.numel() for p in model.parameters())),
            stopwatch=Stopwatch(),
            pace=Slowdown(),
        )

    for kind in ("bucketed", "fused", *losses):
        # One step for all splits: a worker whose share grows computes larger micro-batches than ever before.
        model = build_model(task, device, seed=0)
        step = form(kind, model)
        for shares in splits:
            batch = SampleCursor(len(reader.dataset), 0).take(shares)
            if shares is splits[0]:
                step.warm_up(reader.cut(batch, rank)[0])
            trace = step.run(reader.cut(batch, rank), len(batch), None, wants_norms=True)
            norms[f"{kind} {shares}"] = trace.norms
            flat = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
            gradients[f"{kind} {shares}"] = torch.cat(flat).clone()
    torch.save(gradients, folder / f"gradients-{rank}.pt")
    (folder / f"norms-{rank}.json").write_text(json.dumps(norms))


def gather_under_steps(folder: Path, task_reference: str, rank: int, world_size: int) -> None:
    """Control rows that travel while gradients do, by both forms of step, with workers that are late now and then."""
    task = load_task(task_reference)
    device = torch.device("cpu")
    reader = BatchReader(dataset=task.data(None).train, device=device, seed=0)
    model = build_model(task, device, seed=0)
    module = LossModule(model, task.loss, "fp32")
    dense = DenseBuckets(Guard("dense"))
    bucketed = FusedStep(module=module, reader=reader, in_buckets=dense, stopwatch=Stopwatch(), pace=Slowdown())
    part = MicroBatch(epoch=0, indices=range(4))
    bucketed.warm_up(part)
    delays = random.Random(rank)
    seen = []
    for step in range(60):
        time.sleep(delays.choice([0, 0, 0.003]))
        gathering = Gathering([rank, step, math.nan if step % 7 == rank else 0.1 * step], world_size)
        time.sleep(delays.choice([0, 0, 0.003]))
        if step % 2:
            bucketed.run([part], 4 * world_size, None)
        else:
            flat = torch.full((50_000,), float(rank + step))
            dist.all_reduce(flat)
            assert bool((flat == sum(range(world_size)) + world_size * step).all())
        seen.append(gathering.wait())
    (folder / f"gathered-{rank}.json").write_text(json.dumps(seen))


def switch_ways(folder: Path, task_reference: str, rank: int, world_size: int) -> None:
    """The same batches again and again by one step that changes its way to exchange; no step is applied."""
    task = load_task(task_reference)
    device = torch.device("cpu")
    reader = BatchReader(dataset=task.data(None).train, device=device, seed=0)
    model = build_model(task, device, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    module = LossModule(model, task.loss, "fp32")
    parts = parts_of(trainable_parameters(model))
    part = MicroBatch(epoch=0, indices=range(4 * rank, 4 * rank + 4))
    candidates = Candidates(
        asked=Compression(),
        chooses_collective=True,
        numel=numel,
        workers=world_size,
        buckets=len(parts),
        rounded_s=dict.fromkeys(ROUNDED, 0.0),
        bf16_in_buckets=True,
    )
    exchange = Exchange(candidates.dense.compression, numel)
    bf16 = BucketExchange(Compression(name="bf16", memory="none"), trainable_parameters(model))
    buckets = {"identity": DenseBuckets(Guard("dense")), "bf16": bf16}
    present = [candidates.dense]
    switch = switch_between(exchange, buckets, lambda: present[0])
    step = FusedStep(
        module=module, reader=reader, exchange=exchange, stopwatch=Stopwatch(), pace=Slowdown(), switch=switch
    )
    step.warm_up(part)
    gradients = []
    by_key = {way.key: way for way in candidates.all}
    thin = "topk 0.01 by all_gather"
    dense = candidates.dense.key
    half = f"bf16 by all_reduce in {len(parts)} buckets"
    for key in (dense, thin, "topk 0.1 by ar_topk, packed_bf16", half, thin, half, dense):
        present[0] = by_key[key]
        exchange.use(by_key[key].compression)
        for number in range(3):
            step.run([part], 4 * world_size, None, (0.01, 0.1) if number == 1 else ())
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone())
    torch.save(torch.stack(gradients), folder / f"switched-{rank}.pt")


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    network.MOST_REPEATS = network.LEAST_REPEATS  # of a measurement that laws do not look at
    plan = json.loads((folder / "crew.json").read_text())
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        if plan["splits"]:
            save_gradients(folder, plan["task"], plan["splits"], rank)
            gather_under_steps(folder, plan["task"], rank, world_size)
            switch_ways(folder, plan["task"], rank, world_size)
        for entry in plan["scenarios"]:
            run_dir = folder / entry["name"]
            if rank == 0:
                (run_dir / "records").mkdir(parents=True, exist_ok=True)
                (run_dir / "spec.json").write_text(json.dumps(entry["spec"]))
                for name in ("memory", "turns"):
                    if name in entry:
                        (run_dir / name).write_text(json.dumps(entry[name]))
            dist.barrier()
            run_scenario(run_dir, rank, world_size)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("error")
    started = time.monotonic()
    main()
    print(f"rank {sys.argv[1]}: {time.monotonic() - started:.1f} s")
