"""Compares a run with its plan while it goes on, and says when something else would be better, and by how much."""
