"""Controllers: pure functions from gathered statistics to a decision that every rank reaches alike."""
