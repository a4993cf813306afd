"""`session`: the one call by which a script joins the other workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.amp import GradScaler
from torch.optim import Optimizer

from hetopt.core.comm.options import way_name
from hetopt.core.errors import BadInput
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.memory import Sharding
from hetopt.core.run_folder import RUN_VARIABLE, SPEC_VARIABLE
from hetopt.core.run_rules import check_for_script
from hetopt.core.run_spec import Compression, RunSpec, Synchronization, spell_sync
from hetopt.trainer.agreement import join_group
from hetopt.trainer.comm.compressor import keeps_momentum, take_momentum
from hetopt.trainer.comm.peers import meet
from hetopt.trainer.host.gate import group_store
from hetopt.trainer.script.batches import REGISTRY, ROUNDING, Audit, AuditRecord, make_spec
from hetopt.trainer.session.guards import inspect_model, inspect_optimizers
from hetopt.trainer.session.run import Session
from hetopt.trainer.sharding import block_facts, share_trained, wish_of

BatchNormWay: TypeAlias = Literal["own", "synchronized"]


def session(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    compression: Compression | str = "identity",
    accumulate: int = 1,
    steps: int | None = None,
    scaler: GradScaler | None = None,
    policy: str = "model",
    sync: Synchronization | str = "bsp",
    spec: RunSpec | Path | str | None = None,
    folder: Path | str | None = None,
    batch_norm: BatchNormWay = "own",
    audit: Audit = "warn",
    audit_tolerance: float = ROUNDING,
    timeout_s: float | None = None,
    shard: Sharding = "none",
    blocks: type[nn.Module] | None = None,
) -> Session:
    """Join the script's other workers, and return the session that shares batches and sums gradients; all must call it.

    With several workers their process group is opened unless the script has one, parameters and buffers become rank
    0's, random generators of other ranks are seeded anew, and hooks follow optimizers until the session ends. A single
    worker without compression changes nothing. One session may be open in a process.

    Args:
        model: on its device, before it is trained; or several, as a tuple: ``session((generator, discriminator),
            (optimizer_g, optimizer_d))``.
        optimizer: of any kind, with any parameter groups; or several, each of which steps when the script says so.
        compression: of the gradient, as `parse_compression` reads it (``"topk:0.01"``, ``"powersgd,rank=2"``), or the
            record; ``"identity"``: none; ``"auto"``: the option predicted to be done first, decided while it trains.
            A compression that keeps the momentum (``dgc``) takes over the optimizer's, which becomes 0 there.
        accumulate: backward passes of a step; 1: as many as batches had a step when the script was profiled, of which
            the plan knows.
        steps: that the script will do, by which near the end ``auto`` holds nothing back; None: not known.
        scaler: the GradScaler of the script, where gradients are compressed; None: the script has none, or sends dense
            gradients.
        policy: name of how batches are shared while training goes on (see `hetopt.trainer.policies.policy`).
        sync: when workers put together what they have learned, as `parse_sync` reads it
            (``"local-sgd(8)"``, ``"selsync(auto)"``), or the record; ``bsp``: all sum their gradients at every step.
            Otherwise each steps by its own gradient, and the model is the average of all between epochs and at the end.
        spec: what `hetopt export` wrote for this run, the record or its file, whose shares, compression, policies and
            sync then count in place of those given here; None: the file that the variable HETOPT_SPEC names, or equal
            shares.
        folder: for an event log, and step times for `hetopt profile --from-samples`; None: that of the run, if hetopt
            launched the script; else nothing is written.
        batch_norm: ``"synchronized"``: BatchNorm layers normalise by the whole batch, for which the workers
            wait for each other in every such layer, twice a step; ``"own"``: each worker by its own samples.
        audit: what happens where an audit step finds that shares differ from one machine: the log says so (``"warn"``),
            the run ends (``"stop"``), or there are no audits (``"off"``). Two workers are never audited.
        audit_tolerance: relative distance of the two gradients that is accepted.
        timeout_s: seconds after which a worker that has not come to a collective is lost; None: the plan's, or 300 s.
        shard: what the devices of a machine share of the model, by torch's ``fully_shard``: ``none``; ``grads``:
            gradients and optimizer state; ``full``: weights as well; ``auto``: everything where one device cannot hold
            a replica. The model is sharded in place, and the optimizer steps by its shards. A plan may say otherwise.
        blocks: class of the modules that the model is sharded by; None: the modules that its lists repeat (see
            `hetopt.trainer.sharding.blocks_of`).

    Raises:
        BadInput: an argument cannot be used (the message names it), the spec is for another number of workers, things
            do not go together, the workers were given different arguments, another session is open, torchrun's
            variables are missing, or rank 0 cannot listen at the address by which the others know it.
    """
    audits = AuditRecord(mode=audit, tolerance=audit_tolerance)
    if batch_norm not in get_args(BatchNormWay):
        raise BadInput(
            f"`batch_norm` must be 'own' or 'synchronized', got {batch_norm!r}.",
            hint="batch_norm='synchronized' normalises by the whole batch",
        )
    rank, world_size = find_place(os.environ)
    models = model if isinstance(model, (list, tuple)) else (model,)
    given = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for each in models or (model,):
        inspect_model(each, world_size)
    inspect_optimizers(given or (optimizer,))
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    run_spec = make_spec(
        world_size,
        compression=compression,
        policy=policy,
        sync=sync,
        spec=spec or os.environ.get(SPEC_VARIABLE) or None,
    )
    accumulate = accumulate if accumulate > 1 else run_spec.batches_per_step
    run_spec = run_spec.model_copy(update={"batches_per_step": accumulate})
    check_for_script(run_spec)
    if len(given) == 1:  # momentum that the workers keep is taken over
        compression = take_momentum(run_spec.compression, given[0])
        run_spec = run_spec.model_copy(update={"compression": compression})
    elif run_spec.is_local or run_spec.ratio_policy != "fixed" or keeps_momentum(run_spec.compression):
        raise BadInput(
            "A session of several optimizers sums their gradients at every step, with a compression that stays.",
            hint="leave out sync, compression='auto' and compression that keeps the momentum (dgc)",
        )
    if batch_norm == "synchronized" and run_spec.is_local:
        raise BadInput(
            "batch_norm='synchronized' normalises by the batch of all workers, and these train for themselves.",
            hint="leave out sync, or batch_norm",
        )
    wish = wish_of(run_spec, shard)
    if not wish == shard == "none":
        REGISTRY.shares = {"shard": shard, **block_facts(whole, blocks)}
        if len(models) + len(given) > 2 or scaler is not None:
            raise BadInput(
                "A session shards one model that has one optimizer, and no GradScaler.",
                hint="leave out `shard`, or the others: autocast in bf16 needs no GradScaler",
            )
    store, leave = join(whole, rank, world_size, timeout_s or run_spec.exchange_timeout_s)
    if world_size > 1:
        # What the workers do next depends on these: those that disagree would wait for each other for ever.
        policies = f"ratio policy {run_spec.ratio_policy}, collective {run_spec.collective_policy}"
        meet(
            f"{way_name(run_spec.compression)}, {policies}, shares {run_spec.batch_policy}, sync "
            f"{spell_sync(run_spec.sync)}, {accumulate} backward passes a step, batch norm {batch_norm}, shard {wish}"
        )
    return Session(
        whole,
        given,
        spec=run_spec,
        rank=rank,
        world_size=world_size,
        store=store,
        accumulate=accumulate,
        steps=steps,
        scaler=scaler,
        folder=Path(named) if (named := folder or os.environ.get(RUN_VARIABLE)) else None,
        audit=audits,
        synchronizes_norms=batch_norm == "synchronized",
        shards=share_trained(whole, given[0], wish, run_spec, rank, blocks),
        leave=leave,
    )


def find_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, number of workers) of the script's process group, or else of torchrun's variables; without: 0, 1.

    Args:
        environment: variables of the process, of which RANK and WORLD_SIZE are read.

    Raises:
        BadInput: the group has another number of workers than torchrun started.
    """
    rank, workers = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    if not dist.is_initialized():
        return rank, workers
    if "WORLD_SIZE" in environment and workers != dist.get_world_size():
        raise BadInput(
            f"The script's process group has {dist.get_world_size()} workers, and torchrun started {workers}.",
            hint="call init_process_group('gloo') without a size and rank of its own, or leave it to the session",
        )
    return dist.get_rank(), dist.get_world_size()


