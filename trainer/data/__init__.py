"""Which samples a worker takes at a step."""
