"""How many steps a job needs to its target, at every batch size, compression and rhythm of averaging."""
