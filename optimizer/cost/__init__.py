"""Expected cost of a run: its bill line by line, preemptions of spot machines included."""
