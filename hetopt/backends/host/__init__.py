"""A host's part in a run, and what hosts and whoever leads them tell each other, whatever the machines are."""
