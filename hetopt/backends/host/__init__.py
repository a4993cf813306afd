"""A host's part in a run, and what hosts and the process that leads them write to each other, on any machines."""
