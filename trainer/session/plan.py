"""What a session is told beforehand: who takes how much, what is sent, and who decides on shares as it goes on."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hetopt.profiler.errors import BadInput
from hetopt.trainer.exchange.checked import checked
from hetopt.trainer.exchange.menu import way_name
from hetopt.trainer.partition import largest_remainder
from hetopt.trainer.spec import BatchPolicy, Compression, RunSpec, StopRule, WorkerSpec


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """What all workers know alike.

    Attributes:
        weights: of the workers' shares, in rank order.
        types: of their machines.
        compression: of gradients.
        policy: of shares.
    """

    weights: tuple[float, ...]
    types: tuple[str, ...]
    compression: Compression
    policy: BatchPolicy

    @property
    def way(self) -> str:
        """Name of how gradients travel."""
        return way_name(self.compression)

    def shares(self, batch_size: int, *, minimum: int = 1) -> tuple[int, ...]:
        """Of a full batch, at first.

        Args:
            batch_size: samples.
            minimum: least share, where there are as many.

        Raises:
            BadInput: there are fewer samples than workers.
        """
        workers = len(self.weights)
        if batch_size < workers:
            raise BadInput(
                f"A batch of {batch_size} is too small for {workers} workers, which take at least one sample each.",
                hint="use fewer workers or a larger batch",
            )
        least = min(minimum, batch_size // workers)
        return largest_remainder(self.weights, batch_size, minimum=[least] * workers, maximum=[None] * workers)

    def run_spec(self, shares: tuple[int, ...]) -> RunSpec:
        """The session as a run: what policies are chosen by and logs begin with."""
        host = socket.gethostname()
        return RunSpec(
            task="session",
            workers=tuple(
                WorkerSpec(host=f"{host}-{rank}", type=type_, local_batch_size=share)
                for rank, (type_, share) in enumerate(zip(self.types, shares, strict=True))
            ),
            compression=self.compression,
            batch_policy=self.policy,
            stop=StopRule(max_steps=1),
        )


def make_plan(
    world_size: int, *, compression: Compression | str, policy: BatchPolicy, spec: RunSpec | Path | str | None
) -> SessionPlan:
    """From what a script says, or the spec that it was given, which then counts.

    Raises:
        BadInput: it cannot be read, or is for another number of workers.
    """
    if spec is None:
        return SessionPlan(
            weights=(1.0,) * world_size,
            types=("local",) * world_size,
            compression=parse_compression(compression),
            policy=policy,
        )
    told = spec if isinstance(spec, RunSpec) else _read(Path(spec))
    if len(told.workers) != world_size:
        raise BadInput(
            f"The run is planned for {len(told.workers)} workers, but {world_size} were started.",
            hint=f"start torchrun with {len(told.workers)} processes in all",
        )
    return SessionPlan(
        weights=tuple(float(worker.local_batch_size) for worker in told.workers),
        types=tuple(worker.type for worker in told.workers),
        compression=told.compression,
        policy=told.batch_policy,
    )


def parse_compression(said: Compression | str) -> Compression:
    """The record, or ``name`` or ``name:ratio`` as one.

    Raises:
        BadInput: there is no such compression, or the ratio is none.
    """
    if isinstance(said, str):
        name, _, ratio = said.partition(":")
        try:
            said = Compression(name=name, ratio=float(ratio)) if ratio else Compression(name=name)
        except (ValidationError, ValueError):
            raise BadInput(
                f"The ratio of '{said}' must be a number above 0 and not above 1.", hint="for example 'topk:0.01'"
            ) from None
    checked(said)
    return said


def _read(path: Path) -> RunSpec:
    try:
        return RunSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read: {error.strerror}.", hint="name the file `hetopt export` wrote"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadInput(f"{path}: {where}: {first['msg']}.", hint="write it again with `hetopt export`") from None
