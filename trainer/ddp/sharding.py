"""Models that a script shards by torch's ``fully_shard``: sharded inside each machine, summed between machines.

A script calls ``fully_shard`` over all of its workers. Here the devices of a machine hold one replica, and each device
sums the gradient of its own shard with its counterparts on the other machines: by torch's hook for that
(`FSDPModule.set_all_reduce_hook`), compressed if the plan says so. Of D devices, device i has n_i of a batch's B
samples. FSDP takes the mean over the devices of a replica and the hook the mean over replicas, so the loss L_i counts

    D n_i / B     so that the mean of all is that of one machine,   sum_i (n_i / B) dL_i

as under DDP (`hetopt.trainer.ddp.script`). A mesh of two dimensions is the script's own choice and stays, as do its
checkpoints, its clipping and its policies of precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hetopt.core.run_spec import RunSpec
from hetopt.trainer.comm.exchange import Exchange, ExchangeStats, summed
from hetopt.trainer.ddp.comm_hook import GradientState
from hetopt.trainer.steps.adaptive_controller import ExchangeConfig
from hetopt.trainer.steps.step import all_finite

REPLICA, SHARD = "replica", "shard"


def replica_devices(hosts: Sequence[str]) -> int:
    """Return how many devices hold a replica: the largest number that divides the devices of every machine.

    Args:
        hosts: of the devices, in rank order; those of a machine are neighbours.
    """
    return math.gcd(*(len(list(same)) for _, same in groupby(hosts)))


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of some parameters is a part of one that several devices hold."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


@dataclass(frozen=True)
class ReplicaMesh:
    """All devices of a run, as [replicas, devices of a replica].

    Attributes:
        mesh: of both dimensions.
    """

    mesh: DeviceMesh

    @classmethod
    def of(cls, hosts: Sequence[str], device_type: str) -> ReplicaMesh:
        """Return the mesh of a run; called by all of its workers.

        Args:
            hosts: of the devices, in rank order.
            device_type: such as "cuda".
        """
        each = replica_devices(hosts)
        shape = (len(hosts) // each, each)
        return cls(init_device_mesh(device_type, shape, mesh_dim_names=(REPLICA, SHARD)))

    @property
    def shard(self) -> DeviceMesh:
        """Return the devices of this worker's replica."""
        return self.mesh[SHARD]

    @property
    def replicas(self) -> int:
        """Return how many hold the whole model."""
        return self.mesh[REPLICA].size()

    @property
    def counterparts(self) -> dist.ProcessGroup:
        """Return the devices that hold the same shard as this one."""
        return self.mesh[REPLICA].get_group()


class ShardedState(GradientState):
    """How the gradients of one sharded model travel between replicas.

    Args:
        module: the outermost that was sharded.
        spec: of the run.
        replicas: of the model; None: the script's own mesh sums everything.
        reach: told how much of the gradient is made (1 = all), before that part is sent.

    Attributes:
        dtype: of the parameters.
    """

    def __init__(
        self, module: nn.Module, *, spec: RunSpec, replicas: ReplicaMesh | None, reach: Callable[[float], None]
    ) -> None:
        self._spec, self._reach = spec, reach
        self._replicas = replicas
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        parameters = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
        exchange = ExchangeConfig(
            compression=spec.compression, dense_bytes=4 * sum(parameter.numel() for parameter in parameters)
        )
        super().__init__(exchange)
        self.dtype = next(module.parameters()).dtype
        self._exchanges: dict[str, Exchange] = {}
        self._stats: list[ExchangeStats] = []
        self._parts = self._parts_before = 0
        if self.sums:
            for name, part in module.named_modules():
                if isinstance(part, FSDPModule):
                    part.set_all_reduce_hook(partial(self._sum, name))

    @property
    def sums(self) -> bool:
        """Return whether replicas are summed here."""
        return self._replicas is not None and self._replicas.replicas > 1

    def take_stats(self) -> ExchangeStats | None:
        """Return what the exchanges of a step cost; None: there were none."""
        taken, self._stats = self._stats, []
        return summed(taken) if taken else None

    def ended(self) -> None:
        """End a backward pass, of which some parts of the model may have had no gradient."""
        if self._parts and self._parts != self._parts_before:
            self._reach(1.0)
        self._parts, self._parts_before = 0, self._parts or self._parts_before

    def _sum(self, name: str, shard: Tensor) -> None:
        """Replace the gradient of a part's shard, 1-D, by its mean over the replicas."""
        assert self._replicas is not None
        self._parts += 1
        done = min(1.0, self._parts / self._parts_before) if self._parts_before else 0.0
        if done:
            self._reach(done)
        flat, group = shard.float(), self._replicas.counterparts  # the same tensor, where it is in single precision
        flat.div_(self._replicas.replicas)
        if name not in self._exchanges:
            seed = self._spec.seed + len(self._exchanges)
            self._exchanges[name] = Exchange(
                self._spec.compression, flat.numel(), device=flat.device, seed=seed, group=group
            )
        if self.exchange.is_dense or all_finite(flat, group):
            stats = self._exchanges[name].run(flat)
            self._stats.append(stats)
            self.waited_s += stats.sync_s if done < 1 else 0.0
        else:  # a scaled loss has overflown: nothing of it may stay in a residual, and the scaler skips the step
            flat.fill_(torch.inf)
        if flat is not shard:
            shard.copy_(flat)


def whole_model(module: nn.Module) -> nn.Module:
    """Return a module whose state is that of a sharded one, put together; called by all devices of a replica."""
    # Every script's worker would wait for it as it starts.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)
    return _Whole(get_model_state_dict(module, options=options))


class _Whole(nn.Module):
    """Stands for a model where its state is written.

    Args:
        state: by name.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._whole = state

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # overloads of torch
        """Return the state."""
        return self._whole

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """Yield the state's tensors: what a fingerprint is of."""
        return iter(sorted(self._whole.items()))
