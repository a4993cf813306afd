"""Planner: predicts time and cost of every cluster worth renting, and finds the best one. Never imports torch."""
