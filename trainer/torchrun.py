"""torchrun for a fixed number of machines, with nothing that listens outside of their network.

``python -m hetopt.trainer.torchrun ARGUMENTS`` takes torchrun's arguments. On one machine everything listens on
loopback. Of several machines each must know the secret of the run, in the variable HETOPT_GROUP_SECRET: the first lets
no other in (see `hetopt.trainer.host.gate`).
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import run as torchrun

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.listening import LOOPBACK, SECRET_VARIABLE, checked_secret, collectives_on
from hetopt.trainer.host.rendezvous import Rendezvous

_CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Of several machines a person may know which network is the run's own."""


def main(arguments: list[str]) -> None:
    """Start this machine's workers by torchrun's ``arguments``, with hetopt's rendezvous; wait until they end.

    Variables that say where collectives listen are set in this process; of several machines HETOPT_GROUP_SECRET is
    removed.

    Raises:
        BadInput: the arguments are for a changing number of machines or another rendezvous, the secret is missing, or
            machine 0 has no route to it.
        RunFailed: nothing can listen there, or machine 0 is not to be reached within 600 s or does not know the secret.
        ChildFailedError: torch's error where a worker of this machine failed.
        SignalException: torch's error where a signal ended it.
    """
    read = torchrun.parse_args(arguments)  # type: ignore[no-untyped-call]  # torch's gap
    fewest, _, most = str(read.nnodes).partition(":")
    if not fewest.isdigit() or most not in ("", fewest) or read.rdzv_endpoint:
        raise BadInput(
            "this form of torchrun is for a fixed number of machines.",
            hint="give --nnodes=NUMBER, --node-rank, --master-addr and --master-port",
        )
    hosts = int(fewest)
    if hosts == 1:
        meeting = Rendezvous.alone()
        os.environ.update(collectives_on(LOOPBACK))
    else:
        secret = checked_secret(os.environ.pop(SECRET_VARIABLE, None))
        address = (
            socket.gethostbyname(read.master_addr)
            if read.node_rank == 0
            else _address_towards(read.master_addr, read.master_port)
        )
        meeting = Rendezvous.among_others(read.node_rank, hosts, read.master_addr, read.master_port, secret)
        os.environ.update(collectives_on(address) | {name: os.environ[name] for name in _CHOSEN if name in os.environ})
    meeting.run_torchrun(arguments)


def _address_towards(address: str, port: int) -> str:
    """Return the address of this machine in the network of another one; BadInput: no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise BadInput(
                f"--master-addr {address} cannot be reached: {error.strerror}.", hint="give the address of machine 0"
            ) from None
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HetoptError as error:
        print(f"{error.message} {error.hint or ''}".strip(), file=sys.stderr)
        sys.exit(error.exit_code)
