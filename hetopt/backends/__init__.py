"""Execution targets of runs: this machine, a cluster emulated on it, own hosts, Slurm nodes, or rented machines."""
