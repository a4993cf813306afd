"""Rehearsals: a run on a little cluster inside this machine, one network namespace a host, links at their rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.backend import RunHandle
from hetopt.backends.emulation.injection import CHANGES_FILE, check_change
from hetopt.backends.emulation.namespaces import check_size, find_leftovers, remove, why_not
from hetopt.backends.processes import QUIET_TORCH, ProcessLauncher, Program
from hetopt.core.errors import BadInput
from hetopt.core.events.log import EVENTS_FILE
from hetopt.core.run_folder import CONDITIONS_FILE
from hetopt.core.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class RehearsalLauncher(ProcessLauncher):
    """Starts, watches and stops rehearsals. The run's process is their conductor."""

    def _check(self, spec: RunSpec) -> None:
        if spec.miniature is None:
            raise BadInput("the run describes no cluster to rehearse.", hint='choose `on="local"`')
        check_size(len(spec.miniature.hosts))
        for change in spec.miniature.changes:
            check_change(spec, change)
        reason = why_not()
        if reason is not None:
            raise BadInput(f"no cluster can be rehearsed here: {reason}.", hint='choose `on="local"`')

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """See `ProcessLauncher.program`."""
        (run_dir / CHANGES_FILE).unlink(missing_ok=True)  # wishes of an earlier attempt
        if not (run_dir / EVENTS_FILE).exists():
            (run_dir / CONDITIONS_FILE).unlink(missing_ok=True)
        return Program(
            module="hetopt.backends.emulation.conductor",
            log_name="conductor.log",
            # Workers share the cores, and many hosts share few: one thread each, unless the spec says otherwise.
            defaults={"OMP_NUM_THREADS": "1", **QUIET_TORCH},
        )

    def stop(self, handle: RunHandle) -> None:
        """End the run; when it returns nothing of it is left, its network included."""
        super().stop(handle)
        run_dir = str(handle.run_dir.resolve())
        for network in find_leftovers():
            if network.purpose and run_dir.endswith(network.purpose):
                remove(network.id)
