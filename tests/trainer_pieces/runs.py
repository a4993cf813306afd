"""Runs that differ from the plainest in what a test gives."""

from __future__ import annotations

from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec


def run_of(*shares: int, **changes: object) -> RunSpec:
    """Return a run of ``digits`` by workers with these shares of the batch."""
    workers = tuple(
        WorkerSpec(host=f"h{rank}", type="local", local_batch_size=share) for rank, share in enumerate(shares)
    )
    return RunSpec(**{"task": "digits", "workers": workers, "stop": StopRule(max_steps=100), **changes})
