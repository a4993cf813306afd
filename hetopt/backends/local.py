"""Runs on this machine: worker processes under torchrun, reachable from any terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetopt.backends.processes import ProcessLauncher, Program
from hetopt.core.listening import LOOPBACK, collectives_on
from hetopt.core.run_spec import RunSpec

QUIET_TORCH = {
    # The agent greets with paragraphs at INFO and WARNING; what matters to a person reaches the event log.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(ProcessLauncher):
    """Starts, watches and stops runs on this machine."""

    def program(self, spec: RunSpec, run_dir: Path) -> Program:
        """See `ProcessLauncher.program`."""
        return Program(
            module="hetopt.trainer.host.agent",
            log_name="host.log",
            defaults=QUIET_TORCH,
            fixed=collectives_on(LOOPBACK),
        )
