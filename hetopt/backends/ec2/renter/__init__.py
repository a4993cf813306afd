"""Renting on EC2: what is asked for is computed first, carried out by an edge to AWS, and written down on the way."""
