"""Checkpoints: what a run needs to go on after an interruption, written while it trains, whole or not at all."""
