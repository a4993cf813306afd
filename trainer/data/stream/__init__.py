"""Samples that arrive at a rate of their own: replayed from a data set, or out of a broker."""
