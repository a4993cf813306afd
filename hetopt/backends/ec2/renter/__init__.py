"""Renting on EC2: what is asked for is computed first, carried out through one edge, and written down on the way."""
