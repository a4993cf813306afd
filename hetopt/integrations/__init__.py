"""Training frameworks in which a session trains: one module each, imported by scripts that use the framework.

A framework is told that it is alone, on every worker: its batch size, schedule and number of steps are those of one
machine. The session shares out what its loader reads and sums what its backward passes make.
"""
