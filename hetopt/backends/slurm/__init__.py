"""Nodes of a Slurm cluster: a job each, and a command that runs on one."""
