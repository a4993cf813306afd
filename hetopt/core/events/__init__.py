"""A run's event log: its records, how they are written and how they are read."""
