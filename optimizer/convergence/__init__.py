"""Optimizer steps that a job needs to its target, by batch size, compression and frequency of averaging."""
