"""Profiling as a short, instrumented training run: all workers execute the probe schedule, the leader logs it.

The events are the records of `hetopt.core.events.records`; `hetopt.profiler.collect` makes a profile of them.
"""

from hetopt.profiler.probe.run import run_probe

__all__ = ["run_probe"]
