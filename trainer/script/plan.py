"""What a session is told beforehand: who takes how much, what is sent, and who decides on shares as it goes on.

The session of this process that is open, if there is one; and how a script ends when the run is asked to.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.core.artifact import read_record
from hetopt.core.batch_partition import largest_remainder, within_memory
from hetopt.core.comm.composition import AUTO
from hetopt.core.comm.compression_text import parse_compression
from hetopt.core.comm.options import way_name
from hetopt.core.errors import BadInput
from hetopt.core.paths import host_name
from hetopt.core.run_rules import OF_SESSIONS, checked
from hetopt.core.run_spec import (
    BatchPolicy,
    Compression,
    RunSpec,
    StopRule,
    Synchronization,
    WorkerSpec,
    parse_sync,
    spell_sync,
)


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """The plan of a script, the same on all workers.

    Attributes:
        spec: the run that the session is like. Its workers' batches weigh their shares; what a script does itself (its
            data, its end, its learning rate) does not count.
        as_one: whether every step of a DDP script is an audit: what one machine would compute.
    """

    spec: RunSpec
    as_one: bool = False

    @property
    def keeps_equal(self) -> bool:
        """True where each worker has the same samples of every batch from first to last, so that no step is audited."""
        return self.spec.batch_policy == "uniform"

    @property
    def description(self) -> str:
        """The exchange, policies and synchronization that all workers have to share, as a text to compare."""
        spec = self.spec
        policies = f"ratio policy {spec.ratio_policy}, collective {spec.collective_policy}, shares {spec.batch_policy}"
        return f"{way_name(spec.compression)}, {policies}, sync {spell_sync(spec.sync)}"

    def shares(self, batch_size: int, *, minimum: int = 1) -> tuple[int, ...]:
        """Return the first local batch sizes of a full batch, in rank order.

        Args:
            batch_size: samples.
            minimum: least share, where there are as many.

        Raises:
            BadInput: there are fewer samples than workers.
        """
        workers = len(self.spec.workers)
        if batch_size < workers:
            raise BadInput(
                f"the batch size must be at least {workers}, one sample a worker, got {batch_size}.",
                hint="use fewer workers or a larger batch size",
            )
        least = min(minimum, batch_size // workers)
        weights = [worker.local_batch_size for worker in self.spec.workers]
        shares = largest_remainder(weights, batch_size, minimum=[least] * workers, maximum=[None] * workers)
        return within_memory(self.spec, shares)

    def run_spec(self, shares: tuple[int, ...]) -> RunSpec:
        """Return the run's spec with these local batch sizes, for policies and the head of logs."""
        workers = (
            worker.model_copy(update={"local_batch_size": share})
            for worker, share in zip(self.spec.workers, shares, strict=True)
        )
        return self.spec.model_copy(update={"workers": tuple(workers)})


def make_plan(
    world_size: int,
    *,
    compression: Compression | str,
    policy: BatchPolicy,
    sync: Synchronization | str,
    spec: RunSpec | Path | str | None,
) -> SessionPlan:
    """Make the plan of a script from its arguments, or from the spec, which takes precedence.

    Raises:
        BadInput: it cannot be read, or is for another number of workers.
    """
    if spec is None:
        auto, host = compression == AUTO, host_name(socket.gethostname())
        if isinstance(compression, str):
            compression = Compression() if auto else parse_compression(compression, option="compression")
        checked(compression)
        return SessionPlan(
            spec=RunSpec(
                task=OF_SESSIONS,
                workers=tuple(
                    WorkerSpec(host=f"{host}-{rank}", type="local", local_batch_size=1) for rank in range(world_size)
                ),
                compression=compression,
                ratio_policy="auto" if auto else "fixed",
                collective_policy="cheapest" if auto else "fixed",
                sync=parse_sync(sync, option="sync") if isinstance(sync, str) else sync,
                batch_policy=policy,
                stop=StopRule(max_steps=1),
            )
        )
    planned = (
        spec if isinstance(spec, RunSpec) else read_record(RunSpec, Path(spec), hint="write it with `hetopt export`")
    )
    if len(planned.workers) != world_size:
        raise BadInput(
            f"The run is planned for {len(planned.workers)} workers, but {world_size} were started.",
            hint=f"start torchrun with {len(planned.workers)} processes in all",
        )
    return SessionPlan(spec=planned)


@dataclass
class Registry:
    """The open session of this process.

    Attributes:
        open: it, or nothing.
        begun: sessions that there ever were in this process.
    """

    open: tuple[Any, ...] = ()
    begun: int = 0

    def enter(self, session: object) -> None:
        """Note that a session begins.

        Raises:
            BadInput: another is open.
        """
        if self.open:
            raise BadInput(
                "A session began while another was open.",
                hint="give one session all models and optimizers: session((G, D), (optimizer_g, optimizer_d))",
            )
        self.open, self.begun = (session,), self.begun + 1


REGISTRY = Registry()


class Stopped(BaseException):
    """The exception of a stopped run. Raised on all workers between the same two steps; no script catches it."""
