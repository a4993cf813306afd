"""Measures a training script as it is: runs it for some steps and watches torch's own hooks."""
