"""The first events of a run: what is trained, on whom, and over which network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetopt.core.events.log import Event
from hetopt.core.run_spec import RunSpec
from hetopt.trainer.agreement import gather_numbers, gather_texts
from hetopt.trainer.comm.network import Network
from hetopt.trainer.context import WorkerContext
from hetopt.trainer.steps.exchange_assembly import ExchangeConfig


def announce(
    context: WorkerContext, model: nn.Module, exchange: ExchangeConfig, *, shares: Sequence[int], step: int
) -> None:
    """Write ``run_started``, and what the network is like where it was measured; called by every rank.

    Args:
        context: this worker.
        model: what is trained.
        exchange: how its gradients travel.
        shares: of the first step, in rank order.
        step: steps done by earlier attempts.
    """
    spec = context.spec
    name = "cpu" if context.device.type == "cpu" else torch.cuda.get_device_name(context.device)
    devices = gather_texts(name, context.world_size)
    threads = gather_numbers([torch.get_num_threads()], context.world_size)
    context.events.write(
        "run_started",
        task=spec.task,
        workers=[
            {
                "host": worker.host,
                "type": worker.type,
                "slowdown": worker.slowdown,
                "local_batch_size": share,
                "device": device,
                "threads": int(row[0]),
            }
            for worker, share, device, row in zip(spec.workers, shares, devices, threads, strict=True)
        ],
        global_batch_size=spec.global_batch_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes=exchange.dense_bytes,
        compression=spec.compression.model_dump(),
        ratio_policy=spec.ratio_policy,
        collective_policy=spec.collective_policy,
        **_apart(spec),
        resumed_step=step,
    )
    if exchange.timings:
        hop = Network.of(exchange.timings).hop
        context.events.write(
            "network_measured",
            step=step,
            latency_s=round(hop.latency_s, 7),
            bytes_per_s=round(hop.bytes_per_s),
            measured_s=round(exchange.measured_s, 3),
            by_hosts=exchange.by_hosts,
            timings=[
                {
                    "collective": timed.operation.primitive,
                    "payload_bytes": int(timed.operation.payload_bytes),
                    "time_s": round(timed.time_s, 7),
                }
                for timed in exchange.timings
            ],
        )


def _apart(spec: RunSpec) -> Event:
    """How workers train for themselves, and on what, where they do."""
    told: Event = {"sync": spec.sync.model_dump()} if spec.is_local else {}
    if spec.partition.name != "global":
        told["partition"] = spec.partition.model_dump()
    return told