def join(model: nn.Module, rank: int, world_size: int, timeout_s: float) -> tuple[Store | None, Callable[[], None]]:
    """Open all workers' process group, unless the script has one; return its store, and a function that leaves it.

    Where the script has a group, or there is one worker, nothing is opened: the store is None, and the function does
    nothing.

    Args:
        model: on the device of this worker; not changed.
        rank: of this worker.
        world_size: number of workers; 1: no group is opened.
        timeout_s: seconds after which a worker that has not come to a collective is lost.

    Raises:
        BadInput: the script's own process group cannot be used, as it has no gloo; the group stays. Or the workers have
            different versions of hetopt, torchrun's variables are missing, or rank 0 cannot listen at the address by
            which the others know it.
        DistNetworkError: rank 0 does not answer.
    """
    if world_size == 1 or dist.is_initialized():
        if world_size > 1 and "gloo" not in dist.get_backend_config():
            raise BadInput(
                f"The script's process group has only {dist.get_backend()}, and sessions also agree on the CPU.",
                hint="use init_process_group('cpu:gloo,cuda:nccl'), or leave it to the session",
            )
        return None, lambda: None
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # All are on this machine: gloo would listen on the address that its name stands for, which others may reach.
        for name, interface in collectives_on(LOOPBACK).items():
            os.environ.setdefault(name, interface)
    # Groups of one name would read in a store what earlier ones have left there: each session has a part of its own.
    REGISTRY.store = REGISTRY.store or group_store(os.environ, rank)
    store = PrefixStore(f"session/{REGISTRY.begun}", REGISTRY.store)
    # A device by a name that no other of its machine has, whatever index each process knows it by.
    cuda = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    join_group(
        store,
        rank,
        world_size,
        device="cpu" if cuda is None else f"cuda:{torch.cuda.get_device_properties(cuda).uuid}",
        timeout_s=timeout_s,
    )
    return store, lambda: dist.destroy_process_group() if dist.is_initialized() else None
