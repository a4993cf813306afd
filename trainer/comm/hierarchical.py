"""An exchange in two levels: workers of a host sum densely among themselves, and one of them exchanges with others.

Inside a machine bytes are cheap, between machines they are not: of all workers' gradients only one sum a host crosses
the network. The residual of that is kept once a host, in units of the same weighted sum, by the worker that sent
it: the host's leader, the one of lowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from hetopt.core.comm.payload_bytes import Shapes
from hetopt.core.errors import RunFailed
from hetopt.core.run_spec import Compression
from hetopt.trainer.agreement import Store
from hetopt.trainer.comm.channel import Channel, group_rank, group_size
from hetopt.trainer.comm.compressor import State
from hetopt.trainer.comm.error_feedback import ALIKE
from hetopt.trainer.comm.exchange import SENDS_ALL, Exchange, ExchangeStats, compression_in, with_memory
from hetopt.trainer.comm.peers import Guard, LostPeer
from hetopt.trainer.packing import pack, unpack


class HostGroups:
    """The process groups of a hierarchy, as one worker sees them. All workers must make theirs at the same time.

    Args:
        hosts: of all workers, in rank order.
        timeout_s: of their operations; absent: the backend's own.

    Raises:
        ValueError: not every worker has a host.

    Attributes:
        hosts: of all workers.
        own: this worker's host.
        inside: the workers of this worker's host; None: the worker is alone.
        between: the leaders of all hosts, one each; None where this worker leads none, or is alone.
        leads: whether this worker is its host's leader.
    """

    def __init__(self, hosts: Sequence[str], *, timeout_s: float | None = None) -> None:
        if len(hosts) != group_size(None):
            raise ValueError(f"{len(hosts)} hosts were named for {group_size(None)} workers")
        self.hosts = tuple(hosts)
        rank = group_rank(None)
        self.own = hosts[rank]
        by_host: dict[str, list[int]] = {}
        for other, host in enumerate(hosts):
            by_host.setdefault(host, []).append(other)
        leaders = [ranks[0] for ranks in by_host.values()]
        self.leads = rank in leaders
        self.inside: dist.ProcessGroup | None = None
        self.between: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            return
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for ranks in (*by_host.values(), leaders):
            group = cast("dist.ProcessGroup", dist.new_group(ranks, timeout=timeout))  # torch: or 0
            if ranks is leaders:
                self.between = group if self.leads else None
            elif rank in ranks:
                self.inside = group


class HierarchicalExchange:
    """Stands in for a `Exchange` where several workers share a host.

    Replicas are bit-identical: leaders hold the same bits, and hand them on. A host of one worker has nothing to sum
    or to hand on; with only such hosts this is the exchange of all workers.

    Of a worker that leads no host, stats say that it held nothing and sent nothing; what a leader sent are its bytes
    to other hosts. The operations inside are among the messages, with the scope "host".

    Args:
        first: the compression to begin with.
        numel: elements of the flat gradient.
        groups: of all workers.
        device, clock, shapes, seed, store: as of `Exchange`.

    Attributes:
        compression: in use between hosts now.
        has_residual: whether there may be a residual; the same on all workers.

    Raises:
        BadInput: an unknown name, or things that do not go together. Only leaders notice.
    """

    def __init__(
        self,
        first: Compression,
        numel: int,
        *,
        groups: HostGroups,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        shapes: Shapes | None = None,
        seed: int = 0,
        store: Store | None = None,
    ) -> None:
        self._first = first
        self.compression = first
        self.has_residual = False
        self._clock = clock
        self._device = device if device is not None else torch.device("cpu")
        self._groups = groups
        self._between: Exchange | None = None
        if groups.leads:
            # Who is missing is found out by all workers together: no store for the leaders alone.
            self._between = Exchange(
                first,
                numel,
                device=device,
                group=groups.between,
                clock=clock,
                shapes=shapes,
                seed=seed,
            )
        description = f"{first.model_dump_json()} between hosts ({numel} elements; {' '.join(groups.hosts)})"
        self._guard = Guard(description, store=store)

    def use(self, compression: Compression) -> None:
        """Exchange like this from the next step on; all workers must decide the same.

        Raises:
            BadInput: it does not go with the residual. Only leaders notice.
        """
        if self._between is not None:
            self._between.use(compression)
        self.compression = with_memory(compression, self._first)

    def run(self, flat: Tensor, look_at: Sequence[float] = ()) -> ExchangeStats:
        """Replace the weighted local gradient by the sum over all workers, in place (see `Exchange`).

        ``look_at`` is about what hosts send, whose leaders tell. Raises what `Guard.watch` does.
        """
        with self._guard.watch():
            try:
                return self._run(flat, look_at)
            except (LostPeer, RunFailed) as error:
                # The exchange between hosts knows of no others than leaders, and numbers them from 0.
                if isinstance(error.__cause__, RuntimeError):
                    raise error.__cause__ from None
                raise

    def state(self) -> State:
        """The leader's state; the other workers of its host have the same keys, with a residual of zeros.

        All that a checkpoint needs; as `load_state`, for all workers of a host together.

        So residuals may be handed on to any other workers, of a hierarchy or not (see `error_feedback.redistribute`).
        """
        channel = self._inside(self._device)
        if self._between is None:
            size = torch.zeros(1, dtype=torch.int64)
            channel.broadcast(size, 0)
            message = torch.empty(int(size), dtype=torch.uint8)
            channel.broadcast(message, 0)
            handed: State = unpack(message.numpy().tobytes())
            return handed
        state = self._between.state()
        if channel.workers > 1:
            # A zero of any size takes as little room in the message as a single one.
            emptied = {
                key: value.cpu() if key.startswith(ALIKE) else value.new_zeros((), device="cpu").expand(value.shape)
                for key, value in state.items()
            }
            message = torch.frombuffer(bytearray(pack(emptied)), dtype=torch.uint8)
            channel.broadcast(torch.tensor([message.numel()]), 0)
            channel.broadcast(message, 0)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Hand what any worker of the host holds back to the leader: its host may have been another one before."""
        channel = self._inside(self._device)
        handed: State = {}
        for key in sorted(state):
            handed[key] = state[key].to("cpu", copy=True)
            if not key.startswith(ALIKE):
                channel.all_reduce(handed[key])
        self.compression = compression_in(state) or self.compression
        self.has_residual = True
        if self._between is not None:
            self._between.load_state(handed)

    def _run(self, flat: Tensor, look_at: Sequence[float]) -> ExchangeStats:
        channel = self._inside(flat.device)
        if channel.workers > 1:
            channel.all_reduce(flat)
        if self._between is not None:
            stats = self._between.run(flat, look_at)
        else:
            stats = ExchangeStats(
                sent_bytes=0,
                compress_s=0.0,
                sync_s=0.0,
                energy=0.0,
                kept_energy=0.0,
                look_energies=tuple(0.0 for _ in look_at),
            )
        if channel.workers > 1:
            channel.broadcast(flat, 0)
        self.has_residual = self.compression.name not in SENDS_ALL
        before, after = channel.messages[:1], channel.messages[1:]
        return replace(
            stats,
            sync_s=stats.sync_s + sum(message.time_s for message in channel.messages),
            messages=(*before, *stats.messages, *after),
        )

    def _inside(self, device: torch.device) -> Channel:
        return Channel(self._groups.inside, clock=self._clock, on=device, scope="host")
