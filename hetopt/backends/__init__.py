"""Execution targets of runs: this machine, a cluster emulated on it, hosts of one's own, or rented machines."""
