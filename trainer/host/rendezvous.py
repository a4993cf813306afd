"""The rendezvous of a run's hosts for torchrun: each knows its number, and nothing that they tell is unpickled.

torchrun's own rendezvous either listens on every interface (``static``) or also unpickles what anybody has written into
its store (``c10d``). This one uses a store that `hetopt.core.listening` opens on loopback, and a gate between
hosts. `hetopt.trainer.torchrun` is torchrun with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hetopt.core.listening import LOOPBACK
from hetopt.trainer.host.gate import open_gate, open_relay, open_store

BACKEND = "hetopt"
MEETING_PATIENCE_S = 600.0
"""Seconds to wait for the first host: hosts that share a few cores import torch one after another."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A host's rendezvous for torchrun: the run's store and its port on this loopback, rank, and number of hosts.

    Attributes:
        store: the store itself, or a connection to it.
        port: port where the store is reached on this host's loopback address.
        rank: rank of this host.
        hosts: number of hosts.
    """

    store: TCPStore
    port: int
    rank: int = 0
    hosts: int = 1

    @classmethod
    def alone(cls) -> Rendezvous:
        """Return the rendezvous of a run on this machine alone, with a store that listens on loopback alone.

        Raises:
            RunFailed: nothing can listen on loopback.
        """
        store = open_store()
        return cls(store=store, port=store.port)

    @classmethod
    def among_others(cls, rank: int, hosts: int, address: str, port: int, secret: bytes) -> Rendezvous:
        """Return the rendezvous of one host of several: rank 0 opens the store, others wait 600 s at most to reach it.

        Args:
            rank: rank of this host; the first one holds the store.
            hosts: number of hosts.
            address: address of the first host in the run's network.
            port: port of the first host's gate.
            secret: secret of the run.

        Raises:
            RunFailed: nothing can listen at the address (rank 0), or the first host is not to be reached within 600 s.
            WrongSecret: the process that answers there does not know the secret (a RunFailed).
        """
        if rank == 0:
            store = open_store()
            open_gate(address, port, store.port, secret)
            return cls(store=store, port=store.port, rank=rank, hosts=hosts)
        relay = open_relay(address, port, secret, MEETING_PATIENCE_S)
        return cls(store=TCPStore(LOOPBACK, relay, is_master=False), port=relay, rank=rank, hosts=hosts)

    def run_torchrun(self, arguments: Sequence[str]) -> None:
        """Run torchrun's agent with ``arguments`` in this process until this host's workers end; once in a process.

        Raises:
            ChildFailedError: torch's error where a worker of this host failed and no restart is left.
            SignalException: torch's error where a signal ended the agent.
        """
        rendezvous_handler_registry.register(BACKEND, lambda parameters: _Handler(self, parameters.run_id))
        read = torchrun.parse_args(arguments)  # type: ignore[no-untyped-call]  # torch's gap
        read.standalone = False  # which would choose another backend
        read.rdzv_backend, read.rdzv_endpoint, read.local_addr = BACKEND, f"{LOOPBACK}:{self.port}", LOOPBACK
        torchrun.run(read)  # type: ignore[no-untyped-call]  # torch's gap


class _Handler(StaticTCPRendezvous):
    """The handler of torchrun's rendezvous. The hosts are those of the `Rendezvous`, in every round."""

    def __init__(self, meeting: Rendezvous, run_id: str) -> None:
        super().__init__(LOOPBACK, meeting.port, meeting.rank, meeting.hosts, run_id, timeout=0)
        self._meeting, self._rounds = meeting, 0

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet again, in a part of the store of its own for each round."""
        self._rounds += 1
        self._store = PrefixStore(f"agents/{self._rounds}", self._meeting.store)
        return super().next_rendezvous()
