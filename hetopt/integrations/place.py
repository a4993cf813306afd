"""What a framework is not to see of the other workers, and which versions of it are known."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from hetopt.core.errors import BadInput
from hetopt.trainer.session.joining import find_place, meet

_PATIENCE_S = 300.0
"""A worker that is later than this is lost."""

_TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_BY_MPI = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")


def check_version(package: str, least: tuple[int, int], below: int) -> None:
    """Refuse a framework whose insides are not known to be those that an integration uses.

    Args:
        package: its name on the index.
        least: version.
        below: first major version that is too new.

    Raises:
        BadInput: it is not installed, or of another version.
    """
    wanted = f"{package}>={least[0]}.{least[1]},<{below}"
    try:
        told = version(package)
    except PackageNotFoundError:
        raise BadInput(f"{package} is not installed.", hint=f"pip install '{wanted}'") from None
    major, minor = (int(part) for part in told.split(".")[:2])
    if not (least <= (major, minor) and major < below):
        raise BadInput(
            f"hetopt knows {package} from {least[0]}.{least[1]} to before {below}, and {told} is installed.",
            hint=f"pip install '{wanted}'",
        )


def find_worker() -> tuple[int, int]:
    """Rank and number of workers."""
    return find_place(os.environ)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, the environment tells of no other process."""
    hidden = {name: value for name, value in os.environ.items() if name in _TOLD or name.startswith(_BY_MPI)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def take_own_device(environment: Mapping[str, str]) -> None:
    """See one GPU, that of this worker: a framework that is alone takes the first it sees, or all."""
    local_rank = environment.get("LOCAL_RANK", "")
    if not local_rank.isdigit() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        return
    devices = torch.cuda.device_count()
    if devices > 1:
        shown = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[int(local_rank) % devices]


def stay_together(device: torch.device) -> None:
    """Meet the other workers until the process ends: frameworks train several times, and say things before they train.

    Args:
        device: that the model is to be on.
    """
    rank, world_size = find_worker()
    if world_size > 1 and not dist.is_initialized():
        atexit.register(meet(rank, world_size, _PATIENCE_S, device))
