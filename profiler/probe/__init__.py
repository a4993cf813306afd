"""Profiling as a short, instrumented training run: all workers execute the probe schedule, the leader logs it.

The events are the records of `hetopt.profiler.records`; `hetopt.profiler.collect` makes a profile of them.
"""
