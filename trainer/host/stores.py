"""The one place where a store is opened: it listens on a single address, never on all that a machine has.

torch's TCPStore listens on every interface, whatever address it is given, and has no password. Here it is handed a
socket that is bound already. On one machine that is behind a door on the loopback address, which is open to processes
of the same user; workers of several hosts reach the store of the first through a gate (see `hetopt.trainer.host.gate`).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hetopt.core.errors import BadInput, RunFailed
from hetopt.core.listening import LOOPBACK, is_loopback
from hetopt.trainer.host.gate import listening_socket, open_door

_TIMEOUT = datetime.timedelta(seconds=300)


def open_store(address: str = LOOPBACK, port: int = 0, timeout: datetime.timedelta = _TIMEOUT) -> TCPStore:
    """Return a store that is reached at one address alone, and lives as long as the object.

    On loopback it is open to processes of the same user (see `open_door`). The process that
    holds it must not ask for `list_keys` or `queue_len`: torch keeps the interpreter locked meanwhile, so that the door
    cannot answer.

    Raises:
        RunFailed: nothing can listen there (see `listening_socket`).
    """
    listener = listening_socket(address, port)
    taken = listener.getsockname()[1]
    if is_loopback(address):
        listener = open_door(listener)
    return TCPStore(
        address, taken, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def group_store(environment: Mapping[str, str], rank: int, timeout: datetime.timedelta = _TIMEOUT) -> Store:
    """The store through which the workers of a run meet, as torchrun's environment says where it is.

    torchrun's agent holds it, or rank 0 opens it, on the address that the others know it by and on no other. Workers
    that were started again do not see what the last ones left.

    Raises:
        BadInput: the variables are missing, or name no address that rank 0 could be reached by.
    """
    try:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise BadInput(
            "MASTER_ADDR and MASTER_PORT must say where rank 0 is.", hint="start the script with torchrun"
        ) from None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or rank != 0:
        store = TCPStore(address, port, is_master=False, timeout=timeout)
    else:
        _check_reachable(environment, address)
        try:
            store = open_store(address, port, timeout)
        except RunFailed as refused:
            raise BadInput(
                f"MASTER_ADDR is {address}, but {refused.message}",
                hint="set MASTER_ADDR to the address, in the workers' network, of the machine that has rank 0",
            ) from None
    return PrefixStore(f"attempt/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _check_reachable(environment: Mapping[str, str], address: str) -> None:
    """A host's name often means its loopback address on that host itself, where no other can reach it."""
    workers, here = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE")
    if here is not None and here != workers and is_loopback(address):
        raise BadInput(
            f"MASTER_ADDR is {address}, which other machines cannot reach: here it means this machine alone.",
            hint="set MASTER_ADDR to the address, in the workers' network, of the machine that has rank 0",
        )
