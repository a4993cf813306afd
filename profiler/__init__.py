"""Measures a training job: pure estimators, the probe schedule, and the profile they fill."""
