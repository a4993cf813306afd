"""How another process asks a running rehearsal to change a host: a line in a file that the conductor reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from hetopt.backends.processes import run_status
from hetopt.core.errors import BadInput
from hetopt.core.run_folder import read_spec
from hetopt.core.run_spec import RunSpec
from hetopt.core.scaled_emulation import EVERY_HOST, Change

CHANGES_FILE = "changes.jsonl"


def ask_for_change(run_dir: Path, change: Change) -> None:
    """Ask the rehearsal in ``run_dir`` for a change; it happens within a tenth of a second, or when it is due.

    Raises:
        BadInput: the run is no rehearsal, is over, has no such host, or the host cannot change so.
    """
    spec = read_spec(run_dir)
    check_change(spec, change)
    if run_status(run_dir).state.is_over:
        raise BadInput(f"the run {run_dir.name} is over.", hint="start it again with `hetopt launch`")
    # One write of one line to a file opened for appending: requests made at the same time do not mix.
    descriptor = os.open(run_dir / CHANGES_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, change.model_dump_json().encode() + b"\n")
    finally:
        os.close(descriptor)


def check_change(spec: RunSpec, change: Change) -> None:
    """Refuse what cannot be done to this run.

    Raises:
        BadInput: so it is.
    """
    if spec.miniature is None:
        raise BadInput("the run is no rehearsal, so its hosts stay as they are.", hint='use `on="rehearsal"`')
    hosts = {host.name: host for host in spec.miniature.hosts}
    if change.host != EVERY_HOST and change.host not in hosts:
        raise BadInput(
            f"the rehearsal has no host called {change.host!r}.",
            hint=f"its hosts are {', '.join(hosts)}, or '*' for all",
        )
    if change.cut and starts_again(spec):
        raise BadInput(
            "a host of a script's run cannot be cut off for a while: its workers would wait for it.",
            hint="let it die and return",
        )
    if (change.returns or change.notice or change.cut) and not (comes_and_goes(spec) or starts_again(spec)):
        what = "return" if change.returns else "be given notice" if change.notice else "be cut off for a while"
        raise BadInput(
            f"a host cannot {what}: this run ends with the first that dies.",
            hint="rehearse on several hosts, with `restarts` of at least 1",
        )
    if change.speed is None:
        return
    declared = {worker.host for worker in spec.workers if worker.declared is not None}
    for name in hosts if change.host == EVERY_HOST else [change.host]:
        if name not in declared:
            raise BadInput(
                f"the speed of {name} cannot change: its workers compute as fast as they can.",
                hint="rehearse with declared times",
            )


def comes_and_goes(spec: RunSpec) -> bool:
    """Whether the workers that are left go on from memory when one of the run's hosts dies."""
    return spec.is_elastic and spec.miniature is not None and len(spec.miniature.hosts) > 1


def starts_again(spec: RunSpec) -> bool:
    """Whether the hosts that are left start a script's workers again when one dies, who go on from a checkpoint."""
    survives = bool(spec.script) and spec.max_restarts > 0
    return survives and spec.miniature is not None and len(spec.miniature.hosts) > 1


def parse_requests(lines: Iterable[str]) -> Iterator[Change]:
    """The changes that were asked for; a line that is none is passed over."""
    for line in lines:
        try:
            yield Change.model_validate_json(line)
        except ValidationError:
            continue
