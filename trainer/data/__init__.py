"""Training data: which samples a worker takes at a step, and how they become a batch."""
