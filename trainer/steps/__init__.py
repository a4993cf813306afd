"""One training step, and what makes it up: a worker's batch, its gradient, its pace, and the ways to exchange it."""
