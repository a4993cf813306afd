"""Choose and run the cheapest, fastest cluster for distributed training on unequal, interruptible machines.

    import hetopt

    profile = hetopt.profile("digits")
    plan = hetopt.recommend(profile, budget_usd=2)
    run = hetopt.launch(plan, on=hetopt.Local(slowdowns=(1, 2)))
    run.wait()
    print(hetopt.report(run))

Names are imported when they are first used: planning never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetopt.api.catalogs import gpus as gpus
    from hetopt.api.converting import convert as convert
    from hetopt.api.launching import launch as launch, resume as resume
    from hetopt.api.options import (
        Ec2 as Ec2,
        Local as Local,
        Rehearsal as Rehearsal,
        Sky as Sky,
        Slurm as Slurm,
        Ssh as Ssh,
    )
    from hetopt.api.planning import Estimate as Estimate, estimate as estimate, recommend as recommend
    from hetopt.api.profiling import check as check, profile as profile
    from hetopt.api.run import Run as Run, report as report
    from hetopt.core.errors import HetoptError as HetoptError
    from hetopt.core.interruption import Reporter as Reporter
    from hetopt.core.profile import Profile as Profile
    from hetopt.optimizer.plan import Plan as Plan
    from hetopt.reports.report import Report as Report
    from hetopt.trainer.ddp.comm_hook import CommState as CommState, comm_hook as comm_hook
    from hetopt.trainer.session import session as session
    from hetopt.trainer.task import Target as Target, Task as Task, TaskData as TaskData

    __version__: str

_HOMES = {
    "CommState": "hetopt.trainer.ddp.comm_hook",
    "Ec2": "hetopt.backends.options",
    "Estimate": "hetopt.api.planning",
    "HetoptError": "hetopt.core.errors",
    "Local": "hetopt.backends.options",
    "Plan": "hetopt.optimizer.plan",
    "Profile": "hetopt.core.profile",
    "Rehearsal": "hetopt.backends.options",
    "Report": "hetopt.reports.report",
    "Reporter": "hetopt.core.interruption",
    "Run": "hetopt.api.run",
    "Sky": "hetopt.backends.options",
    "Slurm": "hetopt.backends.options",
    "Ssh": "hetopt.backends.options",
    "Target": "hetopt.trainer.task",
    "Task": "hetopt.trainer.task",
    "TaskData": "hetopt.trainer.task",
    "check": "hetopt.api.profiling",
    "comm_hook": "hetopt.trainer.ddp.comm_hook",
    "convert": "hetopt.api.converting",
    "estimate": "hetopt.api.planning",
    "gpus": "hetopt.api.catalogs",
    "launch": "hetopt.api.launching",
    "profile": "hetopt.api.profiling",
    "recommend": "hetopt.api.planning",
    "report": "hetopt.api.run",
    "resume": "hetopt.api.launching",
    "session": "hetopt.trainer.session",
}
"""Where each name of the library is defined."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Return a name of the library, imported now (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hetopt")
    if name not in _HOMES:
        raise AttributeError(f"module 'hetopt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the names that can be used here: without torch, ``help(hetopt)`` and completion are of planning."""
    from importlib.util import find_spec

    has_torch = find_spec("torch") is not None
    names = [name for name in __all__ if has_torch or not _HOMES.get(name, "").startswith("hetopt.trainer.")]
    return sorted([*names, *(name for name in globals() if name.startswith("__"))])
